"""A daemon's subscriber with a real store, and real routers to subscribe at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ntf_server import router, router_session, subscriber
from ntf_server.clock import SystemClock
from ntf_server.config import SubscriberConfig
from ntf_server.journal import EventSink
from ntf_server.router import RouterStatus
from ntf_server.subscriber import RouterSubscriber
from protocol.addresses import SmpServer
from protocol.crypto import Ed25519PrivateKey
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.encoding import EntityId
from protocol.statuses import SubState, TokenInput
from smp_client.dialer import Dialer
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.journal_schema import JournalEvent
from store.records import NewSubscription, NewToken, ServerKey, Stored, SubKey, TokenKey
from store.sqlite import SqliteStore
from tests.faults import StoreFaults, with_faults
from tests.store.builders import create_one, queue_states
from tests.waiting import until

DATABASE = "ntf.db"
QUICK = SubscriberConfig(
    allow_private_routers=True, connect_timeout=1.0, command_timeout=1.0, ping_interval=0.3, ping_timeout=0.3
)
PATIENT = replace(QUICK, connect_timeout=30.0, command_timeout=30.0, ping_interval=60.0)
"On a busy machine, too, no connection ends for another reason than the test's."
MAX_ROUTERS = 100


def tune(monkeypatch: pytest.MonkeyPatch, **constants: float) -> None:
    """Give other values to constants that no operator sets."""
    for name, value in constants.items():
        modules = [module for module in (router, router_session, subscriber) if hasattr(module, name)]
        assert modules, name
        for module in modules:
            monkeypatch.setattr(module, name, value)


def watch_commands(router: Router, monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    """How many commands of each kind the router was asked for."""
    seen: dict[type, int] = {}
    strike: Callable[[type], None] = router.faults.strike

    def count(command: type) -> None:
        seen[command] = seen.get(command, 0) + 1
        strike(command)

    monkeypatch.setattr(router.faults, "strike", count)
    return seen


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(
        monkeypatch,
        FIRST_DELAY=0.02,
        LONGEST_DELAY=0.1,
        LONGEST_NEW_DELAY=0.1,
        IDENTITY_DELAY=0.1,
        FIRST_LEAVE=0.4,
        LONGEST_LEAVE=5.0,
        FIRST_BUSY=0.02,
        LONGEST_BUSY=0.1,
        LONGEST_REST=0.2,
        STATUS_INTERVAL=0.05,
    )


class CollectingSink:
    """The push side: remembers who was to be notified; can be full."""

    def __init__(self) -> None:
        self.notified: list[TokenKey] = []
        self.has_room = asyncio.Event()
        self.has_room.set()

    async def verify(self, token_key: TokenKey) -> None:
        raise AssertionError("routers verify nothing")

    async def notify(self, stored: Sequence[Stored], received_at: float) -> None:
        self.notified += [entry.token_key for entry in stored]
        await self.has_room.wait()


class ListJournal(EventSink):
    def __init__(self) -> None:
        self.events: list[tuple[JournalEvent, object, object]] = []

    def record(self, event: JournalEvent, **columns: Any) -> None:
        super().record(event, **columns)
        other = columns.get("total", columns.get("expected", columns.get("changed")))
        self.events.append((event, columns.get("count"), other))

    def count(self, event: JournalEvent) -> int:
        return sum(recorded == event for recorded, _, _ in self.events)


class ManualClock(SystemClock):
    """Wall time that can be moved on."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@dataclass
class Daemon:
    """The part of a daemon that deals with routers."""

    path: Path
    store: SqliteStore
    config: SubscriberConfig
    sink: CollectingSink = field(default_factory=CollectingSink)
    journal: ListJournal = field(default_factory=ListJournal)
    clock: ManualClock = field(default_factory=ManualClock)
    faults: StoreFaults = field(default_factory=StoreFaults)
    token_key: TokenKey | None = None

    def __post_init__(self) -> None:
        self.configure(self.config)

    def configure(
        self, config: SubscriberConfig, dialer: Dialer | None = None, max_routers: int = MAX_ROUTERS
    ) -> None:
        """Start over with other settings; before `running`."""
        self.config = config
        self.subscriber = RouterSubscriber(
            with_faults(self.store, self.faults),
            self.sink,
            self.clock,
            config,
            self.journal,
            max_routers=max_routers,
            dialer=dialer,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.subscriber.run())
            try:
                yield
            finally:
                task.cancel()

    async def add(
        self,
        server: SmpServer,
        queues: Sequence[LoadQueue],
        *,
        hand_over: bool = True,
        notifier_key: bytes | None = None,
    ) -> ServerKey:
        """Store queues as SNEW does, and hand them to the subscriber."""
        if self.token_key is None:
            self.token_key = await add_token(self.store)
        created = await asyncio.gather(
            *(
                create_one(
                    self.store,
                    NewSubscription(
                        subscription_id=EntityId(os.urandom(24)),
                        token_key=self.token_key,
                        server=server,
                        notifier_id=queue.notifier_id,
                        notifier_key=notifier_key or queue.notifier_key.der,
                    ),
                )
                for queue in queues
            )
        )
        assert created[0] is not None
        key = created[0].server_key
        if hand_over:
            for row in filter(None, created):
                self.subscriber.subscribe(key, server, row.queue)
        return key

    async def delete(self, queue: LoadQueue) -> None:
        """As SDEL does it."""
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            query = "SELECT sub_key FROM subscriptions WHERE notifier_id = ?"
            keys = [SubKey(key) for (key,) in db.execute(query, (queue.notifier_id,))]
        for key in keys:
            deleted = await self.store.delete_subscription(key)
            self.subscriber.forget([deleted] if deleted else [])

    async def see_drop(self, router: Router) -> None:
        """Have the router drop its connections, and the daemon notice it."""
        seen = self.journal.count(JournalEvent.SMP_DISCONNECTED)
        router.faults.drop_connections()
        await until(lambda: self.journal.count(JournalEvent.SMP_DISCONNECTED) > seen)

    def states(self) -> dict[EntityId, SubState]:
        """As they are in the file."""
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            return {queue.notifier_id: queue.state for queue in queue_states(db)}

    def unsent(self) -> int:
        """How many queues have a notification that waits for its push."""
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT count(*) FROM unsent_notifications").fetchone()[0])

    def count(self, state: SubState) -> int:
        return sum(stored is state for stored in self.states().values())

    def status(self) -> RouterStatus:
        (status,) = self.subscriber.status()
        return status


async def add_token(store: SqliteStore) -> TokenKey:
    token = await store.create_token(
        NewToken(
            token_id=EntityId(os.urandom(24)),
            device_token=new_device_token(),
            verify_key=Ed25519PrivateKey(os.urandom(32)).public.der,
            dh_private=os.urandom(32),
            dh_secret=os.urandom(32),
            code=os.urandom(32),
            updated_on=0,
        )
    )
    await store.move_token(token, TokenInput.CODE_MATCHED, 0)
    return token.key


def new_device_token() -> DeviceToken:
    return ApnsToken(Provider.APNS_PROD, os.urandom(32).hex().encode())


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / DATABASE)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def daemon(store: SqliteStore, tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / DATABASE, store, QUICK)


@pytest.fixture
def plain_daemon(store: SqliteStore, tmp_path: Path) -> Daemon:
    """One that does not log in as a service."""
    return Daemon(tmp_path / DATABASE, store, replace(QUICK, use_service_credentials=False))
