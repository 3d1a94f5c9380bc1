"""What every implementation of NtfStore promises about deleting much: gone at once, and nobody waits long."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from protocol.encoding import EntityId
from protocol.statuses import TokenInput
from store.interface import NtfStore
from store.policy import RowCaps
from store.records import (
    CreatedSubscription,
    DeletedSubscription,
    DeletedToken,
    NewSubscription,
    SnewRefusal,
    TokenRecord,
)
from store.rows import DELETED_PAGE
from store.sqlite import SqliteStore
from tests.store.builders import (
    SERVICE_ID,
    TODAY,
    active_token,
    create_one,
    find_subscription,
    find_token,
    new_subscription,
    new_token,
    nmsg,
    router,
    subscribe,
    unique,
)
from tests.store.conftest import StoreFactory

MANY = 2 * DELETED_PAGE + 10


async def make_large(store: NtfStore, count: int = MANY) -> tuple[TokenRecord, list[NewSubscription]]:
    token = await active_token(store)
    news = [new_subscription(token.key) for _ in range(count)]
    created = await store.create_subscriptions(news)
    assert isinstance(created[0], CreatedSubscription)
    key = created[0].server_key
    await store.set_service_id(key, SERVICE_ID)
    await store.set_subscribed(key, [new.notifier_id for new in news[:700]], service_id=SERVICE_ID)
    await store.add_notifications(key, [nmsg(new.notifier_id) for new in news[:9]], received_at=1)
    return token, news


async def finish(store: NtfStore) -> list[DeletedSubscription]:
    deleted: list[DeletedSubscription] = []
    more = True
    while more:
        deletion = await store.delete_more()
        deleted += deletion.subscriptions
        more = deletion.more
    return deleted


async def test_a_large_token_is_gone_at_once_and_its_rows_in_pages(store: NtfStore) -> None:
    token, news = await make_large(store)
    deletion = await store.delete_token(token.key)
    assert deletion is not None
    assert deletion.tokens == [DeletedToken(token.token_id, token.device_token.provider, MANY)]
    assert (len(deletion.subscriptions), deletion.more) == (DELETED_PAGE, True)
    assert await find_token(store, token.token_id) is None
    assert await store.tokens_by_key([token.key]) == []
    assert await store.token_by_device(token.device_token, token.verify_key) is None
    assert await store.delete_token(token.key) is None
    for event in TokenInput:
        assert await store.move_token(token, event, TODAY) is None
    assert not await store.replace_device_token(token.key, token.device_token, token.code, TODAY)
    assert not await store.set_cron(token.key, 20, 100)
    assert await store.create_subscriptions([new_subscription(token.key)]) == [SnewRefusal.AUTH]
    assert await find_subscription(store, news[-1].subscription_id) is None
    assert (await store.counts()).tokens == 0
    rest = await finish(store)
    both = [*deletion.subscriptions, *rest]
    assert {one.subscription_id for one in both} == {new.subscription_id for new in news}
    assert len(both) == len(news)
    assert {one.token_id for one in both} == {token.token_id}
    assert sum(one.associated for one in both) == 700
    counts = await store.counts()
    assert (counts.subscriptions, counts.associated_subscriptions, counts.unsent_notifications) == (0, 0, 0)


async def test_notifications_for_a_deleted_token_go_nowhere(store: NtfStore) -> None:
    token, news = await make_large(store)
    (server,) = await store.servers()
    await store.delete_token(token.key)
    assert await store.add_notifications(server.key, [nmsg(news[-1].notifier_id)], received_at=1) == [None]
    assert await store.pushes([token.key]) == []
    assert await store.unsent_tokens(after=token.key, limit=1) == []


async def test_the_device_registers_and_subscribes_again_while_the_old_rows_go(store: NtfStore) -> None:
    token, news = await make_large(store)
    await store.delete_token(token.key)
    again = await store.create_token(replace(new_token(token.device_token), verify_key=token.verify_key))
    assert again.key != token.key
    await store.move_token(again, TokenInput.CODE_MATCHED, TODAY)
    old = news[-1]
    new = replace(old, token_key=again.key, subscription_id=EntityId(unique()), notifier_key=unique())
    created = await subscribe(store, new)
    assert created.created
    rest = await finish(store)
    assert old.subscription_id not in {one.subscription_id for one in rest}
    assert await find_subscription(store, new.subscription_id) is not None
    assert (await store.counts()).subscriptions == 1


async def test_the_rest_goes_after_a_restart(new_store: StoreFactory) -> None:
    store = new_store()
    await store.open()
    token, news = await make_large(store)
    await store.delete_token(token.key)
    await store.close()
    store = new_store()
    await store.open()
    assert await find_token(store, token.token_id) is None
    assert len(await finish(store)) == len(news) - DELETED_PAGE
    await store.close()


async def test_a_second_registration_deletes_the_first_in_pages(store: NtfStore) -> None:
    old, news = await make_large(store)
    new = await store.create_token(new_token(old.device_token))
    move = await store.move_token(new, TokenInput.CODE_MATCHED, TODAY)
    assert move is not None
    assert move.deletion.tokens == [DeletedToken(old.token_id, old.device_token.provider, MANY)]
    assert move.deletion.more
    assert len(move.deletion.subscriptions) + len(await finish(store)) == len(news)


async def test_a_purge_takes_much_in_pages(store: NtfStore) -> None:
    token, news = await make_large(store)
    await store.move_token(token, TokenInput.CALLED_BAD, 0)
    deletion = await store.purge_tokens(unverified_before=1, invalid_before=1, limit=10)
    assert deletion.more
    assert len(deletion.subscriptions) + len(await finish(store)) == len(news)


async def test_other_writes_go_through_while_much_is_deleted(store: NtfStore) -> None:
    """Measured in rows: between any two writes of others, one page is deleted, not everything."""
    token, _ = await make_large(store, 20 * DELETED_PAGE)
    other = await active_token(store)
    await store.delete_token(token.key)
    deleting = asyncio.ensure_future(finish(store))
    writes, longest = 0, 0.0
    while not deleting.done():
        started = time.monotonic()
        await subscribe(store, new_subscription(other.key))
        longest = max(longest, time.monotonic() - started)
        writes += 1
    assert len(await deleting) == 19 * DELETED_PAGE
    assert writes >= 10, f"{writes} writes, the longest took {longest:.3f} s"


@pytest.mark.parametrize(
    ("caps", "admitted"),
    [
        (RowCaps(subscriptions_per_token=3, routers_per_token=0), 3),
        (RowCaps(subscriptions_per_token=0, routers_per_token=2), 2),
        (RowCaps(subscriptions_per_token=0, routers_per_token=0), 8),
    ],
)
async def test_caps_per_token(new_store: StoreFactory, caps: RowCaps, admitted: int) -> None:
    store = new_store(caps=caps)
    await store.open()
    token, other = await active_token(store), await active_token(store)
    news = [new_subscription(token.key, router(f"{number}.example")) for number in range(8)]
    results = await store.create_subscriptions(news[:4]) + await store.create_subscriptions(news[4:])
    created = [one for one in results if isinstance(one, CreatedSubscription)]
    assert len(created) == admitted
    assert {one for one in results if isinstance(one, SnewRefusal)} <= {SnewRefusal.QUOTA}
    assert (await store.counts()).servers == admitted, "a refused subscription leaves no router behind"
    assert (await subscribe(store, news[0])).subscription_id == news[0].subscription_id, (
        "a repeat is none more"
    )
    assert await create_one(store, new_subscription(other.key)) is not None, "others have their own room"
    await store.delete_subscription(created[0].queue.key)
    same_router = replace(news[0], subscription_id=EntityId(unique()), notifier_id=EntityId(unique()))
    assert await create_one(store, same_router) is not None, "room for one again"
    elsewhere = await store.create_subscriptions([new_subscription(token.key, router("new.example"))])
    assert isinstance(elsewhere[0], CreatedSubscription) is (admitted == 8), "routers count for life"
    await store.close()


async def test_routers_that_nobody_uses_go_and_their_keys_are_not_used_again(store: NtfStore) -> None:
    token, other = await active_token(store), await active_token(store)
    kept = await subscribe(store, new_subscription(other.key, router("kept.example")))
    created = [await subscribe(store, new_subscription(token.key, router(f"{n}.example"))) for n in range(4)]
    await store.delete_subscription(created[0].queue.key)
    assert await store.delete_unused_servers() == 0, "the token's bound still counts them"
    await store.delete_token(token.key)
    assert await store.delete_unused_servers() == 4
    assert await store.delete_unused_servers() == 0
    assert (await store.counts()).servers == 1
    again = await subscribe(store, new_subscription(other.key, router("3.example")))
    assert again.server_key not in {kept.server_key, *(one.server_key for one in created)}
    assert (await store.server(again.server_key)).server == router("3.example")


async def test_deleted_keys_are_overwritten(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("secure") / "ntf.db"
    store = SqliteStore(path)
    await store.open()
    token, news = await make_large(store)
    await store.close()
    assert token.dh_secret in path.read_bytes()
    store = SqliteStore(path)
    await store.open()
    await store.delete_token(token.key)
    await store.close()
    content = path.read_bytes()
    for secret in (token.dh_secret, token.dh_private, token.code, token.verify_key):
        assert secret not in content, "a token that is gone has no keys in the file, rows left or not"
    store = SqliteStore(path)
    await store.open()
    await finish(store)
    await store.close()
    content = path.read_bytes()
    assert not [new for new in news if new.notifier_key in content]
