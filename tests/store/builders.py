"""Rows in one call, each different from every other."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from typing import NamedTuple

from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.encoding import EntityId
from protocol.statuses import (
    INPUT_FOR_REASON,
    InvalidReason,
    SubEvent,
    SubInput,
    SubState,
    TokenInput,
    TokenStatus,
)
from store.interface import NtfStore
from store.records import (
    CreatedSubscription,
    NewSubscription,
    NewToken,
    Notification,
    QueueEvent,
    ServerKey,
    SnewRefusal,
    SubscriptionRecord,
    TokenKey,
    TokenMove,
    TokenRecord,
)
from store.sums import STATE_COLUMNS, read_state

_numbers = count()

TODAY = 1_700_006_400
NOW = TODAY + 5_000
SERVICE_ID = EntityId(b"s" * 24)
OTHER_SERVICE_ID = EntityId(b"o" * 24)


def unique(size: int = 24) -> bytes:
    return sha256(next(_numbers).to_bytes(8, "big")).digest()[:size]


def entity() -> EntityId:
    return EntityId(unique())


def device() -> ApnsToken:
    return ApnsToken(Provider.APNS_NULL, unique(32))


def router(name: str = "router.example", port: str = "") -> SmpServer:
    return SmpServer((name,), port, b"h" * 32)


def new_token(device_token: DeviceToken | None = None, *, updated_on: int = TODAY) -> NewToken:
    return NewToken(
        token_id=entity(),
        device_token=device_token or device(),
        verify_key=unique(32),
        dh_private=unique(32),
        dh_secret=unique(32),
        code=unique(32),
        updated_on=updated_on,
    )


async def active_token(store: NtfStore) -> TokenRecord:
    token = await store.create_token(new_token())
    await store.move_token(token, TokenInput.CODE_MATCHED, TODAY)
    found = await find_token(store, token.token_id)
    assert found is not None
    return found


async def look_and_move(
    store: NtfStore, key: TokenKey, event: TokenInput, updated_on: int = TODAY
) -> TokenMove | None:
    """As a command does it: on what it sees."""
    found = await store.tokens_by_key([key])
    return await store.move_token(found[0], event, updated_on) if found else None


TOKEN_STATUSES = (
    TokenStatus.REGISTERED,
    TokenStatus.CONFIRMED,
    TokenStatus.ACTIVE,
    *(TokenStatus(f"INVALID,{reason}") for reason in InvalidReason),
)
"Those that a stored token comes to."


async def bring_to(store: NtfStore, key: TokenKey, status: TokenStatus) -> None:
    """Into any of these, on the ways that commands and providers go."""
    for reason, event in INPUT_FOR_REASON.items():
        if status == f"INVALID,{reason}":
            await look_and_move(store, key, event)
            return
    (token,) = await store.tokens_by_key([key])
    await store.replace_device_token(key, token.device_token, token.code, TODAY)
    if status is TokenStatus.CONFIRMED:
        await look_and_move(store, key, TokenInput.VERIFICATION_ACCEPTED)
    if status is TokenStatus.ACTIVE:
        await look_and_move(store, key, TokenInput.CODE_MATCHED)


def new_subscription(
    token_key: TokenKey, server: SmpServer | None = None, notifier_id: EntityId | None = None
) -> NewSubscription:
    return NewSubscription(
        subscription_id=entity(),
        token_key=token_key,
        server=server or router(),
        notifier_id=notifier_id or entity(),
        notifier_key=unique(32),
    )


async def subscribe(store: NtfStore, new: NewSubscription) -> CreatedSubscription:
    created = await create_one(store, new)
    assert created is not None
    return created


def nmsg(notifier_id: EntityId) -> Notification:
    return Notification(notifier_id, unique(24), unique(32))


def happened(notifier_id: EntityId, what: SubInput) -> QueueEvent:
    return QueueEvent(notifier_id, SubEvent(what, "QUOTA" if what is SubInput.FAILED else ""))


async def find_token(store: NtfStore, token_id: EntityId) -> TokenRecord | None:
    (found,) = await store.tokens([token_id])
    return found


async def find_subscription(store: NtfStore, subscription_id: EntityId) -> SubscriptionRecord | None:
    (found,) = await store.subscriptions([subscription_id])
    return found


async def create_one(store: NtfStore, new: NewSubscription) -> CreatedSubscription | None:
    (created,) = await store.create_subscriptions([new])
    return None if isinstance(created, SnewRefusal) else created


class QueueState(NamedTuple):
    subscription_id: EntityId
    notifier_id: EntityId
    server_key: ServerKey
    state: SubState
    associated: bool


def queue_states(db: sqlite3.Connection) -> Iterator[QueueState]:
    """All that a database holds, as they are by what happened to their routers."""
    for subscription_id, notifier_id, server_key, *columns in db.execute(
        f"SELECT subscription_id, notifier_id, server_key, {STATE_COLUMNS}"
        " FROM subscriptions s JOIN smp_servers v USING (server_key)"
    ):
        stored, turns = read_state(columns)
        yield QueueState(subscription_id, notifier_id, server_key, stored.now(turns), stored.associated)
