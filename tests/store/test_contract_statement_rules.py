"""What every implementation of the store promises about old, dropped, revoked and late statements, and about
devices."""

from __future__ import annotations

import pytest

from store import statements
from store.interface import NtfStore
from store.statement_plan import AUDIT_SECONDS
from store.statement_rate import LIMIT
from store.statement_records import (
    REGISTRATION_SECONDS,
    Channel,
    Claim,
    NewGatewaySubscription,
    Outcome,
    PushKey,
    PushLimits,
    ReceivedStatement,
    Refusal,
    RegistrationKey,
    Rule,
    RuleEdit,
    TokenTaken,
)
from tests.store.conftest import StoreFactory
from tests.store.test_contract_statements import (
    CAPS,
    LATER,
    NOW,
    accept,
    edit,
    listed,
    new,
    rule,
    statement,
    subscribed,
    unsent,
)


def stored(one: ReceivedStatement, received_at: float = NOW) -> ReceivedStatement:
    """As the node sends it again."""
    return one._replace(is_stored=True, received_at=received_at)


async def settle(store: NtfStore, *rules: Rule) -> None:
    topics = [one.topic for one in rules]
    assert set(topics) <= set(await store.new_rule_topics(1000))
    await store.begin_baseline(topics)
    await store.settle_rules(topics)


async def outcomes(store: NtfStore, of: NewGatewaySubscription) -> list[Outcome]:
    return [record.outcome for record in await store.push_records(of.subscription_id)]


async def test_what_the_node_had_before_a_rule_is_never_pushed_for_it(store: NtfStore) -> None:
    wanted = rule()
    made = await subscribed(store, wanted)
    assert await store.has_new_rules(made.subscription_id)
    old, fresh, missed = (statement(wanted) for _ in range(3))
    accepted = await accept(store, stored(old))
    assert (accepted.pushes, accepted.stored) == ([], 1)
    assert len((await accept(store, fresh)).pushes) == 1
    await settle(store, wanted)
    assert not await store.has_new_rules(made.subscription_id)
    again = await accept(store, stored(old), stored(fresh), stored(missed))
    assert (len(again.pushes), again.repeated) == (1, 2)
    assert await outcomes(store, made) == [Outcome.STORED, Outcome.WAITING, Outcome.WAITING]


async def test_a_rule_made_while_the_node_is_read_is_read_for_later(store: NtfStore) -> None:
    first = rule()
    await subscribed(store, first)
    await store.begin_baseline([first.topic])
    second = rule(topic=first.topic)
    made = await subscribed(store, second)
    await store.settle_rules([first.topic])
    assert await store.has_new_rules(made.subscription_id)
    assert (await accept(store, stored(statement(second)))).stored == 1
    assert (await accept(store, stored(statement(first)))).stored == 0


async def test_a_rule_that_stays_is_no_new_one(store: NtfStore) -> None:
    kept, added = rule(), rule()
    made = await subscribed(store, kept)
    await settle(store, kept)
    await edit(store, made, RuleEdit.REPLACE, kept, added, now=NOW + 100)
    await edit(store, made, RuleEdit.ADD, kept, now=NOW + 200)
    (found,) = await listed(store)
    rules = {one.topic: one for one in await store.gateway_rules(found.key, None, 10)}
    assert [rules[one.topic].created_at for one in (kept, added)] == [NOW, NOW + 100]
    assert len((await accept(store, stored(statement(kept)))).pushes) == 1
    ids = {one.rule_id(made.subscription_id) for one in rules.values()}
    await edit(store, made, RuleEdit.REPLACE, kept, now=NOW + 300)
    await edit(store, made, RuleEdit.ADD, added, now=NOW + 300)
    again = {one.rule_id(made.subscription_id) for one in await store.gateway_rules(found.key, None, 10)}
    assert len(ids & again) == 1


async def test_what_the_limit_dropped_is_dropped(store: NtfStore) -> None:
    loud = rule()
    made = await subscribed(store, loud)
    await settle(store, loud)
    came = [statement(loud) for _ in range(LIMIT + 1)]
    assert (await accept(store, *came)).limited == 1
    later = await accept(store, *map(stored, came), now=NOW + 1000)
    assert (later.pushes, later.limited, later.repeated) == ([], 0, LIMIT + 1)
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 1


async def test_of_what_is_dropped_so_much_is_remembered(
    store: NtfStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "MAX_DROPPED", 8)
    loud = rule()
    made = await subscribed(store, loud)
    await accept(store, *(statement(loud) for _ in range(LIMIT + 8)))
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 8
    await accept(store, statement(loud))
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 6
    assert (await outcomes(store, made)).count(Outcome.WAITING) == LIMIT
    await store.purge_statements(LATER + 2, 100)
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 0
    await accept(store, *(statement(loud, expires_at=LATER + 900) for _ in range(LIMIT + 8)), now=LATER + 2)
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 8


async def test_a_device_has_a_limit_over_all_senders(new_store: StoreFactory) -> None:
    store, limits = new_store(), PushLimits(per_minute=10)
    await store.open()
    senders = [rule() for _ in range(4)]
    made = await subscribed(store, *senders)
    other = await subscribed(store, *senders, client=b"d" * 32)
    for second in range(3):
        await store.accept_statements([statement(one) for one in senders], NOW + second, limits=limits)
    assert (await outcomes(store, made)).count(Outcome.DEVICE_LIMITED) == 2
    assert (await outcomes(store, other)).count(Outcome.DEVICE_LIMITED) == 2
    await store.close()
    again = new_store()
    await again.open()
    await again.purge_statements(NOW + 59, 100)
    accepted = await again.accept_statements([statement(senders[0])], NOW + 59.5, limits=limits)
    assert accepted.device_limited == 2
    accepted = await again.accept_statements([statement(one) for one in senders], NOW + 60, limits=limits)
    assert (len(accepted.pushes), accepted.device_limited) == (8, 0)
    await again.close()


async def claim(store: NtfStore, now: float = NOW) -> Claim:
    keys = await store.unsent_statement_pushes(after=PushKey(0), limit=100)
    return await store.claim_statement_pushes(keys, now, PushLimits())


@pytest.mark.parametrize("how", [RuleEdit.REMOVE, RuleEdit.REPLACE])
async def test_a_rule_that_is_gone_revokes_what_was_not_sent(store: NtfStore, how: RuleEdit) -> None:
    """Another sender of the topic, and another client who has the rule, allow nothing."""
    revoked = rule()
    kept = rule(topic=revoked.topic)
    made = await subscribed(store, revoked, kept)
    await accept(store, statement(revoked), statement(kept))
    await subscribed(store, revoked, client=b"d" * 32)
    await edit(store, made, how, revoked if how is RuleEdit.REMOVE else kept)
    claimed = await claim(store)
    assert (len(claimed.claimed), list(claimed.dropped.values())) == (1, [Outcome.REVOKED])
    assert await outcomes(store, made) == [Outcome.REVOKED, Outcome.WAITING]
    assert [push.sender for push in await unsent(store)] == [kept.sender]


async def test_a_rule_that_is_made_again_allows_nothing_older(store: NtfStore) -> None:
    wanted = rule()
    made = await subscribed(store, wanted)
    await accept(store, statement(wanted))
    await edit(store, made, RuleEdit.REMOVE, wanted)
    await edit(store, made, RuleEdit.ADD, wanted, now=NOW + 5)
    assert list((await claim(store, NOW + 6)).dropped.values()) == [Outcome.REVOKED]


async def test_clocks_that_differ_revoke_nothing(store: NtfStore) -> None:
    """A rule is made by the clock of one daemon, a statement accepted by that of another one."""
    wanted = rule()
    made = await subscribed(store)
    await edit(store, made, RuleEdit.ADD, wanted, now=NOW + 5)
    (key,) = (await accept(store, statement(wanted), now=NOW)).pushes
    assert (await claim(store, NOW + 1)).claimed == {key}


async def test_pushes_of_a_deleted_subscription_are_revoked(store: NtfStore) -> None:
    wanted = rule()
    made = await subscribed(store, wanted)
    (key,) = (await accept(store, statement(wanted))).pushes
    await store.end_statement_pushes(sent=[key], given_up=[], again=[], now=NOW)
    await accept(store, statement(wanted))
    assert await outcomes(store, made) == [Outcome.SENT, Outcome.WAITING]
    await store.delete_gateway_subscriptions(made.client_id, [made.subscription_id], None)
    assert await outcomes(store, made) == [Outcome.SENT, Outcome.REVOKED]
    counted = {one.outcome: one.statements for one in await store.newest_outcomes(10)}
    assert counted == {Outcome.SENT: 1, Outcome.REVOKED: 1}


async def test_another_topic_allows_it_as_well(store: NtfStore) -> None:
    first = rule()
    second = rule(sender=first.sender)
    made = await subscribed(store, first, second)
    await accept(store, statement(first, second))
    await edit(store, made, RuleEdit.REMOVE, first)
    changed = await claim(store)
    assert (changed.claimed, len(changed.changed)) == (frozenset(), 1)
    (push,) = await unsent(store)
    assert push.topic == second.topic
    assert (await claim(store)).claimed == {push.key}


async def test_what_has_expired_is_not_sent_and_not_kept(store: NtfStore) -> None:
    wanted = rule()
    made = await subscribed(store, wanted)
    await accept(store, statement(wanted, expires_at=NOW + 10), statement(wanted, expires_at=NOW + 20))
    assert not (await claim(store, NOW + 9.9)).dropped
    assert (await store.purge_statements(NOW + 20, 100)).expired == 0, "they are being sent"
    keys = await store.unsent_statement_pushes(after=PushKey(0), limit=100)
    await store.end_statement_pushes(sent=[], given_up=[], again=keys, now=NOW + 10)
    assert list((await claim(store, NOW + 10)).dropped.values()) == [Outcome.EXPIRED]
    await store.end_statement_pushes(sent=[], given_up=[], again=keys, now=NOW + 10)
    assert (await store.purge_statements(NOW + 20, 100)).expired == 1
    assert await store.unsent_statement_pushes(after=PushKey(0), limit=100) == []
    assert await outcomes(store, made) == [Outcome.EXPIRED] * 2


@pytest.mark.parametrize(
    ("channel", "is_call", "rings"),
    [(Channel.VOIP, False, True), (Channel.FCM, True, True), (Channel.FCM, False, False)],
)
async def test_a_call_is_sent_at_once_or_never(
    store: NtfStore, channel: Channel, is_call: bool, rings: bool
) -> None:
    wanted = rule()
    made = await subscribed(store, channel=channel, is_call=is_call)
    await edit(store, made, RuleEdit.REPLACE, wanted, now=NOW - 60)
    await settle(store, wanted)
    await accept(store, statement(wanted), stored(statement(wanted), NOW - 20))
    assert len((await claim(store, NOW + 10)).claimed) == 2
    late = await claim(store, NOW + 10.1)
    assert list(late.dropped.values()) == [Outcome.LATE] * rings
    assert len((await claim(store, NOW + 30.1)).dropped) == rings
    assert (await outcomes(store, made)).count(Outcome.LATE) == 2 * rings


async def test_a_stored_call_is_not_older_than_its_rule(store: NtfStore) -> None:
    """Nobody heard the node when it came; it is new for the rule, so it came after the rule was made."""
    wanted = rule()
    await subscribed(store, wanted, channel=Channel.VOIP)
    await settle(store, wanted)
    await accept(store, stored(statement(wanted), NOW - 1000))
    assert len((await claim(store, NOW + 30)).claimed) == 1
    assert list((await claim(store, NOW + 30.1)).dropped.values()) == [Outcome.LATE]


async def test_a_device_that_is_registered_again_gets_nothing_twice(store: NtfStore) -> None:
    wanted = rule()
    made = await subscribed(store, wanted)
    came = statement(wanted)
    assert len((await accept(store, came)).pushes) == 1
    for client in (made.client_id, b"d" * 32):
        ids = [one.subscription_id for one in await listed(store, made.client_id)]
        await store.delete_gateway_subscriptions(made.client_id, ids, None)
        made = await subscribed(store, wanted, client=client, device_token=made.device_token)
        assert (await accept(store, came)).repeated == 1


async def test_a_device_that_took_a_push_is_known(store: NtfStore) -> None:
    wanted = rule()
    await subscribed(store, wanted)
    (key,) = (await accept(store, statement(wanted))).pushes
    assert not (await store.statement_pushes([key]))[0].is_proven
    await store.end_statement_pushes(sent=[key], given_up=[], again=[], now=NOW)
    (key,) = (await accept(store, statement(wanted))).pushes
    assert (await store.statement_pushes([key]))[0].is_proven


async def test_clients_that_are_not_heard_of_lose_their_subscriptions(store: NtfStore) -> None:
    day = 86_400
    silent = await subscribed(store, rule(), client=b"s" * 32)
    asks, registers = await subscribed(store, client=b"a" * 32), await subscribed(store, client=b"r" * 32)
    edits = await subscribed(store, rule(), client=b"e" * 32)
    await store.gateway_subscriptions(asks.client_id, None, now=NOW + 2 * day)
    again = new(registers.client_id, device_token=registers.device_token, created_at=NOW + 2 * day)
    assert isinstance(await store.add_gateway_subscription(again, None, CAPS), TokenTaken)
    await edit(store, edits, RuleEdit.ADD, rule(), now=NOW + 2 * day)
    purged = await store.purge_statements(NOW, 100, unrenewed_before=NOW + 2 * day)
    assert purged.unrenewed == 1
    assert await listed(store, silent.client_id) == []
    for kept in (asks, registers, edits):
        assert len(await listed(store, kept.client_id)) == 1


async def register(store: NtfStore, device: NewGatewaySubscription, code: bytes) -> RegistrationKey:
    key = await store.register_device(device, code, None, CAPS)
    assert isinstance(key, int)
    return key


async def test_whoever_shows_the_code_has_the_device(store: NtfStore) -> None:
    wanted = rule()
    thief = await subscribed(store, wanted, client=b"t" * 32)
    owner = new(b"o" * 32, device_token=thief.device_token)
    key = await register(store, owner, b"code")
    (found,) = await store.registrations([key])
    assert (found.code, found.device_token, found.client_id) == (b"code", owner.device_token, b"o" * 32)
    ids = owner.client_id, owner.subscription_id
    assert await store.verify_device(*ids, b"edoc", NOW, None) is Refusal.WRONG_CODE
    assert await store.verify_device(b"t" * 32, ids[1], b"code", NOW, None) is Refusal.UNKNOWN
    assert len(await listed(store, b"t" * 32)) == 1
    assert await store.verify_device(*ids, b"code", NOW, None) is None
    assert await store.verify_device(*ids, b"code", NOW, None) is None  # the answer may have been lost
    assert await listed(store, b"t" * 32) == []
    (active,) = await listed(store, b"o" * 32)
    assert active.subscription_id == owner.subscription_id
    assert (await accept(store, statement(wanted))).pushes == []
    assert await register(store, thief, b"c") != key


async def test_codes_end(store: NtfStore) -> None:
    device = new()
    ids = device.client_id, device.subscription_id
    await register(store, device, b"one")
    again = new(device.client_id, device_token=device.device_token)
    await register(store, again, b"two")  # the first is void
    assert await store.verify_device(*ids, b"one", NOW, None) is Refusal.UNKNOWN
    late = NOW + REGISTRATION_SECONDS + 1
    assert await store.verify_device(ids[0], again.subscription_id, b"two", late, None) is Refusal.UNKNOWN
    assert len(await store.registrations_of(device.client_id)) == 1
    await store.purge_statements(late, 100)
    assert await store.registrations_of(device.client_id) == []


async def test_a_client_registers_its_own_device_once(store: NtfStore) -> None:
    made = await subscribed(store)
    again = new(device_token=made.device_token)
    assert await store.register_device(again, b"code", None, CAPS) == TokenTaken(made.subscription_id)


async def test_records_of_a_sender(store: NtfStore) -> None:
    wanted = rule()
    for client in (b"c" * 32, b"d" * 32):
        await subscribed(store, wanted, client=client)
    await accept(store, statement(wanted), statement(rule()))
    records = await store.push_records_of_sender(wanted.sender)
    assert [record.topic for record in records] == [wanted.topic] * 2


async def test_until_when_the_node_was_heard(store: NtfStore) -> None:
    assert await store.listened_until([0]) == 0.0
    for until in (NOW + 0.5, NOW + 1.5):
        await store.note_listening([0, 1], until)
        assert await store.listened_until([0]) == await store.listened_until([0, 1]) == until
    await store.note_listening([1], NOW + 9)
    assert await store.listened_until([0, 1]) == NOW + 1.5
    assert await store.listened_until([0, 2]) == 0.0


async def test_what_was_dropped_is_kept_until_it_expires(store: NtfStore) -> None:
    loud = rule()
    made = await subscribed(store, loud)
    await accept(store, *(statement(loud) for _ in range(LIMIT + 1)))
    await store.purge_statements(LATER, 100)
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 1
    await store.purge_statements(LATER + 2, 100)
    assert (await outcomes(store, made)).count(Outcome.LIMITED) == 0
    assert len(await outcomes(store, made)) == LIMIT
    await store.purge_statements(NOW + AUDIT_SECONDS + 1, 100)
    assert await outcomes(store, made) == []
