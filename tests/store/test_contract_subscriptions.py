"""What every implementation of NtfStore promises about subscriptions and routers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from protocol.ids_hash import NO_IDS, ids_hash
from protocol.statuses import RETRIED_SLOWLY, SUB_MOVES, SUBSCRIBABLE, SubInput, SubState, SubStatus
from store.interface import NtfStore, StoreError
from store.records import (
    CreatedSubscription,
    DeletedSubscription,
    NewSubscription,
    QueueRow,
    ServerKey,
    ServiceCredentials,
    SubKey,
    TokenKey,
)
from tests.store.builders import (
    NOW,
    OTHER_SERVICE_ID,
    SERVICE_ID,
    active_token,
    create_one,
    entity,
    find_subscription,
    happened,
    new_subscription,
    router,
    subscribe,
    unique,
)

FIRST = SubKey(0)
STATES = [state for state in SubState if state is not SubState.NEW]
"A stored row is handed over at once: it is never seen as NEW."
INPUTS = {
    SubState.INACTIVE: SubInput.DISCONNECTED,
    SubState.END: SubInput.ENDED,
    SubState.DELETED: SubInput.QUEUE_DELETED,
    SubState.AUTH: SubInput.REFUSED,
    SubState.SERVICE: SubInput.SERVICE_REFUSED,
    SubState.ERR: SubInput.FAILED,
}
CREDENTIALS = ServiceCredentials(chain=(b"leaf" * 100, b"root"), private_key=b"key")


async def make_queues(store: NtfStore, count: int) -> tuple[ServerKey, list[NewSubscription]]:
    token = await active_token(store)
    news = [new_subscription(token.key) for _ in range(count)]
    created = await asyncio.gather(*(create_one(store, new) for new in news))
    assert created[0] is not None
    return created[0].server_key, news


async def state_of(store: NtfStore, new: NewSubscription) -> SubState:
    found = await find_subscription(store, new.subscription_id)
    assert found is not None
    return found.status.state


async def put_in_state(store: NtfStore, key: ServerKey, new: NewSubscription, state: SubState) -> None:
    if state is not SubState.PENDING:
        await store.set_subscribed(key, [new.notifier_id], service_id=None)
    if state in INPUTS:
        await store.move_queues(key, [happened(new.notifier_id, INPUTS[state])], now=NOW)
    assert await state_of(store, new) is state


async def test_a_subscription_is_found_with_its_token(store: NtfStore) -> None:
    token = await active_token(store)
    new = new_subscription(token.key)
    created = await subscribe(store, new)
    assert created.created
    assert created.subscription_id == new.subscription_id
    found = await find_subscription(store, new.subscription_id)
    assert found is not None
    assert found.key == created.queue.key
    assert (found.token_id, found.verify_key) == (token.token_id, token.verify_key)
    assert found.status.state is SubState.PENDING
    assert not found.associated
    assert created.handed_over
    assert created.queue == QueueRow(found.key, new.notifier_id, new.notifier_key, False)
    assert await store.queues(created.server_key, after=FIRST, limit=9) == [created.queue]
    assert await find_subscription(store, entity()) is None


async def test_a_repeated_creation_gives_the_first_id(store: NtfStore) -> None:
    token = await active_token(store)
    new = new_subscription(token.key)
    again = replace(new, subscription_id=entity())
    first, second = await asyncio.gather(create_one(store, new), create_one(store, again))
    third = await create_one(store, again)
    assert first is not None
    assert second == third == first._replace(created=False, handed_over=False)
    assert (await store.counts()).subscriptions == 1


async def test_a_queue_of_another_token_or_key_is_refused(store: NtfStore) -> None:
    token, other = await active_token(store), await active_token(store)
    new = new_subscription(token.key)
    await subscribe(store, new)
    assert await create_one(store, replace(new, token_key=other.key)) is None
    assert await create_one(store, replace(new, notifier_key=unique(32))) is None
    elsewhere = replace(new, server=router(port="5224"), subscription_id=entity(), token_key=other.key)
    assert (await subscribe(store, elsewhere)).created


async def test_a_subscription_of_a_gone_token_is_refused_and_hurts_no_other(store: NtfStore) -> None:
    token = await active_token(store)
    good = [new_subscription(token.key) for _ in range(3)]
    gone = new_subscription(TokenKey(token.key + 1))
    results = await asyncio.gather(*(create_one(store, new) for new in (good[0], gone, good[1], good[2])))
    assert results[1] is None
    for new in good:
        assert await find_subscription(store, new.subscription_id) is not None


async def test_a_repeated_creation_revives_the_dead(store: NtfStore) -> None:
    key, news = await make_queues(store, len(STATES))
    for new, state in zip(news, STATES, strict=True):
        await put_in_state(store, key, new, state)
    for new, state in zip(news, STATES, strict=True):
        dead = SUB_MOVES[state, SubInput.CREATED_AGAIN] is SubState.NEW
        assert (await subscribe(store, new)).handed_over is dead
        assert await state_of(store, new) is (SubState.PENDING if dead else state)
    assert await store.next_retry(key) is None


async def test_deleting_a_subscription(store: NtfStore) -> None:
    key, (new, kept) = await make_queues(store, 2)
    found = await find_subscription(store, new.subscription_id)
    assert found is not None
    assert await store.delete_subscription(found.key) == DeletedSubscription(
        key, new.notifier_id, False, new.subscription_id, found.token_id, new.server
    )
    assert await store.delete_subscription(found.key) is None
    assert await find_subscription(store, new.subscription_id) is None
    assert await find_subscription(store, kept.subscription_id) is not None


async def test_pages_hold_every_subscribable_queue_once_in_order(store: NtfStore) -> None:
    key, news = await make_queues(store, len(STATES))
    for new, state in zip(news, STATES, strict=True):
        await put_in_state(store, key, new, state)
    await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [news[2].notifier_id], service_id=SERVICE_ID)

    async def pages(associated: bool | None) -> list[QueueRow]:
        rows: list[QueueRow] = []
        while page := await store.queues(
            key, after=rows[-1].key if rows else FIRST, limit=2, associated=associated
        ):
            rows += page
        return rows

    rows = await pages(None)
    alive = [new for new, state in zip(news, STATES, strict=True) if state in SUBSCRIBABLE]
    assert [row.notifier_id for row in rows] == [new.notifier_id for new in alive]
    assert [row.notifier_key for row in rows] == [new.notifier_key for new in alive]
    assert rows == sorted(rows)
    assert await pages(True) == [row for row in rows if row.associated]
    assert await pages(False) == [row for row in rows if not row.associated]
    assert [row.notifier_id for row in rows if row.associated] == [news[2].notifier_id]


async def test_servers_are_those_with_something_to_subscribe(store: NtfStore) -> None:
    key, (new,) = await make_queues(store, 1)
    assert [record.key for record in await store.servers()] == [key]
    await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.END])], now=NOW)
    assert [record.key for record in await store.servers()] == [key]
    await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.AUTH])], now=NOW)
    assert await store.servers() == []
    record = await store.server(key)
    assert record.server == new.server
    with pytest.raises(StoreError):
        await store.server(ServerKey(key + 1))


async def test_an_address_with_several_hosts_comes_back(store: NtfStore) -> None:
    token = await active_token(store)
    server = replace(router(), hosts=("a.example", "b.onion"), port="5224")
    created = await subscribe(store, new_subscription(token.key, server))
    assert (await store.server(created.server_key)).server == server


@pytest.mark.parametrize("what", [SubInput.HANDED_OVER, *INPUTS.values()])
async def test_statuses_move_as_the_table_says(store: NtfStore, what: SubInput) -> None:
    key, news = await make_queues(store, len(STATES))
    for new, state in zip(news, STATES, strict=True):
        await put_in_state(store, key, new, state)
    events = [happened(new.notifier_id, what) for new in [*news, new_subscription(TokenKey(1))]]
    await store.move_queues(key, events, now=NOW)
    expected = [SUB_MOVES.get((state, what), state) for state in STATES]
    assert [await state_of(store, new) for new in news] == expected
    due = await store.due_retries(key, NOW + 600, 100)
    retried = [state for state in expected if state in RETRIED_SLOWLY]
    assert len(due) == len(retried)
    assert (await store.counts()).active_subscriptions == expected.count(SubState.ACTIVE)


async def test_the_routers_words_are_kept(store: NtfStore) -> None:
    key, (new,) = await make_queues(store, 1)
    await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.ERR])], now=NOW)
    found = await find_subscription(store, new.subscription_id)
    assert found is not None
    assert found.status == SubStatus(SubState.ERR, "QUOTA")
    await store.set_subscribed(key, [new.notifier_id], service_id=None)
    found = await find_subscription(store, new.subscription_id)
    assert found is not None
    assert found.status == SubStatus(SubState.ACTIVE)


async def test_an_answer_for_a_deleted_row_does_nothing(store: NtfStore) -> None:
    key, _ = await make_queues(store, 1)
    await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [entity()], service_id=SERVICE_ID)
    record = await store.server(key)
    assert (record.associated_count, record.associated_hash) == (0, NO_IDS)
    assert (await store.counts()).active_subscriptions == 0


async def test_slow_retries_double_up_to_a_day(store: NtfStore) -> None:
    key, (new,) = await make_queues(store, 1)
    now, delays = NOW, []
    for _ in range(10):
        await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.END])], now=now)
        await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.END])], now=now + 1)
        due = await store.next_retry(key)
        assert due is not None
        delays.append(due - now)
        assert await store.due_retries(key, due - 1, 10) == []
        assert [row.notifier_id for row in await store.due_retries(key, due, 10)] == [new.notifier_id]
        assert await state_of(store, new) is SubState.PENDING
        assert await store.due_retries(key, due, 10) == []
        now = due
    minutes = [delay // 60 for delay in delays]
    assert minutes == [10, 20, 40, 80, 160, 320, 640, 1280, 1440, 1440]
    await store.set_subscribed(key, [new.notifier_id], service_id=None)
    await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.SERVICE])], now=now)
    assert await store.next_retry(key) == now + 600


async def test_due_retries_are_limited_and_of_one_router(store: NtfStore) -> None:
    key, news = await make_queues(store, 5)
    await store.move_queues(key, [happened(new.notifier_id, INPUTS[SubState.ERR]) for new in news], now=NOW)
    assert await store.due_retries(ServerKey(key + 1), NOW + 600, 10) == []
    assert len(await store.due_retries(key, NOW + 600, 3)) == 3
    assert len(await store.due_retries(key, NOW + 600, 3)) == 2


async def test_a_disconnection_touches_active_queues_only(store: NtfStore) -> None:
    key, news = await make_queues(store, len(STATES))
    for new, state in zip(news, STATES, strict=True):
        await put_in_state(store, key, new, state)
    assert await store.set_disconnected(key) == 1
    for new, state in zip(news, STATES, strict=True):
        assert await state_of(store, new) is SUB_MOVES[state, SubInput.DISCONNECTED]
    assert await store.set_disconnected(key) == 0


async def test_association_is_exactly_what_the_answer_said(store: NtfStore) -> None:
    key, news = await make_queues(store, 4)
    ids = [new.notifier_id for new in news]
    assert not await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [ids[0], ids[1], ids[0]], service_id=SERVICE_ID)
    await store.set_subscribed(key, [ids[2]], service_id=OTHER_SERVICE_ID)
    await store.set_subscribed(key, [ids[3]], service_id=None)
    record = await store.server(key)
    assert (record.associated_count, record.associated_hash) == (2, ids_hash(ids[:2]))
    await store.set_subscribed(key, [ids[0]], service_id=None)
    record = await store.server(key)
    assert (record.associated_count, record.associated_hash) == (1, ids_hash(ids[1:2]))
    await store.move_queues(key, [happened(ids[1], INPUTS[SubState.END])], now=NOW)
    record = await store.server(key)
    assert (record.associated_count, record.associated_hash) == (0, NO_IDS)


async def test_a_service_subscription_makes_its_queues_active(store: NtfStore) -> None:
    key, news = await make_queues(store, 3)
    await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [new.notifier_id for new in news[:2]], service_id=SERVICE_ID)
    await store.set_disconnected(key)
    assert await store.set_service_subscribed(key) == 2
    states = [await state_of(store, new) for new in news]
    assert states == [SubState.ACTIVE, SubState.ACTIVE, SubState.PENDING]


async def test_another_service_id_clears_the_associations(store: NtfStore) -> None:
    key, news = await make_queues(store, 2)
    await store.set_credentials(key, CREDENTIALS)
    assert not await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [news[0].notifier_id], service_id=SERVICE_ID)
    assert not await store.set_service_id(key, SERVICE_ID)
    assert (await store.server(key)).associated_count == 1
    assert await store.set_service_id(key, OTHER_SERVICE_ID)
    record = await store.server(key)
    assert (record.service_id, record.credentials) == (OTHER_SERVICE_ID, CREDENTIALS)
    assert (record.associated_count, record.associated_hash) == (0, NO_IDS)
    assert await state_of(store, news[0]) is SubState.INACTIVE


async def test_clearing_a_service_clears_everything_of_it(store: NtfStore) -> None:
    key, news = await make_queues(store, 2)
    await store.set_credentials(key, CREDENTIALS)
    await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [new.notifier_id for new in news], service_id=SERVICE_ID)
    await store.clear_service(key)
    record = await store.server(key)
    assert (record.service_id, record.credentials) == (None, None)
    assert (record.associated_count, record.associated_hash) == (0, NO_IDS)
    assert [row.associated for row in await store.queues(key, after=FIRST, limit=9)] == [False, False]
    assert (await store.counts()).active_subscriptions == 0


async def test_lists_are_answered_in_their_order(store: NtfStore) -> None:
    token = await active_token(store)
    news = [new_subscription(token.key) for _ in range(5)]
    created = await store.create_subscriptions([*news, news[0]])
    made = [one for one in created if isinstance(one, CreatedSubscription)]
    assert [one.created for one in made] == [True] * 5 + [False]
    unknown = entity()
    wanted = [news[3].subscription_id, unknown, news[0].subscription_id, news[3].subscription_id]
    found = await store.subscriptions(wanted)
    keys = [one.queue.key for one in made]
    assert [one and one.key for one in found] == [keys[3], None, keys[0], keys[3]]
    tokens = await store.tokens([unknown, token.token_id])
    assert tokens[0] is None
    assert tokens[1] == token
    assert await store.subscriptions([]) == []


async def test_moves_tell_what_really_changed(store: NtfStore) -> None:
    key, (first, second) = await make_queues(store, 2)
    both = [first.notifier_id, second.notifier_id]
    moved = await store.set_subscribed(key, both, service_id=None)
    assert {(m.subscription_id, m.before, m.after) for m in moved} == {
        (new.subscription_id, SubState.PENDING, SubState.ACTIVE) for new in (first, second)
    }
    found = await find_subscription(store, first.subscription_id)
    assert found is not None
    assert {m.token_id for m in moved} == {found.token_id}
    assert await store.set_subscribed(key, both, service_id=None) == []
    ended = await store.move_queues(key, [happened(first.notifier_id, INPUTS[SubState.END])], now=NOW)
    assert [(m.subscription_id, m.before, m.after) for m in ended] == [
        (first.subscription_id, SubState.ACTIVE, SubState.END)
    ]
    again = await store.move_queues(key, [happened(first.notifier_id, INPUTS[SubState.END])], now=NOW)
    assert again == []


async def test_counts_of_a_router_and_of_what_is_subscribable(store: NtfStore) -> None:
    key, news = await make_queues(store, 4)
    await put_in_state(store, key, news[0], SubState.AUTH)
    await put_in_state(store, key, news[1], SubState.ACTIVE)
    assert await store.subscription_count(key) == 4
    assert await store.subscribable_count() == 3
