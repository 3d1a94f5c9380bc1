"""What every implementation of NtfStore promises about tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from protocol.statuses import TOKEN_MOVES, TokenInput, TokenStatus
from store.interface import NtfStore, StoreUnavailable
from store.records import DeletedToken, Deletion, NewToken, SnewRefusal, TokenKey
from tests.store.builders import (
    TODAY,
    TOKEN_STATUSES,
    active_token,
    bring_to,
    create_one,
    device,
    entity,
    find_subscription,
    find_token,
    look_and_move,
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
    for event in TokenInput:
        assert await store.move_token(replace(token, key=gone), event, TODAY) is None
    assert not await store.replace_device_token(gone, device(), b"c", TODAY)
    assert await store.delete_token(gone) is None
    assert not await store.set_cron(gone, 20, 100)


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
    move = await store.move_token(new, TokenInput.CODE_MATCHED, TODAY + DAY)
    assert move is not None
    assert (move.before, move.after) == (TokenStatus.REGISTERED, TokenStatus.ACTIVE)
    assert move.deletion.tokens == [DeletedToken(old.token_id, old.device_token.provider, 1)]
    (deleted,) = move.deletion.subscriptions
    assert (deleted.server_key, deleted.notifier_id) == (created.server_key, subscription.notifier_id)
    assert (deleted.subscription_id, deleted.token_id) == (subscription.subscription_id, old.token_id)
    assert deleted.server == subscription.server
    assert await find_token(store, old.token_id) is None
    assert await find_token(store, kept.token_id) == kept
    assert await find_subscription(store, subscription.subscription_id) is None
    active = await find_token(store, new.token_id)
    assert active is not None
    assert (active.status, active.verified, active.updated_on) == (TokenStatus.ACTIVE, True, TODAY + DAY)
    again = await store.move_token(active, TokenInput.CODE_MATCHED, TODAY + DAY)
    assert again == (TokenStatus.ACTIVE, TokenStatus.ACTIVE, Deletion())


@pytest.mark.parametrize("status", TOKEN_STATUSES)
async def test_tokens_move_as_the_table_says(store: NtfStore, status: TokenStatus) -> None:
    for event in TokenInput:
        token = await store.create_token(new_token())
        await bring_to(store, token.key, status)
        (seen,) = await store.tokens_by_key([token.key])
        move = await store.move_token(seen, event, TODAY + DAY)
        expected = TOKEN_MOVES.get((status, event))
        assert (move and move[:2]) == (expected and (status, expected))
        assert move is None or not any(move.deletion)
        found = await find_token(store, token.token_id)
        assert found is not None
        assert found.status is (expected or status)
        assert found.verified is (TokenStatus.ACTIVE in (status, expected))
        assert found.updated_on == (TODAY + DAY if move and move.before is not move.after else TODAY)


@pytest.mark.parametrize("event", TokenInput)
async def test_what_was_decided_on_another_device_or_code_does_nothing(
    store: NtfStore, event: TokenInput
) -> None:
    """TRPL came between look and act: the code is not the new device's, nor is what a provider said."""
    victim = await active_token(store)
    await subscribe(store, new_subscription(victim.key))
    for device_token in (victim.device_token, None):
        mine = await store.create_token(new_token())
        where = device_token or mine.device_token
        assert await store.replace_device_token(mine.key, where, unique(32), TODAY)
        (before,) = await store.tokens_by_key([mine.key])
        assert await store.move_token(mine, event, TODAY) is None
        assert await store.tokens_by_key([mine.key]) == [before]
        assert before.status is TokenStatus.REGISTERED
    assert await find_token(store, victim.token_id) == victim
    assert (await store.counts()).subscriptions == 1


async def test_only_tokens_that_were_verified_once_subscribe(store: NtfStore) -> None:
    """A provider's word makes no token one that may subscribe, nor does registering again."""
    token = await store.create_token(new_token())
    for status in TOKEN_STATUSES:
        if status is not TokenStatus.ACTIVE:
            await bring_to(store, token.key, status)
            refused = await store.create_subscriptions([new_subscription(token.key)])
            assert refused == [SnewRefusal.AUTH], status
    assert (await store.counts()).servers == 0, "what is refused leaves no row"
    await bring_to(store, token.key, TokenStatus.ACTIVE)
    for event in (TokenInput.CALLED_BAD, TokenInput.REGISTERED, TokenInput.CALLED_EXPIRED):
        move = await look_and_move(store, token.key, event)
        assert move is not None
        created = await create_one(store, new_subscription(token.key))
        assert (created is not None) is move.after.is_invalid


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
    deletion = await store.delete_token(token.key)
    assert deletion is not None
    assert deletion.tokens == [DeletedToken(token.token_id, token.device_token.provider, 3)]
    assert {one.notifier_id for one in deletion.subscriptions} == {new.notifier_id for new in news}
    assert not deletion.more
    assert await store.delete_more() == Deletion(subscriptions=[])
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
        assert await store.set_cron(token.key, 20, due)
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
    hopeless = await store.create_token(new_token(updated_on=10 * DAY))
    await look_and_move(store, hopeless.key, TokenInput.CALLED_BAD, 11 * DAY)
    recent = await store.create_token(new_token(updated_on=30 * DAY))
    active, dead, replaced = [await active_token(store) for _ in range(3)]
    subscription = new_subscription(dead.key)
    await subscribe(store, subscription)
    await look_and_move(store, dead.key, TokenInput.CALLED_EXPIRED, 12 * DAY)
    await store.replace_device_token(replaced.key, device(), unique(32), 13 * DAY)

    async def purge(unverified_before: int, invalid_before: int, limit: int = 10) -> set[bytes]:
        deletion = await store.purge_tokens(
            unverified_before=unverified_before * DAY, invalid_before=invalid_before * DAY, limit=limit
        )
        return {token.token_id for token in deletion.tokens}

    assert await purge(20, 5, 1) == {unverified.token_id}
    assert await purge(20, 5) == {hopeless.token_id}, "invalid, and never verified"
    assert await purge(20, 12) == set()
    assert await purge(20, 13) == {dead.token_id}
    assert await purge(20, 14) == {replaced.token_id}
    assert await find_subscription(store, subscription.subscription_id) is None
    assert await find_token(store, recent.token_id) is not None
    assert await find_token(store, active.token_id) == active


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
