"""kill -9 while a router cannot serve requests: the service and its associations stay as they are."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.encoding import EntityId
from protocol.errors import INTERNAL, ErrorType, store_error
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.records import CreatedSubscription, NewSubscription, ServerRecord
from store.sqlite import SqliteStore
from tests.ntf_server.subscriber.conftest import add_token, watch_commands
from tests.ntf_server.test_cli import init
from tests.ntf_server.test_kill import Server
from tests.waiting import until

DATABASE = Path("d") / "ntf-server.db"


async def store_queues(path: Path, router: Router, queues: Sequence[LoadQueue]) -> ServerRecord:
    """Add subscriptions while no server runs; the router's record."""
    store = SqliteStore(path)
    await store.open()
    try:
        token_key = await add_token(store)
        created = await store.create_subscriptions(
            [
                NewSubscription(
                    subscription_id=EntityId(os.urandom(24)),
                    token_key=token_key,
                    server=router.address,
                    notifier_id=queue.notifier_id,
                    notifier_key=queue.notifier_key.der,
                )
                for queue in queues
            ]
        )
        assert isinstance(created[0], CreatedSubscription)
        return await store.server(created[0].server_key)
    finally:
        await store.close()


def associations(path: Path) -> tuple[bytes, bytes, int]:
    """Private key, service id and number of associated queues, as they are in the file."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        row: tuple[bytes, bytes, int] = db.execute(
            "SELECT private_key, service_id, associated_count FROM smp_servers"
        ).fetchone()
        return row


@asynccontextmanager
async def killed_at_the_end(server: Server) -> AsyncIterator[Server]:
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            await server.kill()


@pytest.mark.parametrize(
    ("command", "error"), [("NSUBS", INTERNAL), ("NSUB", store_error("disk is full"))], ids=["NSUBS", "NSUB"]
)
async def test_a_busy_router_and_kills_destroy_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, error: ErrorType
) -> None:
    """The server is killed after the first, the second and the fourth request of a session."""
    assert init(tmp_path).returncode == 0
    path = tmp_path / DATABASE
    async with Router.start() as router, killed_at_the_end(Server(tmp_path)) as server:
        queues = router.load.create_queues(6)
        await store_queues(path, router, queues[:3])
        await server.start()
        await until(lambda: associations(path)[2] == 3)
        await server.kill()
        before = await store_queues(path, router, queues[3:])
        router.faults.answer_errors(command, error)
        for requests in (1, 2, 4):
            seen = watch_commands(router, monkeypatch)
            await server.start()
            await until(lambda seen=seen, requests=requests: sum(seen.values()) >= requests)
            await server.kill()
        router.faults.answer_errors(command, None)
        await server.start()
        await until(lambda: associations(path)[2] == 6 and len(router.subscribed_notifiers()) == 6)
    assert before.credentials is not None
    assert associations(path) == (before.credentials.private_key, before.service_id, 6)
