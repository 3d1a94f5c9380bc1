"""Counts and hashes that are kept must equal those counted anew, after any sequence of calls."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.ids_hash import ids_hash
from protocol.statuses import SUB_MOVES, SubInput, SubState, TokenInput
from store.interface import StoreError
from store.records import (
    Counts,
    CreatedSubscription,
    NewSubscription,
    NewToken,
    SentEntry,
    ServerKey,
    SubKey,
    TokenKey,
)
from store.sqlite import SqliteStore
from tests.store.builders import (
    NOW,
    OTHER_SERVICE_ID,
    SERVICE_ID,
    TODAY,
    QueueState,
    create_one,
    device,
    find_subscription,
    happened,
    look_and_move,
    new_subscription,
    new_token,
    nmsg,
    queue_states,
    router,
)

T = TypeVar("T")

ROUTERS = [router("one.example"), router("two.example")]
DEVICES = [device(), device()]


def _moved(queue: QueueState, event: SubInput) -> QueueState:
    return queue._replace(state=SUB_MOVES.get((queue.state, event), queue.state))


def lost(queue: QueueState) -> QueueState:
    return _moved(queue, SubInput.DISCONNECTED)


def served(queue: QueueState) -> QueueState:
    return _moved(queue, SubInput.SUBSCRIBED) if queue.associated else queue


def cleared(queue: QueueState) -> QueueState:
    return _moved(queue, SubInput.SERVICE_CLEARED)._replace(associated=False) if queue.associated else queue


class Sums(RuleBasedStateMachine):
    tokens = Bundle("tokens")
    queues = Bundle("queues")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.path = Path(self.folder.name) / "ntf.db"
        self.store = SqliteStore(self.path)
        self.run(self.store.open())
        self.server_keys: dict[SmpServer, ServerKey] = {}

    def run(self, call: Awaitable[T]) -> T:
        async def wait() -> T:
            return await call

        return self.runner.run(wait())

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()
        self.folder.cleanup()

    @initialize(target=queues)
    def associate_queues(self) -> object:
        """Both routers start with queues of our service, so that every rule has something to take away."""
        token = self.run(self.store.create_token(new_token()))
        self.run(self.store.move_token(token, TokenInput.CODE_MATCHED, TODAY))
        news = [new_subscription(token.key, server) for server in ROUTERS for _ in range(4)]
        for new in news:
            self.subscribe_again(new)
        for server, key in self.server_keys.items():
            self.run(self.store.set_service_id(key, SERVICE_ID))
            self.run(self.store.set_subscribed(key, self.chosen(server, news), service_id=SERVICE_ID))
        return multiple(*news)

    @rule(target=tokens, device_token=st.sampled_from(DEVICES))
    def create_token(self, device_token: object) -> TokenKey:
        assert device_token in DEVICES
        return self.run(self.store.create_token(new_token(DEVICES[DEVICES.index(device_token)]))).key

    @rule(key=tokens, event=st.sampled_from([*TokenInput, TokenInput.CODE_MATCHED]))
    def move_token(self, key: TokenKey, event: TokenInput) -> None:
        self.run(look_and_move(self.store, key, event))

    @rule(key=tokens)
    def replace_device(self, key: TokenKey) -> None:
        self.run(self.store.replace_device_token(key, device(), b"code", TODAY))

    @rule(key=consumes(tokens))
    def delete_token(self, key: TokenKey) -> None:
        self.run(self.store.delete_token(key))

    @rule()
    def delete_the_rest(self) -> None:
        self.run(self.store.delete_more())
        self.run(self.store.delete_unused_servers())
        self.server_keys = {
            server: key for server, key in self.server_keys.items() if self.run(self.has_router(key))
        }

    async def has_router(self, key: ServerKey) -> bool:
        try:
            return bool(await self.store.server(key))
        except StoreError:
            return False

    @rule()
    def purge(self) -> None:
        self.run(self.store.purge_tokens(unverified_before=0, invalid_before=TODAY + 1, limit=1))

    @rule(target=queues, key=tokens, server=st.sampled_from(ROUTERS), count=st.integers(1, 4))
    def subscribe(self, key: TokenKey, server: SmpServer, count: int) -> object:
        news = [new_subscription(key, server) for _ in range(count)]

        async def create() -> None:
            for new, created in zip(news, await self.store.create_subscriptions(news), strict=True):
                if isinstance(created, CreatedSubscription):
                    self.server_keys[new.server] = created.server_key

        self.run(create())
        return multiple(*news)

    @rule(new=queues)
    def subscribe_again(self, new: NewSubscription) -> None:
        created = self.run(create_one(self.store, new))
        if created is not None:
            self.server_keys[new.server] = created.server_key

    @rule(new=queues)
    def delete_subscription(self, new: NewSubscription) -> None:
        found = self.run(find_subscription(self.store, new.subscription_id))
        if found is not None:
            assert self.run(self.store.delete_subscription(found.key)) is not None

    def chosen(self, server: SmpServer, news: list[NewSubscription]) -> list[EntityId]:
        return [new.notifier_id for new in news if new.server == server]

    @rule(
        server=st.sampled_from(ROUTERS),
        news=st.lists(queues, min_size=1, max_size=6),
        service_id=st.sampled_from([None, SERVICE_ID, SERVICE_ID, OTHER_SERVICE_ID]),
    )
    def set_subscribed(
        self, server: SmpServer, news: list[NewSubscription], service_id: EntityId | None
    ) -> None:
        if key := self.server_keys.get(server):
            self.run(self.store.set_subscribed(key, self.chosen(server, news), service_id=service_id))

    @rule(
        server=st.sampled_from(ROUTERS),
        news=st.lists(queues, min_size=1, max_size=4),
        what=st.sampled_from([what for what in SubInput if what is not SubInput.SERVICE_CLEARED]),
    )
    def move_queues(self, server: SmpServer, news: list[NewSubscription], what: SubInput) -> None:
        if key := self.server_keys.get(server):
            events = [happened(notifier_id, what) for notifier_id in self.chosen(server, news)]
            self.run(self.store.move_queues(key, events, now=NOW))

    @rule(server=st.sampled_from(ROUTERS), service_id=st.sampled_from([SERVICE_ID, OTHER_SERVICE_ID]))
    def set_service_id(self, server: SmpServer, service_id: EntityId) -> None:
        if key := self.server_keys.get(server):
            self.run(self.store.set_service_id(key, service_id))

    @rule(server=st.sampled_from(ROUTERS), what=st.sampled_from(["clear", "drop", "service", "retry"]))
    def change_router(self, server: SmpServer, what: str) -> None:
        key = self.server_keys.get(server)
        if key is None:
            return
        if what == "retry":
            self.run(self.store.due_retries(key, NOW + 600, 2))
            return
        before = self.states()
        change, expected = {
            "clear": (self.store.clear_service, cleared),
            "drop": (self.store.set_disconnected, lost),
            "service": (self.store.set_service_subscribed, served),
        }[what]
        changed = self.run(change(key))
        after = [expected(queue) if queue.server_key == key else queue for queue in before]
        assert self.states() == after
        active = [sum(queue.state is SubState.ACTIVE for queue in queues) for queues in (before, after)]
        assert changed == abs(active[1] - active[0])

    def states(self) -> list[QueueState]:
        with closing(sqlite3.connect(self.path)) as db:
            return sorted(queue_states(db))

    @rule(server=st.sampled_from(ROUTERS), news=st.lists(queues, min_size=1, max_size=6))
    def notify(self, server: SmpServer, news: list[NewSubscription]) -> None:
        if key := self.server_keys.get(server):
            block = [nmsg(notifier_id) for notifier_id in self.chosen(server, news)]
            self.run(self.store.add_notifications(key, block, received_at=NOW))

    @rule(key=tokens, count=st.integers(0, 3))
    def send(self, key: TokenKey, count: int) -> None:
        for push in self.run(self.store.pushes([key])):
            entries = [SentEntry(key, entry.sub_key, entry.seq) for entry in push.entries[:count]]
            self.run(self.store.set_sent(entries))

    @rule(device_token=st.sampled_from(DEVICES), server=st.sampled_from(ROUTERS), clear=st.booleans())
    def all_at_once(self, device_token: object, server: SmpServer, clear: bool) -> None:
        """Different calls in one transaction, some of which undo others."""
        assert device_token in DEVICES
        token: NewToken = new_token(DEVICES[DEVICES.index(device_token)])

        async def storm() -> None:
            record = await self.store.create_token(token)
            key = self.server_keys.get(server, ServerKey(99))
            news = [new_subscription(record.key, server) for _ in range(3)]
            ids = [new.notifier_id for new in news]
            async with asyncio.TaskGroup() as tasks:
                creating = [tasks.create_task(create_one(self.store, new)) for new in news]
                for call in (
                    create_one(self.store, news[0]),
                    self.store.set_service_id(key, SERVICE_ID),
                    self.store.set_subscribed(key, ids, service_id=SERVICE_ID),
                    self.store.move_token(record, TokenInput.CODE_MATCHED, TODAY),
                    self.store.add_notifications(key, [nmsg(one) for one in ids], received_at=NOW),
                    self.store.move_queues(key, [happened(ids[0], SubInput.QUEUE_DELETED)], now=NOW),
                    self.store.clear_service(key) if clear else self.store.set_disconnected(key),
                    self.store.delete_token(record.key),
                ):
                    tasks.create_task(call)
            created = creating[0].result()
            if created is not None:
                self.server_keys[server] = created.server_key

        self.run(storm())

    @invariant()
    def sums_equal_a_recount(self) -> None:
        self.run(self.recount())

    async def recount(self) -> None:
        counts = await self.store.counts()
        associated = 0
        for key in self.server_keys.values():
            record = await self.store.server(key)
            rows = await self.store.queues(key, after=SubKey(0), limit=1000, associated=True)
            assert record.associated_count == len(rows)
            assert record.associated_hash == ids_hash(row.notifier_id for row in rows)
            associated += len(rows)
        with closing(sqlite3.connect(self.path)) as db:
            assert counts == _count_rows(db)
            assert db.execute(_ACTIVE_OF_ROUTERS).fetchall() == _count_active(db)
            assert not db.execute(_WRONG_ROUTERS).fetchall()
        assert counts.associated_subscriptions == associated


_WRONG_ROUTERS = """
SELECT token_key, server_key FROM token_routers r JOIN tokens t USING (token_key)
WHERE t.status <> 'deleted' AND r.subscriptions <> (
    SELECT count(*) FROM subscriptions s WHERE s.token_key = r.token_key AND s.server_key = r.server_key
)
UNION ALL
SELECT s.token_key, s.server_key FROM subscriptions s
LEFT JOIN token_routers r ON r.token_key = s.token_key AND r.server_key = s.server_key
WHERE r.token_key IS NULL
"""


_ACTIVE_OF_ROUTERS = "SELECT server_key, active_count, active_associated FROM smp_servers ORDER BY 1"


def _count_active(db: sqlite3.Connection) -> list[tuple[int, int, int]]:
    active = [queue for queue in queue_states(db) if queue.state is SubState.ACTIVE]
    all_of = Counter(queue.server_key for queue in active)
    associated = Counter(queue.server_key for queue in active if queue.associated)
    keys = db.execute("SELECT server_key FROM smp_servers ORDER BY 1")
    return [(key, all_of[key], associated[key]) for (key,) in keys]


def _count_rows(db: sqlite3.Connection) -> Counts:

    def count(what: str) -> int:
        return int(db.execute(f"SELECT count(*) FROM {what}").fetchone()[0])

    oldest = db.execute("SELECT received_at FROM unsent_notifications ORDER BY seq LIMIT 1").fetchone()
    return Counts(
        tokens=count("tokens WHERE status <> 'deleted'"),
        active_tokens=count("tokens WHERE status = 'ACTIVE'"),
        subscriptions=count("subscriptions"),
        active_subscriptions=sum(queue.state is SubState.ACTIVE for queue in queue_states(db)),
        associated_subscriptions=count("subscriptions WHERE associated"),
        servers=count("smp_servers"),
        unsent_notifications=count("unsent_notifications"),
        oldest_unsent=oldest and oldest[0],
    )


Sums.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestSums = Sums.TestCase
