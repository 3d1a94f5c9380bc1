"""Who sent a command: find the entity, check the authorisation, at the same cost whether it exists or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias, TypeVar

from protocol.authorization import verify
from protocol.connection import Received
from protocol.crypto import AuthPublicKey, Ed25519PublicKey, decode_public_key
from protocol.encoding import EntityId
from protocol.ntf_commands import NtfCommand, Ping, Schk, Sdel, Snew, Tnew
from protocol.session_params import SessionParams
from store.interface import CommandStore
from store.records import SubscriptionRecord, TokenRecord

VERIFIED_AT_A_TIME = 32
"Signatures checked before other connections get a turn: a few milliseconds at most."

T = TypeVar("T")

Entity: TypeAlias = TokenRecord | SubscriptionRecord | None
Request: TypeAlias = Received[NtfCommand]


class Denied:
    """The only answer to an unknown entity, a wrong key and a wrong signature."""


DENIED = Denied()
_DECOY_KEY = Ed25519PublicKey(bytes(32)).der
_SUBSCRIPTION_COMMANDS = frozenset({Schk, Sdel})
_TOKENLESS_COMMANDS = frozenset({Tnew, Ping}) | _SUBSCRIPTION_COMMANDS


class Authenticator:
    def __init__(self, store: CommandStore) -> None:
        self._store = store

    async def authenticate(self, params: SessionParams, requests: Sequence[Request]) -> list[Entity | Denied]:
        """One result per request: its entity (None for commands that have none) or DENIED."""
        entities = await self._find(requests)
        results: list[Entity | Denied] = []
        for index, (request, entity) in enumerate(zip(requests, entities, strict=True)):
            if index and index % VERIFIED_AT_A_TIME == 0:
                await asyncio.sleep(0)
            results.append(entity if _authorised(params, request, entity) else DENIED)
        return results

    async def _find(self, requests: Sequence[Request]) -> list[Entity]:
        """Each entity is read once, also for a client that names its token in every command."""
        subscription_ids = {r.entity_id for r in requests if type(r.message) in _SUBSCRIPTION_COMMANDS}
        token_ids = {_token_id(r) for r in requests if type(r.message) not in _TOKENLESS_COMMANDS}
        subscriptions = await _by_id(self._store.subscriptions, subscription_ids)
        tokens = await _by_id(self._store.tokens, token_ids)

        def find(request: Request) -> Entity:
            kind = type(request.message)
            if kind in _SUBSCRIPTION_COMMANDS:
                return subscriptions[request.entity_id]
            return None if kind in _TOKENLESS_COMMANDS else tokens[_token_id(request)]

        return [find(request) for request in requests]


async def _by_id(
    read: Callable[[Sequence[EntityId]], Awaitable[list[T]]], ids: Collection[EntityId]
) -> dict[EntityId, T]:
    return dict(zip(ids, await read(list(ids)), strict=True)) if ids else {}


def _token_id(request: Request) -> EntityId:
    return request.message.token_id if isinstance(request.message, Snew) else request.entity_id


def _authorised(params: SessionParams, request: Request, entity: Entity) -> bool:
    if isinstance(request.message, Ping):
        return True
    key: AuthPublicKey | None
    if isinstance(request.message, Tnew):
        key = request.message.auth_key
    else:
        stored = decode_public_key(_DECOY_KEY if entity is None else entity.verify_key)
        key = None if entity is None else stored
    return verify(params, key, request.raw)
