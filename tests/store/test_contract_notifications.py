"""What every implementation of NtfStore promises about last notifications."""

from __future__ import annotations

import asyncio

from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store.interface import KEPT_NOTIFICATIONS, NtfStore
from store.records import (
    LastNotification,
    NewSubscription,
    Notification,
    SentEntry,
    ServerKey,
    Stored,
    SubKey,
    TokenKey,
    TokenRecord,
)
from tests.store.builders import (
    TODAY,
    active_token,
    entity,
    look_and_move,
    new_subscription,
    new_token,
    nmsg,
    subscribe,
)
from tests.store.conftest import StoreFactory


async def make_queues(
    store: NtfStore, token: TokenRecord, count: int
) -> tuple[ServerKey, list[NewSubscription], list[SubKey]]:
    news = [new_subscription(token.key) for _ in range(count)]
    created = [await subscribe(store, new) for new in news]
    return created[0].server_key, news, [one.queue.key for one in created]


async def entries_of(store: NtfStore, token: TokenRecord) -> list[LastNotification]:
    pushes = await store.pushes([token.key])
    return list(pushes[0].entries) if pushes else []


async def mark_sent(store: NtfStore, token: TokenRecord, entries: list[LastNotification]) -> None:
    await store.set_sent([SentEntry(token.key, entry.sub_key, entry.seq) for entry in entries])


async def test_a_block_is_stored_in_order(store: NtfStore) -> None:
    token = await active_token(store)
    key, news, sub_keys = await make_queues(store, token, 3)
    block = [nmsg(new.notifier_id) for new in news]
    stored = await store.add_notifications(key, block, received_at=77)
    ids = [new.subscription_id for new in news]
    expected = zip(sub_keys, ids, strict=True)
    provider = token.device_token.provider
    assert stored == [Stored(token.key, key, token.token_id, sub_id, provider) for key, sub_id in expected]
    (push,) = await store.pushes([token.key, TokenKey(token.key + 1)])
    assert push.token == token
    assert [entry.sub_key for entry in push.entries] == sub_keys
    assert [(e.notifier_id, e.nonce, e.meta) for e in push.entries] == [tuple(n) for n in block]
    assert {(e.server, e.received_at, e.sent) for e in push.entries} == {(news[0].server, 77, False)}
    assert sorted(entry.seq for entry in push.entries) == [entry.seq for entry in push.entries]


async def test_a_notification_without_an_active_token_goes_nowhere(store: NtfStore) -> None:
    active, dead = await active_token(store), await active_token(store)
    key, (live,), (sub_key,) = await make_queues(store, active, 1)
    _, (dying,), _ = await make_queues(store, dead, 1)
    await look_and_move(store, dead.key, TokenInput.CALLED_BAD)
    block = [nmsg(dying.notifier_id), nmsg(entity()), nmsg(live.notifier_id)]
    stored = await store.add_notifications(key, block, received_at=1)
    provider = active.device_token.provider
    kept = Stored(active.key, sub_key, active.token_id, live.subscription_id, provider)
    assert stored == [None, None, kept]
    elsewhere = await store.add_notifications(ServerKey(key + 1), block, received_at=1)
    assert elsewhere == [None] * 3
    assert await store.add_notifications(key, [], received_at=1) == []
    assert (await store.counts()).unsent_notifications == 1


async def test_the_newest_of_a_queue_wins(store: NtfStore) -> None:
    token = await active_token(store)
    key, (one, two), (key_one, key_two) = await make_queues(store, token, 2)
    block = [nmsg(one.notifier_id), nmsg(two.notifier_id), nmsg(one.notifier_id)]
    await store.add_notifications(key, block, received_at=1)
    entries = await entries_of(store, token)
    assert [(entry.sub_key, entry.nonce) for entry in entries] == [
        (key_two, block[1].nonce),
        (key_one, block[2].nonce),
    ]
    newer = nmsg(two.notifier_id)
    await store.add_notifications(key, [newer], received_at=2)
    entries = await entries_of(store, token)
    assert [(entry.sub_key, entry.received_at) for entry in entries] == [(key_one, 1), (key_two, 2)]


async def test_an_entry_replaced_meanwhile_stays_unsent(store: NtfStore) -> None:
    token = await active_token(store)
    key, (new,), _ = await make_queues(store, token, 1)
    await store.add_notifications(key, [nmsg(new.notifier_id)], received_at=1)
    old = await entries_of(store, token)
    newer = nmsg(new.notifier_id)
    await store.add_notifications(key, [newer], received_at=2)
    await mark_sent(store, token, old)
    (entry,) = await entries_of(store, token)
    assert (entry.nonce, entry.sent) == (newer.nonce, False)
    await mark_sent(store, token, [entry])
    (entry,) = await entries_of(store, token)
    assert (entry.nonce, entry.sent) == (newer.nonce, True)


async def test_a_sent_entry_becomes_unsent_by_a_newer_one(store: NtfStore) -> None:
    token = await active_token(store)
    key, (one, two), (key_one, key_two) = await make_queues(store, token, 2)
    await store.add_notifications(key, [nmsg(one.notifier_id), nmsg(two.notifier_id)], received_at=1)
    await mark_sent(store, token, await entries_of(store, token))
    await store.add_notifications(key, [nmsg(one.notifier_id)], received_at=2)
    entries = await entries_of(store, token)
    assert [(entry.sub_key, entry.sent) for entry in entries] == [(key_two, True), (key_one, False)]


async def test_unsent_entries_are_all_kept_and_sent_ones_up_to_six(store: NtfStore) -> None:
    token = await active_token(store)
    key, news, sub_keys = await make_queues(store, token, 10)
    await store.add_notifications(key, [nmsg(new.notifier_id) for new in news], received_at=1)
    entries = await entries_of(store, token)
    assert [entry.sub_key for entry in entries] == sub_keys
    await mark_sent(store, token, entries[:4])
    entries = await entries_of(store, token)
    assert [entry.sub_key for entry in entries] == sub_keys[4:]
    await mark_sent(store, token, entries[:4])
    entries = await entries_of(store, token)
    assert [entry.sub_key for entry in entries] == sub_keys[-KEPT_NOTIFICATIONS:]
    assert [entry.sent for entry in entries] == [True] * 4 + [False] * 2
    await mark_sent(store, token, entries)
    assert [entry.sub_key for entry in await entries_of(store, token)] == sub_keys[-KEPT_NOTIFICATIONS:]
    assert (await store.counts()).unsent_notifications == 0


async def test_an_unsent_entry_may_be_older_than_sent_ones(store: NtfStore) -> None:
    token = await active_token(store)
    key, news, sub_keys = await make_queues(store, token, 8)
    await store.add_notifications(key, [nmsg(new.notifier_id) for new in news], received_at=1)
    await mark_sent(store, token, (await entries_of(store, token))[1:])
    entries = await entries_of(store, token)
    assert [entry.sub_key for entry in entries] == [sub_keys[0], *sub_keys[-5:]]
    assert [entry.sent for entry in entries] == [False] + [True] * 5


async def test_a_flood_is_given_in_portions(store: NtfStore) -> None:
    token = await active_token(store)
    key, news, sub_keys = await make_queues(store, token, 150)
    await store.add_notifications(key, [nmsg(new.notifier_id) for new in news], received_at=1)
    seen: list[SubKey] = []
    while unsent := [entry for entry in await entries_of(store, token) if not entry.sent]:
        assert len(unsent) <= 64
        seen += [entry.sub_key for entry in unsent]
        await mark_sent(store, token, unsent)
    assert seen == sub_keys


async def test_pushes_are_for_active_tokens_only(store: NtfStore) -> None:
    tokens = [await active_token(store) for _ in range(3)]
    for token in tokens[:2]:
        key, (new,), _ = await make_queues(store, token, 1)
        await store.add_notifications(key, [nmsg(new.notifier_id)], received_at=1)
    await look_and_move(store, tokens[0].key, TokenInput.CALLED_EXPIRED)
    pushes = await store.pushes([token.key for token in tokens])
    assert [push.token.key for push in pushes] == [tokens[1].key]
    assert await store.unsent_tokens(after=TokenKey(0), limit=10) == [tokens[1].key]
    await store.replace_device_token(tokens[0].key, new_token().device_token, b"code", TODAY)
    await look_and_move(store, tokens[0].key, TokenInput.CODE_MATCHED)
    assert await store.unsent_tokens(after=TokenKey(0), limit=10) == [tokens[0].key, tokens[1].key]


async def test_unsent_tokens_come_in_pages(store: NtfStore) -> None:
    tokens = [await active_token(store) for _ in range(5)]
    ids: list[EntityId] = []
    for token in tokens:
        key, news, _ = await make_queues(store, token, 2)
        ids += [new.notifier_id for new in news]
    await store.add_notifications(key, [nmsg(notifier_id) for notifier_id in ids], received_at=1)
    await mark_sent(store, tokens[1], await entries_of(store, tokens[1]))
    first = await store.unsent_tokens(after=TokenKey(0), limit=3)
    rest = await store.unsent_tokens(after=first[-1], limit=3)
    assert [*first, *rest] == [token.key for token in tokens if token is not tokens[1]]


async def test_numbers_rise_for_ever(new_store: StoreFactory) -> None:
    store = new_store()
    await store.open()
    token = await active_token(store)
    key, (new,), (sub_key,) = await make_queues(store, token, 1)
    await store.add_notifications(key, [nmsg(new.notifier_id)] * 3, received_at=1)
    (before,) = await entries_of(store, token)
    await store.delete_subscription(sub_key)
    await store.close()
    again = new_store()
    await again.open()
    await subscribe(again, new)
    await again.add_notifications(key, [nmsg(new.notifier_id)], received_at=1)
    (after,) = await entries_of(again, token)
    assert after.seq > before.seq
    await again.close()


async def test_blocks_at_once_are_all_stored(store: NtfStore) -> None:
    token = await active_token(store)
    key, news, sub_keys = await make_queues(store, token, 40)

    async def add(new: NewSubscription) -> list[Stored | None]:
        block = [Notification(new.notifier_id, bytes([n]) * 24, b"m") for n in range(3)]
        return await store.add_notifications(key, block, received_at=1)

    results = await asyncio.gather(*(add(new) for new in news))
    got = [[stored.sub_key for stored in result if stored] for result in results]
    assert got == [[sub_key] * 3 for sub_key in sub_keys]
    entries = await entries_of(store, token)
    assert {entry.nonce[0] for entry in entries} == {2}
    assert (await store.counts()).unsent_notifications == 40


async def test_the_store_can_be_written_to(store: NtfStore) -> None:
    await store.check()
    assert (await store.counts()).oldest_unsent is None
