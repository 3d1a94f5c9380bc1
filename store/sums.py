"""The sums that must change together with the rows: collected in a transaction, written once at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.encoding import EntityId
from protocol.ids_hash import ids_hash, xor
from protocol.statuses import SubState, TokenStatus
from store.records import DeletedSubscription, ServerKey
from store.router_sums import RouterChanges, StoredState


class Sums:
    __slots__ = ("active_subscriptions", "active_tokens", "routers", "subscriptions", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.active_tokens = 0
        self.subscriptions = 0
        self.active_subscriptions = 0
        "Follows from the routers' sums, when these are written."
        self.routers: dict[ServerKey, RouterChanges] = {}

    def queues_changed(
        self, key: ServerKey, before: Iterable[StoredState], after: Iterable[StoredState]
    ) -> None:
        """Rows of a router that were written, or are gone."""
        for sign, states in ((-1, before), (1, after)):
            for stored in states:
                if stored.associated or stored.state is SubState.ACTIVE:  # no other counts, now or later
                    self._of_router(key).states[stored] += sign

    def associations_changed(self, key: ServerKey, notifier_ids: Sequence[EntityId]) -> None:
        """Queues became associated, or no longer are: a hash is its own inverse."""
        if notifier_ids:
            changes = self._of_router(key)
            changes.digest = xor(changes.digest, ids_hash(notifier_ids))

    def _of_router(self, key: ServerKey) -> RouterChanges:
        return self.routers.setdefault(key, RouterChanges())

    def token_moved(self, before: TokenStatus, after: TokenStatus) -> None:
        self.active_tokens += (after is TokenStatus.ACTIVE) - (before is TokenStatus.ACTIVE)

    def token_deleted(self, status: str) -> None:
        self.tokens -= 1
        self.active_tokens -= status == TokenStatus.ACTIVE

    def subscriptions_deleted(
        self, deleted: Sequence[DeletedSubscription], states: Iterable[StoredState]
    ) -> None:
        associated: dict[ServerKey, list[EntityId]] = {}
        for row, stored in zip(deleted, states, strict=True):
            self.queues_changed(row.server_key, (stored,), ())
            if row.associated:
                associated.setdefault(row.server_key, []).append(row.notifier_id)
        for server_key, notifier_ids in associated.items():
            self.associations_changed(server_key, notifier_ids)
        self.subscriptions -= len(deleted)
