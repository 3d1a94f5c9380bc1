"""A process that writes to a store and tells each acknowledged write, until it is killed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from protocol.addresses import SmpServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store.records import NewSubscription, NewToken, Notification
from store.sqlite import SqliteStore
from tests.store.builders import create_one

WORKERS = 8
SERVER = SmpServer(("router.example",), "", b"h" * 32)


def tell(*words: str) -> None:
    """In one write, so that a kill leaves no half line that looks whole."""
    os.write(1, (" ".join(words) + "\n").encode())


async def work(store: SqliteStore) -> None:
    token = await store.create_token(
        NewToken(
            token_id=EntityId(os.urandom(24)),
            device_token=ApnsToken(Provider.APNS_NULL, os.urandom(32)),
            verify_key=os.urandom(32),
            dh_private=os.urandom(32),
            dh_secret=os.urandom(32),
            code=os.urandom(32),
            updated_on=0,
        )
    )
    await store.move_token(token, TokenInput.CODE_MATCHED, 0)
    tell("token", token.token_id.hex())
    round_number = 0
    while True:
        round_number += 1
        new = NewSubscription(
            subscription_id=EntityId(os.urandom(24)),
            token_key=token.key,
            server=SERVER,
            notifier_id=EntityId(os.urandom(24)),
            notifier_key=os.urandom(48),
        )
        created = await create_one(store, new)
        assert created is not None
        tell("subscription", new.subscription_id.hex())
        nonce = round_number.to_bytes(24, "big")
        await store.add_notifications(
            created.server_key, [Notification(new.notifier_id, nonce, b"meta")], received_at=round_number
        )
        tell("notification", new.subscription_id.hex(), nonce.hex())
        if round_number % 3 == 0:
            tell("deleting", new.subscription_id.hex())
            await store.delete_subscription(created.queue.key)
            tell("deleted", new.subscription_id.hex())


async def main(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(work(store))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
