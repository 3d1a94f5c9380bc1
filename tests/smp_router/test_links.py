"""Short links: who may set, read and drop them in which state, as deployed routers answer."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from protocol.connection import Outgoing
from protocol.crypto import AuthPrivateKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import AUTH, CMD_HAS_AUTH, CMD_NO_ENTITY, CMD_PROHIBITED
from protocol.link_crypto import sender_id_of
from protocol.smp_messages import (
    Del,
    Err,
    Ids,
    Key,
    Ldel,
    Lget,
    LinkData,
    Lkey,
    Lnk,
    Lset,
    New,
    NewLink,
    NotifierKeys,
    Off,
    Ok,
    QueueMode,
    Send,
    Skey,
    SmpMessage,
)
from smp_router.router import Router
from tests.smp_router.wire import TestQueue, WireClient, connected, create_queue, new_dh, new_key

DATA = LinkData(b"fixed", b"user")
MESSAGING, CONTACT = QueueMode.MESSAGING, QueueMode.CONTACT


def new_link_id() -> EntityId:
    return EntityId(secrets.token_bytes(24))


def new_corr_id() -> CorrId:
    return CorrId(secrets.token_bytes(24))


async def ask_new(
    client: WireClient,
    mode: QueueMode,
    *,
    corr_id: CorrId | None = None,
    sender_id: EntityId | None = None,
    link_id: EntityId | None = None,
    key: AuthPrivateKey | None = None,
) -> tuple[AuthPrivateKey, SmpMessage, bytes]:
    """NEW with link data; the key, the answer, and the link id that was sent."""
    corr_id, key, dh = corr_id or new_corr_id(), key or new_key(), new_dh()
    if mode is CONTACT:
        link_id = new_link_id() if link_id is None else link_id
    link = NewLink(link_id, sender_id_of(corr_id) if sender_id is None else sender_id, DATA)
    command = New(recipient_key=key.public, dh_key=dh.public, mode=mode, link=link)
    client.write(Outgoing(corr_id, NO_ENTITY, command, key))
    return key, await client.answer(corr_id), link_id or b""


async def with_link(client: WireClient, mode: QueueMode | None) -> tuple[TestQueue, EntityId]:
    if mode is None:
        queue, link_id = await create_queue(client, mode=None), new_link_id()
        assert await client.ask(Lset(link_id, DATA), queue.recipient_id, queue.key) == Ok()
        return queue, link_id
    key, ids, _ = await ask_new(client, mode)
    assert isinstance(ids, Ids), ids
    assert ids.link_id is not None
    return TestQueue(key, ids, b""), ids.link_id


async def lkey(client: WireClient, link_id: EntityId, key: AuthPrivateKey) -> SmpMessage:
    return await client.ask(Lkey(key.public), link_id, key)


@pytest.mark.parametrize("mode", QueueMode)
async def test_new_with_a_link(router: Router, mode: QueueMode) -> None:
    corr_id = new_corr_id()
    async with connected(router.address) as client:
        key, ids, link_id = await ask_new(client, mode, corr_id=corr_id)
        assert isinstance(ids, Ids)
        assert ids.sender_id == sender_id_of(corr_id)
        assert (ids.link_id == link_id) is (mode is CONTACT)
        assert (await ask_new(client, mode, corr_id=corr_id))[1] == Err(AUTH)  # it exists
        assert (await ask_new(client, mode, sender_id=new_link_id()))[1] == Err(CMD_PROHIBITED)
        assert await client.ask(Del(), ids.recipient_id, key) == Ok()
        _, again, _ = await ask_new(client, mode, corr_id=corr_id)
        assert isinstance(again, Ids)
        assert again.recipient_id != ids.recipient_id


@pytest.mark.parametrize("mode", QueueMode)
async def test_new_repeated(router: Router, mode: QueueMode) -> None:
    """The first answer may have been lost. Only the same command is answered again."""
    key, other_key, corr_id = new_key(), new_key(), new_corr_id()
    link = NewLink(new_link_id() if mode is CONTACT else None, sender_id_of(corr_id), DATA)
    same = New(recipient_key=key.public, dh_key=new_dh().public, mode=mode, link=link)
    async with connected(router.address) as client:

        async def ask(command: New, by: AuthPrivateKey = key) -> SmpMessage:
            client.write(Outgoing(corr_id, NO_ENTITY, command, by))
            return await client.answer(corr_id)

        ids = await ask(same)
        assert isinstance(ids, Ids)
        assert await ask(same) == ids
        assert await ask(replace(same, recipient_key=other_key.public), other_key) == Err(AUTH)
        changed_data = replace(link, data=LinkData(b"fixed", b"other"))
        other_mode = MESSAGING if mode is CONTACT else CONTACT
        of_other_mode = replace(link, link_id=None if mode is CONTACT else ids.link_id)
        others = [
            replace(same, link=changed_data),
            replace(same, link=of_other_mode, mode=other_mode),
            replace(same, notifier=NotifierKeys(new_key().public, new_dh().public)),
        ]
        if mode is CONTACT:
            others.append(replace(same, link=replace(link, link_id=new_link_id())))
        for other in others:
            assert await ask(other) == Err(AUTH)
        assert await client.ask(Ldel(), ids.recipient_id, key) == Ok()
        assert await ask(same) == Err(AUTH)


async def test_only_invitations_are_used_up(router: Router) -> None:
    """A message of who secured an address leaves its link; one of who secured an invitation does not."""
    async with connected(router.address) as client:
        for mode in QueueMode:
            queue, link_id = await with_link(client, mode)
            sender = new_key()
            assert await client.ask(Key(sender.public), queue.recipient_id, queue.key) == Ok()
            assert await client.ask(Send(False, b"message"), queue.sender_id, sender) == Ok()
            is_there = router.state.queues.by_link(link_id) is not None
            assert is_there is (mode is CONTACT)


async def test_link_ids_of_contacts(router: Router) -> None:
    async with connected(router.address) as client:
        _, link_id = await with_link(client, CONTACT)
        assert (await ask_new(client, CONTACT, link_id=link_id))[1] == Err(AUTH)
        for odd in (EntityId(b"five5"), EntityId(b"")):
            assert isinstance((await ask_new(client, CONTACT, link_id=odd))[1], Ids)


async def test_reading_an_invitation(router: Router) -> None:
    async with connected(router.address) as client:
        queue, link_id = await with_link(client, MESSAGING)
        first, second = new_key(), new_key()
        found = Lnk(queue.sender_id, DATA)
        assert await client.ask(Lget(), link_id) == Err(AUTH)
        assert await client.ask(Send(False, b"anybody"), queue.sender_id) == Ok()
        assert await lkey(client, link_id, first) == found
        assert await lkey(client, link_id, first) == found
        assert await lkey(client, link_id, second) == Err(AUTH)
        assert await client.ask(Skey(first.public), queue.sender_id, first) == Ok()
        assert await client.ask(Send(False, b"hello"), queue.sender_id, second) == Err(AUTH)
        assert await lkey(client, link_id, first) == found
        assert await client.ask(Send(False, b"hello"), queue.sender_id, first) == Ok()
        assert await lkey(client, link_id, first) == Err(AUTH)  # used, and dropped


async def test_an_invitation_secured_by_skey(router: Router) -> None:
    async with connected(router.address) as client:
        queue, link_id = await with_link(client, MESSAGING)
        first, second = new_key(), new_key()
        assert await client.ask(Skey(first.public), queue.sender_id, first) == Ok()
        assert await lkey(client, link_id, second) == Err(AUTH)
        assert await lkey(client, link_id, first) == Lnk(queue.sender_id, DATA)


async def test_reading_an_address(router: Router) -> None:
    async with connected(router.address) as client, connected(router.address) as reader:
        queue, link_id = await with_link(client, CONTACT)
        found = Lnk(queue.sender_id, DATA)
        assert await lkey(client, link_id, new_key()) == Err(AUTH)
        for _ in range(2):
            assert await reader.ask(Lget(), link_id) == found
            assert await reader.ask(Send(False, b"hello"), queue.sender_id) == Ok()
        key = new_key()
        assert await client.ask(Key(key.public), queue.recipient_id, queue.key) == Ok()
        assert await client.ask(Send(False, b""), queue.sender_id, key) == Ok()
        assert await client.ask(Off(), queue.recipient_id, queue.key) == Ok()
        newer = LinkData(DATA.fixed, b"newer")
        assert await client.ask(Lset(link_id, newer), queue.recipient_id, queue.key) == Ok()
        assert await reader.ask(Lget(), link_id) == Lnk(queue.sender_id, newer)
        for other in (queue.sender_id, queue.recipient_id, new_link_id()):
            assert await reader.ask(Lget(), other) == Err(AUTH)
            assert await lkey(reader, other, key) == Err(AUTH)
        assert await reader.ask(Lget(), link_id, key) == Err(CMD_HAS_AUTH)
        assert await reader.ask(Lget()) == Err(CMD_NO_ENTITY)
        assert await client.ask(Del(), queue.recipient_id, queue.key) == Ok()
        assert await reader.ask(Lget(), link_id) == Err(AUTH)


async def test_a_queue_without_mode(router: Router) -> None:
    async with connected(router.address) as client:
        queue, link_id = await with_link(client, None)
        assert await client.ask(Lget(), link_id) == Lnk(queue.sender_id, DATA)
        assert await lkey(client, link_id, new_key()) == Err(AUTH)
        assert await client.ask(Key(new_key().public), queue.recipient_id, queue.key) == Ok()
        assert await client.ask(Lget(), link_id) == Err(AUTH)
        assert await client.ask(Lset(link_id, DATA), queue.recipient_id, queue.key) == Err(AUTH)


@pytest.mark.parametrize("mode", QueueMode)
async def test_changing_a_link(router: Router, mode: QueueMode) -> None:
    async with connected(router.address) as client:
        queue, link_id = await with_link(client, mode)
        other, _ = await with_link(client, mode)
        for link, data, answer in (
            (link_id, LinkData(DATA.fixed, b"other"), Ok()),
            (link_id, LinkData(b"other", DATA.user), Err(AUTH)),
            (new_link_id(), DATA, Err(AUTH)),
        ):
            assert await client.ask(Lset(link, data), queue.recipient_id, queue.key) == answer
        assert await client.ask(Lset(link_id, DATA), queue.recipient_id, new_key()) == Err(AUTH)
        assert await client.ask(Ldel(), other.recipient_id, other.key) == Ok()
        assert await client.ask(Lset(link_id, DATA), other.recipient_id, other.key) == Err(AUTH)
        for _ in range(2):
            assert await client.ask(Ldel(), queue.recipient_id, queue.key) == Ok()
        assert await client.ask(Lget(), link_id) == Err(AUTH)
        assert await lkey(client, link_id, new_key()) == Err(AUTH)
        fresh = LinkData(b"fresh", b"fresh")
        assert await client.ask(Lset(link_id, fresh), other.recipient_id, other.key) == Ok()
        read = await (lkey(client, link_id, new_key()) if mode is MESSAGING else client.ask(Lget(), link_id))
        assert read == Lnk(other.sender_id, fresh)


async def test_a_secured_invitation_gets_no_link(router: Router) -> None:
    async with connected(router.address) as client:
        queue, key = await create_queue(client), new_key()
        assert await client.ask(Skey(key.public), queue.sender_id, key) == Ok()
        assert await client.ask(Lset(new_link_id(), DATA), queue.recipient_id, queue.key) == Err(AUTH)
        assert await client.ask(Ldel(), queue.recipient_id, queue.key) == Ok()
