"""Who sent a command: find the entity, check the authorisation, at the same cost whether it exists or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from protocol.connection import Received
from protocol.crypto import AuthPublicKey, Ed25519PublicKey, decode_public_key
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import NtfCommand, Ping, Schk, Sdel, Snew, Tnew
from protocol.session_params import SessionParams
from protocol.transmission import verify
from store.interface import CommandStore
from store.records import SubscriptionRecord, TokenRecord
from transport.budget import CpuBudget

Entity: TypeAlias = TokenRecord | SubscriptionRecord | None
Request: TypeAlias = Received[NtfCommand]


class Denied:
    """The only answer to an unknown entity, a wrong key and a wrong signature."""


DENIED = Denied()
_DECOY_KEY = Ed25519PublicKey(bytes(32)).der
_SUBSCRIPTION_COMMANDS = frozenset({Schk, Sdel})
_TOKENLESS_COMMANDS = frozenset({Tnew, Ping})
_NO_ENTITY_PLACE: tuple[dict[EntityId, Entity], EntityId] = ({NO_ENTITY: None}, NO_ENTITY)


class Authenticator:
    def __init__(self, store: CommandStore, budget: CpuBudget) -> None:
        self._store = store
        self._budget = budget

    async def authenticate(
        self, params: SessionParams, requests: Sequence[Request], source: str
    ) -> list[Entity | Denied]:
        """One result per request: its entity (None for commands that have none) or DENIED.

        The CPU time is charged to `source`.
        """
        entities = await self._find(requests)
        results: list[Entity | Denied] = []
        # Keys that are the client's own. Others are decoded each time, as for an entity that does not exist.
        proven: dict[bytes, AuthPublicKey] = {}
        while len(results) < len(requests):
            with await self._budget.take(source) as work:
                for request, entity in zip(requests[len(results) :], entities[len(results) :], strict=True):
                    results.append(entity if _authorised(params, request, entity, proven) else DENIED)
                    if work.is_over:
                        break
        return results

    async def _find(self, requests: Sequence[Request]) -> list[Entity]:
        """Each entity is read once, also for a client that names its token in every command."""
        subscriptions: dict[EntityId, Entity] = {}
        tokens: dict[EntityId, Entity] = {}
        places = [_place(request, subscriptions, tokens) for request in requests]
        if subscriptions:
            ids = list(subscriptions)
            subscriptions.update(zip(ids, await self._store.subscriptions(ids), strict=True))
        if tokens:
            ids = list(tokens)
            tokens.update(zip(ids, await self._store.tokens(ids), strict=True))
        return [found[entity_id] for found, entity_id in places]


def _place(
    request: Request, subscriptions: dict[EntityId, Entity], tokens: dict[EntityId, Entity]
) -> tuple[dict[EntityId, Entity], EntityId]:
    """Where the request's entity will be, and under which id."""
    message = request.message
    kind = type(message)
    if kind in _SUBSCRIPTION_COMMANDS:
        found, entity_id = subscriptions, request.entity_id
    elif kind in _TOKENLESS_COMMANDS:
        return _NO_ENTITY_PLACE
    else:
        found, entity_id = tokens, message.token_id if isinstance(message, Snew) else request.entity_id
    found[entity_id] = None
    return found, entity_id


def _authorised(
    params: SessionParams, request: Request, entity: Entity, proven: dict[bytes, AuthPublicKey]
) -> bool:
    if isinstance(request.message, Ping):
        return True
    if isinstance(request.message, Tnew):
        return verify(params, request.message.auth_key, request.raw)
    der = _DECOY_KEY if entity is None else entity.verify_key
    key = proven.get(der) or decode_public_key(der)
    if not verify(params, None if entity is None else key, request.raw):
        return False
    proven[der] = key
    return True
