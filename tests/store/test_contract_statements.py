"""What every implementation of the store promises about the statement gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from protocol.device_token import ApnsToken, Provider
from store import statement_plan, statements
from store.interface import NtfStore
from store.postgres import PostgresStore
from store.statement_plan import AUDIT_SECONDS, MAX_DATA, PAGE
from store.statement_rate import COOL_DOWN, LIMIT, WINDOW
from store.statement_records import (
    DEFAULT_GATEWAY_CAPS,
    Accepted,
    Channel,
    Claim,
    GatewayCaps,
    GatewaySubscription,
    NewGatewaySubscription,
    Outcome,
    Purged,
    PushKey,
    ReceivedStatement,
    Refusal,
    Rule,
    RuleEdit,
    RulesEdited,
    SignedRequest,
    StatementPush,
    TokenTaken,
)
from tests.postgres import PostgresCluster
from tests.store.builders import unique
from tests.store.conftest import StoreFactory

NOW = 1_800_000_000
LATER = NOW + 3600
CAPS = DEFAULT_GATEWAY_CAPS
SMALL = GatewayCaps(subscriptions_per_client=2, rules_per_subscription=3)


def new(client: bytes = b"c" * 32, **changes: Any) -> NewGatewaySubscription:
    values: dict[str, Any] = {
        "subscription_id": unique(16),
        "client_id": client,
        "channel": Channel.APNS,
        "device_token": ApnsToken(Provider.APNS_PROD, unique(32).hex().encode()),
        "created_at": NOW,
    }
    return NewGatewaySubscription(**(values | changes))


async def subscribed(store: NtfStore, *rules: Rule, **changes: Any) -> NewGatewaySubscription:
    made = new(**changes)
    assert await store.add_gateway_subscription(made, None, CAPS) is None
    await edit(store, made, RuleEdit.REPLACE, *rules)
    return made


async def edit(
    store: NtfStore,
    of: NewGatewaySubscription,
    how: RuleEdit,
    *rules: Rule,
    request: SignedRequest | None = None,
    caps: GatewayCaps = CAPS,
    now: float = NOW,
) -> RulesEdited | Refusal:
    return await store.edit_rules(of.client_id, of.subscription_id, how, rules, request, now=now, caps=caps)


async def listed(store: NtfStore, client: bytes = b"c" * 32) -> list[GatewaySubscription]:
    found = await store.gateway_subscriptions(client, None)
    assert not isinstance(found, Refusal)
    return found


async def rules_of(store: NtfStore, subscription: GatewaySubscription) -> list[Rule]:
    made = await store.gateway_rules(subscription.key, None, 1000)
    return [Rule(one.sender, one.topic) for one in made]


def by_topic(*rules: Rule) -> list[Rule]:
    return sorted(rules, key=lambda one: (one.topic, one.sender))


def rule(sender: bytes | None = None, topic: bytes | None = None) -> Rule:
    return Rule(sender or unique(32), topic or unique(32))


def statement(*rules: Rule, data: bytes = b"data", expires_at: int = LATER) -> ReceivedStatement:
    return ReceivedStatement(unique(32), rules[0].sender, tuple(one.topic for one in rules), data, expires_at)


async def accept(store: NtfStore, *statements: ReceivedStatement, now: float = NOW) -> Accepted:
    return await store.accept_statements(statements, now)


async def unsent(store: NtfStore) -> list[StatementPush]:
    keys = await store.unsent_statement_pushes(after=PushKey(0), limit=1000)
    found = {push.key: push for push in await store.statement_pushes(keys)}
    return [found[key] for key in keys]


async def test_a_subscription_is_kept_with_its_rules(store: NtfStore) -> None:
    one, two, three = by_topic(*(rule() for _ in range(3)))
    made = await subscribed(store, two, one, channel=Channel.FCM, is_call=True)
    (found,) = await listed(store)
    assert await rules_of(store, found) == [one, two]
    assert (found.subscription_id, found.client_id) == (made.subscription_id, made.client_id)
    assert (found.channel, found.is_call, found.device_token) == (Channel.FCM, True, made.device_token)
    assert (found.created_at, found.updated_at) == (NOW, NOW)
    assert await edit(store, made, RuleEdit.ADD, two, three) == RulesEdited(1, 3, new_topics=1)
    assert await edit(store, made, RuleEdit.REMOVE, one, rule()) == RulesEdited(1, 2)
    assert await rules_of(store, found) == [two, three]
    assert await edit(store, made, RuleEdit.REPLACE, one) == RulesEdited(1, 1, new_topics=1)
    assert await rules_of(store, found) == [one]
    assert await edit(store, made, RuleEdit.REPLACE) == RulesEdited(0, 0)
    assert await listed(store, b"d" * 32) == []


async def test_rules_are_read_page_by_page(store: NtfStore) -> None:
    topics, senders = [unique(32) for _ in range(3)], [unique(32) for _ in range(3)]
    rules = by_topic(*(Rule(sender, topic) for sender in senders for topic in topics))
    made = await subscribed(store, *rules)
    await subscribed(store, *rules)
    (found, _) = await listed(store)
    assert found.subscription_id == made.subscription_id
    pages: list[Rule] = []
    while page := await store.gateway_rules(found.key, pages[-1] if pages else None, 2):
        assert len(page) <= 2
        pages += [Rule(one.sender, one.topic) for one in page]
    assert pages == rules


async def test_topics_that_nobody_named_before_are_counted(store: NtfStore) -> None:
    known, made, other = rule(), await subscribed(store), new(b"d" * 32)
    await store.add_gateway_subscription(other, None, CAPS)
    await edit(store, other, RuleEdit.ADD, known)

    async def put(how: RuleEdit, *rules: Rule, most: int | None) -> RulesEdited | Refusal:
        return await store.edit_rules(
            made.client_id, made.subscription_id, how, rules, None, now=NOW, caps=CAPS, most_new_topics=most
        )

    first, second = rule(), rule()
    same_topic = [rule(topic=known.topic), rule(topic=known.topic)]
    assert await put(RuleEdit.REPLACE, *same_topic, most=0) == RulesEdited(2, 2, 0)
    assert await put(RuleEdit.ADD, first, second, most=1) is Refusal.TOPICS
    assert await put(RuleEdit.REPLACE, first, second, most=1) is Refusal.TOPICS
    (found,) = await listed(store)
    assert await rules_of(store, found) == by_topic(*same_topic)
    assert await put(RuleEdit.ADD, first, rule(topic=first.topic), most=1) == RulesEdited(2, 4, 1)
    assert await put(RuleEdit.REPLACE, first, most=0) == RulesEdited(1, 1, 0)  # its own are no new ones
    assert await put(RuleEdit.REPLACE, first, second, most=None) == RulesEdited(2, 2, 1)
    assert await put(RuleEdit.REMOVE, rule(), most=0) == RulesEdited(0, 2, 0)


async def test_a_token_has_one_subscription(store: NtfStore) -> None:
    made = await subscribed(store)
    again = new(device_token=made.device_token)
    assert await store.add_gateway_subscription(again, None, CAPS) == TokenTaken(made.subscription_id)
    voip = new(device_token=made.device_token, channel=Channel.VOIP)
    assert await store.add_gateway_subscription(voip, None, CAPS) == TokenTaken(None)
    other = new(b"d" * 32, device_token=made.device_token)
    assert await store.add_gateway_subscription(other, None, CAPS) == TokenTaken(None)
    assert [one.subscription_id for one in await listed(store)] == [made.subscription_id]
    await store.delete_gateway_subscriptions(made.client_id, [made.subscription_id], None)
    assert await store.add_gateway_subscription(other, None, CAPS) is None


async def test_what_is_not_the_clients_is_unknown(store: NtfStore) -> None:
    kept = rule()
    mine, other = await subscribed(store, kept), await subscribed(store, client=b"d" * 32)
    ids = [mine.subscription_id, other.subscription_id]
    assert await store.delete_gateway_subscriptions(mine.client_id, ids, None) is Refusal.UNKNOWN
    foreign = new(mine.client_id, subscription_id=other.subscription_id)
    for how in RuleEdit:
        assert await edit(store, foreign, how, kept) is Refusal.UNKNOWN
    assert len(await listed(store)) == len(await listed(store, b"d" * 32)) == 1
    twice = [mine.subscription_id] * 2
    assert await store.delete_gateway_subscriptions(mine.client_id, twice, None) is None
    assert await listed(store) == []
    assert (await accept(store, statement(kept))).pushes == []


async def test_a_client_has_so_many_and_no_more(store: NtfStore) -> None:
    for answer in (None, None, Refusal.QUOTA):
        assert await store.add_gateway_subscription(new(), None, SMALL) is answer
    made = await subscribed(store, client=b"d" * 32)
    rules = [rule() for _ in range(4)]
    assert await edit(store, made, RuleEdit.REPLACE, *rules, caps=SMALL) is Refusal.QUOTA
    assert await edit(store, made, RuleEdit.REPLACE, *rules[:3], caps=SMALL) == RulesEdited(
        3, 3, new_topics=3
    )
    assert await edit(store, made, RuleEdit.ADD, rules[3], caps=SMALL) is Refusal.QUOTA
    assert await edit(store, made, RuleEdit.ADD, rules[0], caps=SMALL) == RulesEdited(0, 3)
    (shown,) = await listed(store, b"d" * 32)
    assert by_topic(*rules[:3]) == await rules_of(store, shown)


async def test_a_request_counts_once_also_after_a_restart(new_store: StoreFactory) -> None:
    store = new_store()
    await store.open()
    request, made = SignedRequest(unique(32), LATER), new()
    assert await store.add_gateway_subscription(made, request, CAPS) is None
    edited = SignedRequest(unique(32), LATER)
    assert await edit(store, made, RuleEdit.REPLACE, rule(), request=edited) == RulesEdited(
        1, 1, new_topics=1
    )
    await store.close()
    again = new_store()
    await again.open()
    for used in (request, edited):
        assert await again.add_gateway_subscription(new(), used, CAPS) is Refusal.REPLAYED
        assert await edit(again, made, RuleEdit.REPLACE, request=used) is Refusal.REPLAYED
        ids = [made.subscription_id]
        assert await again.delete_gateway_subscriptions(made.client_id, ids, used) is Refusal.REPLAYED
        assert await again.gateway_subscriptions(made.client_id, used) is Refusal.REPLAYED
    assert len(await rules_of(again, (await listed(again))[0])) == 1
    await again.purge_statements(LATER, 100)
    assert await again.gateway_subscriptions(made.client_id, request) is Refusal.REPLAYED
    await again.purge_statements(LATER + 1, 100)
    assert not isinstance(await again.gateway_subscriptions(made.client_id, request), Refusal)
    await again.close()


async def test_of_two_equal_requests_at_once_one_counts(store: NtfStore) -> None:
    request = SignedRequest(unique(32), LATER)
    answers = await asyncio.gather(*(store.add_gateway_subscription(new(), request, CAPS) for _ in range(8)))
    assert answers.count(None) == 1
    assert answers.count(Refusal.REPLAYED) == 7


async def test_a_statement_is_pushed_by_its_first_topic_with_a_rule(store: NtfStore) -> None:
    sender = unique(32)
    one, two, three = rule(sender), rule(sender), rule(sender)
    made = await subscribed(store, two, three)
    came = statement(one, three, two, data=b"hello")
    accepted = await accept(store, came)
    assert len(accepted.pushes) == 1
    (push,) = await unsent(store)
    assert push.key == accepted.pushes[0]
    assert (push.sender, push.topic, push.data) == (sender, three.topic, b"hello")
    assert (push.subscription_id, push.statement_hash) == (made.subscription_id, came.statement_hash)
    assert (push.channel, push.device_token) == (made.channel, made.device_token)
    assert push.received_at == NOW


async def test_sender_and_topic_count_together(store: NtfStore) -> None:
    one, two = rule(), rule()
    await subscribed(store, one, two)
    crossed = statement(Rule(one.sender, two.topic), Rule(one.sender, unique(32)))
    assert await accept(store, crossed, statement(rule())) == Accepted([])
    assert await accept(store) == Accepted([])


async def test_all_subscriptions_are_pushed_and_each_once(store: NtfStore) -> None:
    shared = rule()
    for client in (b"c" * 32, b"c" * 32, b"d" * 32):
        await subscribed(store, shared, client=client)
    came = statement(shared)
    accepted = await accept(store, came, came)
    assert len(accepted.pushes) == 3
    again = await accept(store, came)
    assert (again.pushes, again.repeated, again.limited) == ([], 3, 0)
    assert len(await unsent(store)) == 3


async def test_what_was_pushed_is_not_pushed_again_after_a_restart(new_store: StoreFactory) -> None:
    store = new_store()
    await store.open()
    wanted = rule()
    made = await subscribed(store, wanted)
    came = statement(wanted, expires_at=NOW + 2 * AUDIT_SECONDS)
    keys = (await accept(store, came)).pushes
    await store.end_statement_pushes(sent=keys, given_up=[], again=[], now=NOW + 5)
    await store.close()
    again = new_store()
    await again.open()
    await again.purge_statements(came.expires_at, 100)
    assert (await accept(again, came)).repeated == 1
    (record,) = await again.push_records(made.subscription_id)
    assert (record.statement_hash, record.sender, record.topic) == (came.statement_hash, *wanted)
    assert (record.accepted_at, record.sent_at) == (NOW, NOW + 5)
    assert await again.purge_statements(came.expires_at + 2, 100) == Purged(1)
    assert await again.push_records(made.subscription_id) == []
    await again.close()


async def test_the_limit_holds_for_sender_and_client(store: NtfStore) -> None:
    loud, calm = rule(), rule()
    for channel in (Channel.APNS, Channel.VOIP):  # one notification each, for both together
        await subscribed(store, loud, calm, channel=channel)
    await subscribed(store, loud, client=b"d" * 32)
    for number in range(LIMIT):
        assert len((await accept(store, statement(loud), now=NOW + number / 10)).pushes) == 3
    beyond = await accept(store, statement(loud), statement(calm), now=NOW + 10)
    assert (len(beyond.pushes), beyond.limited) == (2, 3)


async def test_the_limit_holds_over_a_restart_and_ends(new_store: StoreFactory) -> None:
    store = new_store()
    await store.open()
    loud = rule()
    await subscribed(store, loud)
    accepted = await accept(store, *(statement(loud) for _ in range(LIMIT + 1)))
    assert (len(accepted.pushes), accepted.limited) == (LIMIT, 1)
    await store.close()
    again = new_store()
    await again.open()
    await again.purge_statements(int(NOW + COOL_DOWN), 100)
    silent = await accept(again, statement(loud), now=NOW + COOL_DOWN - 0.001)
    assert (silent.pushes, silent.limited) == ([], 1)
    assert len((await accept(again, statement(loud), now=NOW + COOL_DOWN)).pushes) == 1
    await again.close()


async def test_the_window_slides(store: NtfStore) -> None:
    loud = rule()
    await subscribed(store, loud)
    for number in range(LIMIT):
        await accept(store, statement(loud), now=NOW + number)
    assert (await accept(store, statement(loud), now=NOW + WINDOW)).limited == 0
    assert (await accept(store, statement(loud), now=NOW + WINDOW + 0.5)).limited == 1


async def test_replays_do_not_count_for_the_limit(store: NtfStore) -> None:
    loud = rule()
    await subscribed(store, loud)
    came = [statement(loud) for _ in range(LIMIT - 1)]
    for _ in range(3):
        await accept(store, *came)
    assert len((await accept(store, statement(loud))).pushes) == 1


async def test_the_life_of_a_push(store: NtfStore) -> None:
    wanted = rule()
    made = await subscribed(store, wanted)
    keys = list((await accept(store, *(statement(wanted) for _ in range(4)))).pushes)
    assert await store.unsent_statement_pushes(after=keys[0], limit=2) == keys[1:3]
    assert await store.claim_statement_pushes([*keys, PushKey(10**6)], NOW) == Claim(frozenset(keys))
    await store.end_statement_pushes(sent=keys[:1], given_up=keys[1:2], again=keys[2:3], now=NOW)
    assert [push.key for push in await unsent(store)] == keys[2:]
    assert await store.abandon_claimed_pushes() == 1
    assert [push.key for push in await unsent(store)] == keys[2:3]
    sent = [record.sent_at for record in await store.push_records(made.subscription_id)]
    assert sent == [NOW, None, None, None]
    outcomes = [record.outcome for record in await store.push_records(made.subscription_id)]
    assert outcomes == [Outcome.SENT, Outcome.FAILED, Outcome.WAITING, Outcome.UNKNOWN]


async def test_a_device_that_is_gone_takes_its_subscription_along(store: NtfStore) -> None:
    wanted = rule()
    await subscribed(store, wanted)
    await accept(store, statement(wanted))
    (push,) = await unsent(store)
    assert await store.delete_gone_device(push)
    assert not await store.delete_gone_device(push)
    assert await store.claim_statement_pushes([push.key], NOW) == Claim()
    assert await unsent(store) == []
    assert await listed(store) == []


@pytest.mark.parametrize("size", [0, MAX_DATA, MAX_DATA + 1, 100_000])
async def test_no_more_data_is_kept_than_a_push_can_carry(store: NtfStore, size: int) -> None:
    wanted = rule()
    await subscribed(store, wanted)
    await accept(store, statement(wanted, data=bytes(size)))
    (push,) = await unsent(store)
    assert len(push.data) == min(size, MAX_DATA + 1)


async def test_topics_are_told_once_each(store: NtfStore) -> None:
    assert await store.watched_topics(10) == []
    topics = sorted(unique(32) for _ in range(5))
    for _ in range(3):
        await subscribed(store, *(rule(topic=topic) for topic in topics))
    assert await store.watched_topics(10) == topics
    assert await store.watched_topics(3) == topics[:3]


async def accepted_pages(store: NtfStore, *statements: ReceivedStatement) -> list[Accepted]:
    pages = [await accept(store, *statements)]
    while (page := pages[-1].following) is not None:
        pages.append(await store.accept_statements(statements, NOW, page))
    return pages


async def crowd(store: NtfStore, size: int, wanted: Rule) -> list[NewGatewaySubscription]:
    """So many subscriptions with a rule; those beyond a page are of the first clients again."""
    made = [new(client=(number % PAGE).to_bytes(32, "big")) for number in range(size)]
    for at in range(0, size, 100):
        part = made[at : at + 100]
        await asyncio.gather(*(store.add_gateway_subscription(one, None, CAPS) for one in part))
        await asyncio.gather(*(edit(store, one, RuleEdit.ADD, wanted) for one in part))
    return made


async def test_a_statement_for_many_is_told_page_by_page(store: NtfStore) -> None:
    first = rule()
    second = rule(sender=first.sender)
    made = await crowd(store, PAGE + 100, second)
    both = made[0]
    await edit(store, both, RuleEdit.ADD, first)
    came = statement(second, first)
    pages = await accepted_pages(store, came, statement(rule(sender=first.sender)))
    assert [page.cut for page in pages] == [0] * len(pages)
    assert [len(page.pushes) for page in pages] == [PAGE, 100, 0]
    (record,) = await store.push_records(both.subscription_id)
    assert record.topic == second.topic
    again = await accepted_pages(store, came)
    assert (sum(page.repeated for page in again), sum(page.limited for page in again)) == (len(made), 0)
    # Both subscriptions of a client together count once, though they are on different pages.
    more = rule(sender=first.sender)
    await edit(store, made[1], RuleEdit.ADD, more)
    assert (await accept(store, *(statement(more) for _ in range(LIMIT - 1)))).limited == 0
    assert (await accept(store, statement(more))).limited == 1


async def test_a_statement_is_for_so_many_and_no_more(
    store: NtfStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statement_plan, "FAN_OUT", PAGE)
    wanted = rule()
    await crowd(store, PAGE + 10, wanted)
    pages = await accepted_pages(store, statement(wanted), statement(wanted))
    assert [(len(page.pushes), page.cut) for page in pages] == [(PAGE, 1), (PAGE, 1)]


async def test_a_rule_counts_from_its_answer_on(store: NtfStore) -> None:
    """However many rules change meanwhile, by whomever."""

    async def come_and_go(client: bytes) -> None:
        made = await subscribed(store, client=client)
        for _ in range(8):
            wanted = rule()
            await edit(store, made, RuleEdit.ADD, wanted)
            assert len((await accept(store, statement(wanted))).pushes) == 1
            await edit(store, made, RuleEdit.REPLACE, rule())
            assert (await accept(store, statement(wanted))).pushes == []

    await asyncio.gather(*(come_and_go(bytes([number]) * 32) for number in range(16)))


async def test_a_rule_of_another_daemon_counts_from_its_answer_on(
    store: NtfStore, new_store: StoreFactory
) -> None:
    made = await subscribed(store, rule())
    other = new_store()
    await other.open()
    found = []
    for _ in range(5):
        wanted = rule()
        await edit(other, made, RuleEdit.ADD, wanted)
        found.append(len((await accept(store, statement(wanted))).pushes))
    await other.close()
    assert found == [1] * 5


async def test_statements_do_not_wait_for_changes_of_rules(postgres: PostgresCluster) -> None:
    """Two that waited for each other would cost PostgreSQL a second to find out."""
    url = postgres.new_database()
    store = PostgresStore(url)
    await store.open()
    wanted = rule()
    made = await subscribed(store, wanted)
    db = await asyncpg.connect(url, server_settings={"search_path": "ntf"})
    async with db.transaction():
        edited = await db.fetchval(statements._EDITED.postgres, made.client_id, made.subscription_id)
        assert edited is not None
        async with asyncio.timeout(10):
            assert len((await accept(store, statement(wanted))).pushes) == 1
    await db.close()
    await store.close()


async def test_a_subscription_that_goes_does_not_hide_others(postgres: PostgresCluster) -> None:
    """Deleted while a statement for many is matched: a page with one less is not the last one."""
    url = postgres.new_database()
    store = PostgresStore(url)
    await store.open()
    wanted = rule()
    made = await crowd(store, PAGE + 10, wanted)
    db = await asyncpg.connect(url, server_settings={"search_path": "ntf"})
    async with db.transaction():
        await db.execute(
            "DELETE FROM statement_subscriptions WHERE subscription_id = $1", made[0].subscription_id
        )
        accepting = asyncio.create_task(accepted_pages(store, statement(wanted)))
        blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        async with asyncio.timeout(10):
            while not await db.fetchval(blocked):
                await asyncio.sleep(0.01)
    assert [len(page.pushes) for page in await accepting] == [PAGE - 1, 10]
    await db.close()
    await store.close()
