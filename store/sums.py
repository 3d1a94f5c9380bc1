"""The sums that must change together with the rows: collected in a transaction, written once at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.encoding import EntityId
from protocol.ids_hash import NO_IDS, ids_hash, xor
from protocol.statuses import SubState, TokenStatus
from store.records import DeletedSubscription, Moved, ServerKey


class Sums:
    __slots__ = ("active_subscriptions", "active_tokens", "associated", "subscriptions", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.active_tokens = 0
        self.subscriptions = 0
        self.active_subscriptions = 0
        self.associated: dict[ServerKey, tuple[int, bytes]] = {}
        "By how many each router's associations change, and what their hash is XORed with."

    def add_associated(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> None:
        self._change_associated(key, len(notifier_ids), notifier_ids)

    def remove_associated(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> None:
        self._change_associated(key, -len(notifier_ids), notifier_ids)

    def _change_associated(self, key: ServerKey, change: int, notifier_ids: Sequence[EntityId]) -> None:
        if notifier_ids:
            count, digest = self.associated.get(key, (0, NO_IDS))
            # Its own inverse: an id that leaves is XORed in again.
            self.associated[key] = (count + change, xor(digest, ids_hash(notifier_ids)))

    def token_moved(self, before: TokenStatus, after: TokenStatus) -> None:
        self.active_tokens += (after is TokenStatus.ACTIVE) - (before is TokenStatus.ACTIVE)

    def token_deleted(self, status: str) -> None:
        self.tokens -= 1
        self.active_tokens -= status == TokenStatus.ACTIVE

    def queues_moved(self, moves: Iterable[Moved]) -> None:
        self.active_subscriptions += sum(
            (move.after is SubState.ACTIVE) - (move.before is SubState.ACTIVE) for move in moves
        )

    def subscriptions_deleted(self, deleted: Sequence[DeletedSubscription], states: Iterable[str]) -> None:
        associated: dict[ServerKey, list[EntityId]] = {}
        for row in deleted:
            if row.associated:
                associated.setdefault(row.server_key, []).append(row.notifier_id)
        for server_key, notifier_ids in associated.items():
            self.remove_associated(server_key, notifier_ids)
        self.active_subscriptions -= sum(state == SubState.ACTIVE for state in states)
        self.subscriptions -= len(deleted)
