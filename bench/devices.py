"""Devices with queues, straight into a store."""

from __future__ import annotations

import os
from collections.abc import Sequence

from protocol.addresses import SmpServer
from protocol.device_token import DeviceToken
from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store.interface import NtfStore
from store.records import CreatedSubscription, NewSubscription, NewToken, ServerKey, TokenKey, TokenRecord

Queue = tuple[EntityId, bytes]
"Notifier id and key."


def new_id() -> EntityId:
    return EntityId(os.urandom(24))


async def add_token(store: NtfStore, device: DeviceToken, verify_key: bytes = b"") -> TokenRecord:
    """Verified."""
    token = await store.create_token(
        NewToken(
            token_id=new_id(),
            device_token=device,
            verify_key=verify_key or os.urandom(44),
            dh_private=os.urandom(32),
            dh_secret=os.urandom(32),
            code=os.urandom(32),
            updated_on=0,
        )
    )
    await store.move_token(token, TokenInput.CODE_MATCHED, 0)
    return token


def new_subscription(token_key: TokenKey, server: SmpServer, queue: Queue) -> NewSubscription:
    return NewSubscription(
        subscription_id=new_id(),
        token_key=token_key,
        server=server,
        notifier_id=queue[0],
        notifier_key=queue[1],
    )


async def add_device(
    store: NtfStore, device: DeviceToken, server: SmpServer, queues: Sequence[Queue]
) -> ServerKey:
    """A device with queues of one router."""
    token = await add_token(store, device)
    news = [new_subscription(token.key, server, queue) for queue in queues]
    created = (await store.create_subscriptions(news))[0]
    assert isinstance(created, CreatedSubscription), created
    return created.server_key
