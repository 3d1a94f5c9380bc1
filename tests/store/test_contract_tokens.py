"""What every implementation of NtfStore promises about tokens."""

from __future__ import annotations

import asyncio

import pytest

from protocol.statuses import TokenStatus
from store.interface import NtfStore, StoreUnavailable
from store.records import LiveQueue, NewToken, TokenKey
from tests.store.builders import (
    TODAY,
    active_token,
    device,
    entity,
    find_subscription,
    find_token,
    new_subscription,
    new_token,
    nmsg,
    subscribe,
    unique,
)
from tests.store.conftest import StoreFactory

DAY = 86_400


async def test_a_token_is_found_as_it_was_created(store: NtfStore) -> None:
    new = new_token()
    created = await store.create_token(new)
    assert created.status is TokenStatus.REGISTERED
    assert await find_token(store, new.token_id) == created
    assert await store.token_by_device(new.device_token, new.verify_key) == created
    assert (created.code, created.dh_private, created.dh_secret) == (new.code, new.dh_private, new.dh_secret)


async def test_unknown_tokens_are_not_found(store: NtfStore) -> None:
    token = await active_token(store)
    assert await find_token(store, entity()) is None
    assert await store.token_by_device(token.device_token, unique(32)) is None
    assert await store.token_by_device(device(), token.verify_key) is None
    gone = TokenKey(token.key + 1)
    assert not await store.set_token_status(gone, TokenStatus.ACTIVE)
    assert not await store.replace_device_token(gone, device(), b"c", TODAY)
    assert await store.delete_token(gone) == []
    assert await store.activate_token(gone, TODAY) == []


async def test_creating_again_gives_the_first_record(store: NtfStore) -> None:
    new = new_token()
    again = NewToken(
        token_id=entity(),
        device_token=new.device_token,
        verify_key=new.verify_key,
        dh_private=unique(32),
        dh_secret=unique(32),
        code=unique(32),
        updated_on=TODAY + DAY,
    )
    first, second = await asyncio.gather(store.create_token(new), store.create_token(again))
    assert first == second
    assert (await store.counts()).tokens == 1


async def test_lookups_at_once_find_their_own(store: NtfStore) -> None:
    tokens = await asyncio.gather(*(store.create_token(new_token()) for _ in range(300)))
    asked = [token.token_id for token in tokens] + [entity()] + [tokens[0].token_id]
    found = await asyncio.gather(*(find_token(store, token_id) for token_id in asked))
    assert found == [*tokens, None, tokens[0]]


async def test_activation_takes_the_device_from_other_tokens(store: NtfStore) -> None:
    old = await active_token(store)
    kept = await active_token(store)
    subscription = new_subscription(old.key)
    created = await subscribe(store, subscription)
    new = await store.create_token(new_token(old.device_token))
    queues = await store.activate_token(new.key, TODAY + DAY)
    assert queues == [LiveQueue(created.server_key, subscription.notifier_id)]
    assert await find_token(store, old.token_id) is None
    assert await find_token(store, kept.token_id) == kept
    assert await find_subscription(store, subscription.subscription_id) is None
    active = await find_token(store, new.token_id)
    assert active is not None
    assert (active.status, active.updated_on) == (TokenStatus.ACTIVE, TODAY + DAY)
    assert await store.activate_token(new.key, TODAY + DAY) == []


async def test_a_token_that_died_meanwhile_is_not_activated(store: NtfStore) -> None:
    token = await store.create_token(new_token())
    await store.set_token_status(token.key, TokenStatus.INVALID_BAD)
    await store.activate_token(token.key, TODAY)
    found = await find_token(store, token.token_id)
    assert found is not None
    assert found.status is TokenStatus.INVALID_BAD


async def test_status_moves_only_from_the_given_ones(store: NtfStore) -> None:
    token = await store.create_token(new_token())
    confirm = store.set_token_status(
        token.key, TokenStatus.CONFIRMED, only_from=[TokenStatus.REGISTERED], updated_on=TODAY + DAY
    )
    assert await confirm
    assert not await store.set_token_status(
        token.key, TokenStatus.CONFIRMED, only_from=[TokenStatus.REGISTERED]
    )
    assert await store.set_token_status(token.key, TokenStatus.INVALID_TOPIC)
    found = await find_token(store, token.token_id)
    assert found is not None
    assert (found.status, found.updated_on) == (TokenStatus.INVALID_TOPIC, TODAY + DAY)


async def test_replacing_the_device_keeps_the_subscriptions(store: NtfStore) -> None:
    token = await active_token(store)
    subscription = new_subscription(token.key)
    await subscribe(store, subscription)
    new_device, code = device(), unique(32)
    assert await store.replace_device_token(token.key, new_device, code, TODAY + DAY)
    found = await find_token(store, token.token_id)
    assert found is not None
    assert (found.device_token, found.code, found.status) == (new_device, code, TokenStatus.REGISTERED)
    assert await find_subscription(store, subscription.subscription_id) is not None
    assert (await store.counts()).active_tokens == 0


async def test_a_device_and_key_of_another_record_is_refused(store: NtfStore) -> None:
    one = new_token()
    first = await store.create_token(one)
    two = NewToken(
        token_id=entity(),
        device_token=device(),
        verify_key=one.verify_key,
        dh_private=unique(32),
        dh_secret=unique(32),
        code=unique(32),
        updated_on=TODAY,
    )
    second = await store.create_token(two)
    assert not await store.replace_device_token(second.key, first.device_token, b"code", TODAY)
    assert await find_token(store, second.token_id) == second
    assert await store.replace_device_token(second.key, second.device_token, b"code", TODAY)


async def test_deleting_a_token_deletes_all_it_has(store: NtfStore) -> None:
    token = await active_token(store)
    news = [new_subscription(token.key) for _ in range(3)]
    created = [await subscribe(store, new) for new in news]
    await store.add_notifications(
        created[0].server_key, [nmsg(news[0].notifier_id), nmsg(news[1].notifier_id)], received_at=1
    )
    queues = await store.delete_token(token.key)
    assert {queue.notifier_id for queue in queues} == {new.notifier_id for new in news}
    counts = await store.counts()
    assert (counts.tokens, counts.subscriptions, counts.unsent_notifications) == (0, 0, 0)
    assert await find_token(store, token.token_id) is None


async def test_a_key_is_not_used_again(store: NtfStore) -> None:
    token = await active_token(store)
    sub = await subscribe(store, new_subscription(token.key))
    await store.delete_token(token.key)
    other = await active_token(store)
    assert other.key != token.key
    assert (await subscribe(store, new_subscription(other.key))).queue.key != sub.queue.key


async def test_crons_come_when_due_longest_first(store: NtfStore) -> None:
    tokens = [await active_token(store) for _ in range(4)]
    for token, due in zip(tokens, (300, 100, 200, 900), strict=True):
        await store.set_cron(token.key, 20, due)
    sleeping = await store.create_token(new_token())
    await store.set_cron(sleeping.key, 20, 50)
    assert await store.next_cron_due() == 100
    due_keys = [token.key for token in await store.due_crons(300, 10)]
    assert due_keys == [tokens[1].key, tokens[2].key, tokens[0].key]
    assert [token.key for token in await store.due_crons(300, 1)] == [tokens[1].key]
    await store.set_cron_due([(tokens[1].key, 1300), (tokens[2].key, 1400)])
    assert [token.key for token in await store.due_crons(300, 10)] == [tokens[0].key]
    for token in tokens:
        await store.set_cron(token.key, 0, None)
    await store.set_cron_due([(tokens[0].key, 5)])
    assert await store.next_cron_due() is None


async def test_purging_takes_the_unverified_and_the_dead(store: NtfStore) -> None:
    unverified = await store.create_token(new_token(updated_on=10 * DAY))
    recent = await store.create_token(new_token(updated_on=30 * DAY))
    active = await active_token(store)
    dead = await store.create_token(new_token(updated_on=1 * DAY))
    subscription = new_subscription(dead.key)
    await subscribe(store, subscription)
    await store.set_token_status(dead.key, TokenStatus.INVALID_EXPIRED, updated_on=12 * DAY)
    expired = await store.create_token(new_token(updated_on=2 * DAY))
    await store.set_token_status(expired.key, TokenStatus.EXPIRED)

    async def purge(limit: int) -> list[LiveQueue]:
        return await store.purge_tokens(unverified_before=20 * DAY, invalid_before=5 * DAY, limit=limit)

    assert await purge(1) == []
    assert (await store.counts()).tokens == 4
    assert await purge(10) == []
    assert await find_token(store, unverified.token_id) is None
    assert await find_token(store, expired.token_id) is None
    for kept in (recent, active, dead):
        assert await find_token(store, kept.token_id) is not None
    queues = await store.purge_tokens(unverified_before=0, invalid_before=13 * DAY, limit=10)
    assert [queue.notifier_id for queue in queues] == [subscription.notifier_id]


async def test_a_closed_store_refuses(new_store: StoreFactory) -> None:
    store = new_store()
    with pytest.raises(StoreUnavailable):
        await store.counts()
    await store.open()
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.counts()
    with pytest.raises(StoreUnavailable):
        await store.create_token(new_token())
    await store.close()


async def test_closing_finishes_queued_writes(new_store: StoreFactory) -> None:
    store = new_store()
    await store.open()
    async with asyncio.TaskGroup() as tasks:
        creating = [tasks.create_task(store.create_token(new_token())) for _ in range(200)]
        await asyncio.sleep(0)
        await store.close()
    reopened = new_store()
    await reopened.open()
    for task in creating:
        assert await find_token(reopened, task.result().token_id) == task.result()
    await reopened.close()


async def test_secrets_are_not_in_reprs(store: NtfStore) -> None:
    token = await active_token(store)
    new = new_subscription(token.key)
    await subscribe(store, new)
    printed = repr(token) + repr(new) + repr(await find_subscription(store, new.subscription_id))
    for secret in (token.token_id, token.code, token.dh_secret, token.verify_key, new.notifier_id):
        assert repr(secret)[2:-1] not in printed
