"""Several daemons on one database: who owns what, and that nobody else writes as owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import asyncpg
import pytest

from protocol.encoding import EntityId
from protocol.statuses import SubEvent, SubInput, SubState
from store.interface import (
    HousekeepingStore,
    LeaseLost,
    NtfStore,
    PeriodicStore,
    PushStore,
    StatementPushStore,
    StatementStore,
    SubscriberStore,
)
from store.leases import (
    CHORES,
    FORGET,
    FORGET_UNASSOCIATED,
    GATEWAY,
    HANDED_AT_ONCE,
    HANDED_OVER,
    PUSH,
    PUSH_PARTS,
    SOLE_OWNER,
    STATEMENTS,
    TOPIC_PARTS,
    Duty,
    Lease,
    Notice,
    Rebalance,
    next_step,
    of_pushes,
    of_router,
    of_topic,
    topic_part,
)
from store.postgres import PostgresStore
from store.records import (
    CreatedSubscription,
    QueueEvent,
    ServerKey,
    ServiceCredentials,
    TokenRecord,
)
from store.statement_records import PushKey, ReceivedStatement
from tests.postgres import PostgresCluster
from tests.store.builders import SERVICE_ID, active_token, new_subscription, nmsg, router, subscribe

TOPIC = b"t" * 32
SECONDS = 60.0
"Of a lease: nothing lapses by itself here."


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """Daemons of one database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.clocks: dict[str, Clock] = {}
        self._stores: list[PostgresStore] = []

    async def daemon(self, name: str, duties: Collection[Duty] = frozenset(Duty)) -> PostgresStore:
        store = PostgresStore(self._url, name=name, lease_seconds=SECONDS, duties=duties)
        self.clocks[name] = store.leases._clock = Clock()
        self._stores.append(store)
        await store.open()
        await store.leases.join()
        return store

    async def ask(self, query: str) -> float:
        db = await asyncpg.connect(self._url)
        try:
            return float(await db.fetchval(query))
        finally:
            await db.close()

    async def let_lapse(self, name: str) -> None:
        """As if nothing had been heard of it for so long."""
        db = await asyncpg.connect(self._url)
        await db.execute("UPDATE ntf.daemons SET alive_until = clock_timestamp() WHERE name = $1", name)
        await db.close()

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture
async def world(postgres: PostgresCluster) -> AsyncIterator[World]:
    made = World(postgres.new_database())
    yield made
    await made.close()


async def balanced(*stores: PostgresStore) -> None:
    """As the daemons do every few seconds, until nobody has anything to do."""
    busy = True
    while busy:
        busy = False
        for store in stores:
            changes = await store.leases.balance()
            if changes.surplus:
                await store.leases.give_back(changes.surplus)
            busy |= bool(changes.gained or changes.surplus)


def owned(store: PostgresStore, duty: Duty) -> set[int]:
    return {lease.id for lease in store.leases.owned() if lease.duty is duty}


async def queue_of(store: NtfStore) -> tuple[TokenRecord, CreatedSubscription]:
    token = await active_token(store)
    return token, await subscribe(store, new_subscription(token.key))


def owner_writes(
    store: NtfStore, key: ServerKey, notifier_id: EntityId
) -> dict[str, Callable[[], Awaitable[object]]]:
    credentials = ServiceCredentials(chain=(b"leaf",), private_key=b"key")
    ended = QueueEvent(notifier_id, SubEvent(SubInput.ENDED))
    return {
        "due_retries": lambda: store.due_retries(key, 0, 1),
        "set_subscribed": lambda: store.set_subscribed(key, [notifier_id], service_id=None),
        "move_queues": lambda: store.move_queues(key, [ended], now=0),
        "set_disconnected": lambda: store.set_disconnected(key),
        "set_service_subscribed": lambda: store.set_service_subscribed(key),
        "set_credentials": lambda: store.set_credentials(key, credentials),
        "set_service_id": lambda: store.set_service_id(key, EntityId(b"service")),
        "clear_service": lambda: store.clear_service(key),
        "add_notifications": lambda: store.add_notifications(key, [nmsg(notifier_id)], received_at=1),
    }


def test_one_daemon_alone_owns_everything() -> None:
    assert not SOLE_OWNER.is_shared
    assert SOLE_OWNER.owns(CHORES)


@pytest.mark.parametrize(
    ("total", "mine", "daemons", "step"),
    [
        (64, 0, 1, Rebalance(claim=64)),
        (64, 64, 2, Rebalance(give_back=7)),
        (64, 33, 2, Rebalance(give_back=1)),
        (64, 32, 2, Rebalance()),
        (1, 0, 3, Rebalance(claim=1)),
        (3, 2, 2, Rebalance()),
        (0, 0, 1, Rebalance()),
        (100_000, 0, 1, Rebalance(claim=1000)),
    ],
)
def test_shares(total: int, mine: int, daemons: int, step: Rebalance) -> None:
    assert next_step(total=total, mine=mine, daemons=daemons) == step


async def test_the_first_takes_all_and_the_second_gets_half_of_it_in_small_parts(world: World) -> None:
    first = await world.daemon("first")
    for _ in range(4):
        await queue_of(first)
    await balanced(first)
    assert owned(first, Duty.PUSHES) == set(range(PUSH_PARTS))
    assert owned(first, Duty.CHORES) == {0}
    second = await world.daemon("second")
    (changes) = await first.leases.balance()
    assert 0 < len(changes.surplus) <= 10
    await balanced(first, second)
    assert len(owned(first, Duty.PUSHES)) == len(owned(second, Duty.PUSHES)) == PUSH_PARTS // 2
    assert not owned(first, Duty.PUSHES) & owned(second, Duty.PUSHES)
    assert [tuple(one) for one in await second.leases.daemons()] == [
        ("first", False, 1, 32, True, True, TOPIC_PARTS // 2),
        ("second", True, 0, 32, False, False, TOPIC_PARTS // 2),
    ]


async def test_what_one_leaves_the_other_takes_at_once(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    await balanced(first, second)
    await second.leases.notices(0)
    await first.leases.leave()
    assert Notice("freed", ()) in await second.leases.notices(5)
    await second.leases.balance()
    assert len(owned(second, Duty.PUSHES)) == PUSH_PARTS
    assert [one.name for one in await second.leases.daemons()] == ["second"]


@pytest.mark.parametrize("write", owner_writes(None, None, None))  # type: ignore[arg-type]
async def test_nobody_else_writes_as_owner(world: World, write: str) -> None:
    """It believes to be the owner, as one that was stopped for a while does."""
    first = await world.daemon("first")
    _, created = await queue_of(first)
    key, queue = created.server_key, created.queue
    await balanced(first)
    await owner_writes(first, key, queue.notifier_id)[write]()
    await world.let_lapse("first")
    second = await world.daemon("second")
    await second.leases.balance()
    assert second.leases.owns(of_router(key))
    assert first.leases.owns(of_router(key))
    before = await second.counts()
    with pytest.raises(LeaseLost):
        await owner_writes(first, key, queue.notifier_id)[write]()
    assert await second.counts() == before
    assert not first.leases.owns(of_router(key))
    await owner_writes(second, key, queue.notifier_id)[write]()


def statement_writes(store: NtfStore) -> dict[str, Callable[[], Awaitable[object]]]:
    came = ReceivedStatement(b"h" * 32, b"s" * 32, (TOPIC,), b"", 2**31)
    return {
        "accept_statements": lambda: store.accept_statements([came], 1.0),
        "claim_statement_pushes": lambda: store.claim_statement_pushes([PushKey(1)], 1.0),
        "begin_baseline": lambda: store.begin_baseline([TOPIC]),
        "settle_rules": lambda: store.settle_rules([TOPIC]),
        "note_listening": lambda: store.note_listening([topic_part(TOPIC)], 1.0),
        "abandon_claimed_pushes": lambda: store.abandon_claimed_pushes(),
    }


PUSHING = {"claim_statement_pushes", "abandon_claimed_pushes"}


@pytest.mark.parametrize("write", statement_writes(None))  # type: ignore[arg-type]
async def test_nobody_else_pushes_statements(world: World, write: str) -> None:
    first = await world.daemon("first")
    await balanced(first)
    await statement_writes(first)[write]()
    lease = STATEMENTS if write in PUSHING else of_topic(TOPIC)
    term = first.leases.term(lease)
    await world.let_lapse("first")
    second = await world.daemon("second")
    await second.leases.balance()
    assert second.leases.term(lease) > term
    assert first.leases.owns(lease)
    with pytest.raises(LeaseLost):
        await statement_writes(first)[write]()
    assert not first.leases.owns(lease)
    await statement_writes(second)[write]()


def chores(store: NtfStore) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "purge_tokens": lambda: store.purge_tokens(unverified_before=0, invalid_before=0, limit=1),
        "delete_unused_servers": lambda: store.delete_unused_servers(),
    }


@pytest.mark.parametrize("chore", chores(None))  # type: ignore[arg-type]
async def test_nobody_else_does_the_chores(world: World, chore: str) -> None:
    first = await world.daemon("first")
    await balanced(first)
    token, created = await queue_of(first)
    await first.delete_subscription(created.queue.key)
    await first.delete_token(token.key)  # nobody uses its router any more
    await world.let_lapse("first")
    second = await world.daemon("second")
    await second.leases.balance()
    assert first.leases.owns(CHORES)
    with pytest.raises(LeaseLost):
        await chores(first)[chore]()
    assert not first.leases.owns(CHORES)
    await chores(second)[chore]()


async def test_nobody_else_says_when_a_token_is_due(world: World) -> None:
    """Of a batch, what is still this daemon's is written."""
    first = await world.daemon("first")
    await balanced(first)
    lost, kept = await active_token(first), await active_token(first)
    for token in (lost, kept):
        await first.set_cron(token.key, 20, 100)
    await first.leases.give_back([of_pushes(lost.key)])
    second = await world.daemon("second")
    await second.leases.balance()
    assert second.leases.owns(of_pushes(lost.key))
    # As one that was stopped for a while believes.
    first.leases._fences[of_pushes(lost.key)] = 1
    await second.set_cron_due([(lost.key, 300)])
    await first.set_cron_due([(lost.key, 200), (kept.key, 200)])
    dues = {token.key: token.cron_due for token in await first.tokens_by_key([lost.key, kept.key])}
    assert dues == {lost.key: 300, kept.key: 200}
    assert not first.leases.owns(of_pushes(lost.key))


async def test_nobody_else_takes_what_was_handed_over(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    token, _ = await queue_of(first)
    await balanced(second)
    await subscribe(first, new_subscription(token.key))
    handed = await second.leases.handed_over()
    assert handed
    await world.let_lapse("second")
    await first.leases.balance()
    await second.leases.taken(handed)
    assert await first.leases.handed_over() == handed


READS = {
    *("servers", "server", "subscription_count", "queues", "next_retry"),
    *("tokens_by_key", "pushes", "unsent_tokens", "due_crons", "next_cron_due"),
    *("statement_pushes", "unsent_statement_pushes", "watched_topics", "registrations"),
    *("new_rule_topics", "listened_until"),
}
OF_NO_OWNER = {
    "add_late_notifications": "beneath whatever the owner stored",
    "set_sent": "an entry has a number that is given once: the mark is true whoever makes it",
    "end_statement_pushes": "likewise, of pushes that were claimed",
    "move_token": "compared with what was seen",
    "delete_gone_device": "likewise",
    "delete_registration": "its device is gone, whoever finds out",
    "delete_more": "rows of tokens that are deleted already",
    "purge_statements": "by every daemon with a gateway",
}


def test_whatever_an_owner_writes_is_checked() -> None:
    """A new write of these roles has to be named here, and above if it is an owner's."""
    roles = (SubscriberStore, PushStore, StatementPushStore, StatementStore, PeriodicStore, HousekeepingStore)
    calls = {name for role in roles for name in dir(role) if not name.startswith("_")}
    nobody: Any = None
    checked = {
        *owner_writes(nobody, nobody, nobody),
        *statement_writes(nobody),
        *chores(nobody),
        "set_cron_due",
    }
    assert calls == READS | set(OF_NO_OWNER) | checked


async def test_a_daemon_without_a_gateway_leaves_statements_to_others(world: World) -> None:
    first = await world.daemon("first", frozenset(Duty) - GATEWAY)
    await balanced(first)
    assert first.leases.owns(CHORES)
    assert not first.leases.owns(STATEMENTS)
    assert not owned(first, Duty.TOPICS)
    second = await world.daemon("second")
    await balanced(first, second)
    assert second.leases.owns(STATEMENTS)
    assert owned(second, Duty.TOPICS) == set(range(TOPIC_PARTS))


async def test_one_that_was_taken_for_dead_begins_anew(world: World) -> None:
    first = await world.daemon("first")
    await balanced(first)
    await world.let_lapse("first")
    assert not (await first.leases.balance()).gained
    second = await world.daemon("second")
    await second.leases.balance()
    assert len(owned(second, Duty.PUSHES)) == PUSH_PARTS
    with pytest.raises(LeaseLost):
        await first.leases.renew()
    assert not first.leases.owned()
    await first.leases.renew()


async def test_it_does_not_trust_its_leases_after_a_silence(world: World) -> None:
    first = await world.daemon("first")
    _, created = await queue_of(first)
    await balanced(first)
    world.clocks["first"].now += SECONDS * 0.74
    assert first.leases.owns(CHORES)
    world.clocks["first"].now += SECONDS * 0.02
    assert not first.leases.owns(CHORES)
    assert first.leases.push_parts() == []
    with pytest.raises(LeaseLost):
        await first.set_disconnected(created.server_key)
    await first.leases.renew()
    assert first.leases.owns(CHORES)
    first.leases.lapse()
    await balanced(first)
    assert first.leases.owns(CHORES)


async def test_queue_for_a_router_of_another_daemon_is_handed_over(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    token, _ = await queue_of(first)
    await balanced(second)
    await second.leases.taken(await second.leases.handed_over())
    await second.leases.notices(0)
    created = await subscribe(first, new_subscription(token.key))
    assert second.leases.owns(of_router(created.server_key))
    notices = await second.leases.notices(5)
    assert {notice.verb for notice in notices} == {HANDED_OVER}
    (handed,) = await second.leases.handed_over()
    assert (handed.router.key, handed.queue) == (created.server_key, created.queue)
    assert await second.leases.handed_over() == [handed], "nobody said that it was taken"
    await second.leases.taken([handed])
    assert await second.leases.handed_over() == []
    assert [router.key for router in await second.leases.routers([created.server_key])] == [
        created.server_key
    ]
    own = await subscribe(second, new_subscription(token.key))
    assert await second.leases.handed_over() == []
    service_id = EntityId(b"service")
    await second.set_service_id(created.server_key, service_id)
    await second.set_subscribed(created.server_key, [own.queue.notifier_id], service_id=service_id)
    for queue, verb in ((own.queue, FORGET), (created.queue, FORGET_UNASSOCIATED)):
        await first.delete_subscription(queue.key)
        assert await second.leases.notices(5) == [
            Notice(verb, (str(created.server_key), queue.notifier_id.hex()))
        ]


async def test_very_many_are_handed_over_page_by_page(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    token, _ = await queue_of(first)
    await balanced(second)
    await second.leases.taken(await second.leases.handed_over())
    count = 2 * HANDED_AT_ONCE + 5
    created = await first.create_subscriptions([new_subscription(token.key) for _ in range(count)])
    elsewhere = await subscribe(first, new_subscription(token.key, router("nobody.example")))
    pages = []
    while page := await second.leases.handed_over():
        pages.append([each.queue for each in page])
        await second.leases.taken(page)
    assert [len(page) for page in pages] == [HANDED_AT_ONCE, HANDED_AT_ONCE, 5]
    rows = {one.queue for one in created if isinstance(one, CreatedSubscription)}
    assert {queue for page in pages for queue in page} == rows
    assert elsewhere.queue not in rows


async def test_pushes_are_dealt_out(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    await balanced(first, second)
    by_key = {}
    for _ in range(40):  # beyond the parts of the first daemon
        token, created = await queue_of(first)
        by_key[token.key] = created
    await balanced(first, second)
    for created in by_key.values():
        owner = first if first.leases.owns(of_router(created.server_key)) else second
        await owner.add_notifications(created.server_key, [nmsg(created.queue.notifier_id)], received_at=1)
    of_each = [await store.unsent_tokens(after=0, limit=100) for store in (first, second)]  # type: ignore[arg-type]
    assert sorted(of_each[0] + of_each[1]) == sorted(by_key)
    assert all(second.leases.owns(of_pushes(key)) for key in of_each[1])
    assert of_each[0]
    assert of_each[1]
    await second.leases.notices(0)
    first.leases.push_elsewhere(of_each[1])
    await first.leases.tell()
    notices = await second.leases.notices(5)
    assert {int(word) for notice in notices for word in notice.words} == set(of_each[1])
    assert {notice.verb for notice in notices} == {PUSH}


async def test_a_lease_about_to_be_given_back_is_no_longer_used(world: World) -> None:
    first = await world.daemon("first")
    await balanced(first)
    part = Lease(Duty.PUSHES, 3)
    first.leases.suspend([part])
    assert not first.leases.owns(part)
    await first.leases.give_back([part])
    await balanced(first)
    assert first.leases.owns(part)


async def test_a_claim_whose_answer_was_lost_is_undone(world: World) -> None:
    first = await world.daemon("first")
    await balanced(first)
    first.leases._fences.pop(CHORES)
    await first.leases.disconnect()
    await balanced(first)
    assert first.leases.owns(CHORES)


async def test_a_queue_that_is_handed_over_again_meanwhile_is_not_taken(world: World) -> None:
    first, second = await world.daemon("first"), await world.daemon("second")
    token, _ = await queue_of(first)
    await balanced(second)
    new = new_subscription(token.key)
    created = await subscribe(first, new)
    handed = await second.leases.handed_over()
    await second.move_queues(
        created.server_key,
        [QueueEvent(created.queue.notifier_id, SubEvent(SubInput.REFUSED))],
        now=0,
    )
    await subscribe(first, new)  # revives it
    await second.leases.taken(handed)
    (again,) = [each for each in await second.leases.handed_over() if each.queue == created.queue]
    await second.leases.taken([again])
    assert created.queue not in [each.queue for each in await second.leases.handed_over()]


async def test_whether_anybody_else_had_it_meanwhile(world: World) -> None:
    first = await world.daemon("first")
    await balanced(first)
    first.leases.lapse()
    changes = await first.leases.balance()
    assert CHORES in changes.gained
    assert set(changes.resumed) == set(changes.gained)
    await world.let_lapse("first")
    second = await world.daemon("second")
    await balanced(second)
    with pytest.raises(LeaseLost):
        await first.leases.renew()
    await second.leases.leave()
    changes = await first.leases.balance()
    assert CHORES in changes.gained
    assert not changes.resumed


async def test_an_old_fence_that_is_refused_leaves_nothing_without_an_owner(world: World) -> None:
    """A write of before took so long that the lease was lost and taken anew meanwhile."""
    first = await world.daemon("first")
    await balanced(first)
    first.leases.refused(CHORES)
    assert not first.leases.owns(CHORES)
    await balanced(first)
    assert first.leases.owns(CHORES)


async def test_totals_of_the_dead_become_one_row(world: World) -> None:
    for name in ("first", "second", "third"):
        store = await world.daemon(name)
        await queue_of(store)
        await store.leases.leave()
    last = await world.daemon("last")
    await queue_of(last)
    counts = await last.counts()
    assert (counts.tokens, counts.subscriptions) == (4, 4)
    assert await world.ask("SELECT count(*) FROM ntf.totals") == 2  # nobody's, and that of the living


async def test_the_database_tells_the_time(world: World) -> None:
    first = await world.daemon("first")
    before = await world.ask("SELECT extract(epoch FROM clock_timestamp())::float8")
    told = await first.leases.renew()
    after = await world.ask("SELECT extract(epoch FROM clock_timestamp())::float8")
    assert before <= told.now <= after
    assert told.took == 0  # by a clock that stands still


async def test_sums_hold_when_others_delete_what_is_lost_and_served(world: World) -> None:
    """A deletion by one daemon and a mark by another meet in the router's row."""
    owner = await world.daemon("owner")
    token = await active_token(owner)
    news = [new_subscription(token.key) for _ in range(240)]
    created = await owner.create_subscriptions(news)
    rows = [one for one in created if isinstance(one, CreatedSubscription)]
    key, ids = rows[0].server_key, [new.notifier_id for new in news]
    await balanced(owner)
    other = await world.daemon("other")
    await owner.set_service_id(key, SERVICE_ID)

    async def mark() -> None:
        for start in range(0, len(ids), 20):
            await owner.set_subscribed(key, ids[start : start + 10], service_id=SERVICE_ID)
            await owner.set_subscribed(key, ids[start + 10 : start + 20], service_id=None)
            await owner.set_disconnected(key)
            await owner.set_service_subscribed(key)

    async def delete() -> None:
        for row in rows[::2]:
            await other.delete_subscription(row.queue.key)

    await asyncio.gather(mark(), delete())
    found = await owner.subscriptions([new.subscription_id for new in news])
    states = [one for one in found if one is not None]
    active = [one for one in states if one.status.state is SubState.ACTIVE]
    assert len(states) == 120
    assert (await owner.counts()).active_subscriptions == len(active)
    assert await owner.set_disconnected(key) == len(active)
    associated = sum(one.associated for one in states)
    assert (await owner.server(key)).associated_count == associated
    assert await owner.set_service_subscribed(key) == associated
