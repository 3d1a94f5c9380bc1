"""NMSG: stored with SEND, delivered to whoever is subscribed, kept while nobody is."""

from __future__ import annotations

from protocol.push_messages import open_nmsg_meta
from protocol.smp_messages import Nmsg, Nsub, Ok, Send, Sok
from smp_router.router import Router
from tests.smp_router.wire import add_notifier, connected, create_queue


async def test_nmsg_follows_send() -> None:
    async with Router.start() as router, connected(router.address) as user, connected(router.address) as ntf:
        queue = await create_queue(user)
        await add_notifier(user, queue)
        assert await ntf.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Sok()
        assert router.subscribed_notifiers() == {queue.notifier_id}
        assert await user.ask(Send(True, b"hello"), queue.sender_id) == Ok()
        entity_id, nmsg = await ntf.event()
        assert entity_id == queue.notifier_id
        assert isinstance(nmsg, Nmsg)
        meta = open_nmsg_meta(queue.notifier_secret, nmsg.nonce, nmsg.meta)
        assert len(meta.message_id) == 24
