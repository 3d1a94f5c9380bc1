"""Which session with a router carries what: one for all of our queues there, or one for each queue.

With separate sessions a router cannot tell from its connections which queues have the same owner, nor to
which of a peer's queues the same agent sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from agent.duplex.inbox import Inbox
from agent.duplex.records import ReceiveQueue
from agent.duplex.routers import Connect, RouterLink
from agent.errors import Stopped
from protocol.addresses import SmpServer
from protocol.crypto import AuthPrivateKey
from protocol.encoding import CorrId, EntityId
from protocol.hiding import hides_bytes
from protocol.smp_messages import Ack, Del, SmpCommand, SmpMessage
from smp_client.errors import ClientError
from smp_client.proxy import ProxyConfig, Sender, SenderCommand
from smp_client.requests import Request
from smp_client.session import SmpEvents, SmpSession

MAX_VISITED = 200
"Sessions beside those that receive: the one used least recently ends."
DIALS = 32
"Separate sessions that are opened at the same time."


@hides_bytes
class Purpose(NamedTuple):
    """What a session is for."""

    server: SmpServer
    queue: bytes = b""
    "The recipient's public key, or the sender's or link's id; empty for all queues at the server."


class RouterLinks:
    """All sessions with routers, of an agent's queues and of those that it sends to."""

    def __init__(
        self,
        inbox: Inbox,
        start: Callable[[Coroutine[Any, Any, None], str], object],
        sending: ProxyConfig,
        *,
        subscribe: bool,
        separate: bool,
    ) -> None:
        self._inbox = inbox
        self._start = start
        self._sending = sending
        self._subscribe = subscribe
        self._separate = separate
        self._dials = asyncio.Semaphore(DIALS)
        self._connect: Connect = self._connect_in_turn if separate else inbox.logins.connect
        self._links: dict[Purpose, RouterLink] = {}
        self._kept: set[Purpose] = set()
        self._senders: dict[EntityId, Sender] = {}
        self._sender = Sender(self.session, sending)

    async def _connect_in_turn(self, server: SmpServer, on_events: SmpEvents) -> SmpSession:
        async with self._dials:
            return await self._inbox.logins.connect(server, on_events)

    # Receiving

    def keep(self, queue: ReceiveQueue) -> None:
        """Hold a subscribed session for a stored queue: its own, or that of its router."""
        if not self._subscribe:
            return
        purpose = self._purpose_of(queue.server, queue.recipient_key)
        link = self.link(purpose)
        if purpose not in self._kept:
            self._kept.add(purpose)
            self._start(self._hold(purpose, link, queue), f"router {purpose.server.hosts[0]}")
        link.subscribe_more(queue)

    async def _hold(self, purpose: Purpose, link: RouterLink, queue: ReceiveQueue) -> None:
        await link.keep(queue.recipient_id if self._separate else None)
        self._kept.discard(purpose)
        self._links.pop(purpose, None)
        await link.close()

    def acknowledge(self, queue: ReceiveQueue, message_id: bytes) -> None:
        link = self.link(self._purpose_of(queue.server, queue.recipient_key))
        link.acknowledge(queue.request(Ack(message_id)))

    async def request(
        self, server: SmpServer, request: Request[SmpCommand], corr_id: CorrId | None = None
    ) -> SmpMessage:
        """The answer to a recipient's command; raises `ClientError` if there is none."""
        link = self.link(self._purpose_of(server, request.key))
        answer = await link.request(request, corr_id)
        if self._separate and isinstance(request.message, Del):
            await link.close()  # a session of its own has nothing to do any more
        return answer

    async def request_many(
        self, server: SmpServer, requests: Sequence[Request[SmpCommand]]
    ) -> list[SmpMessage | ClientError]:
        """An answer, or the error in its place, per command of a recipient."""
        if self._separate:
            return await asyncio.gather(*(self._answer(server, request) for request in requests))
        try:
            session = await self.session(server)
        except ClientError as error:
            return [error] * len(requests)
        return await session.request_many(requests)

    async def _answer(self, server: SmpServer, request: Request[SmpCommand]) -> SmpMessage | ClientError:
        try:
            return await self.request(server, request)
        except ClientError as error:
            return error

    # Sending

    async def send(
        self, server: SmpServer, entity_id: EntityId, command: SenderCommand, key: AuthPrivateKey | None
    ) -> SmpMessage:
        """A sender's command, directly or through a proxy; raises `ClientError` if there is no answer."""
        return await self._sender_of(entity_id).request(server, entity_id, command, key)

    def _sender_of(self, entity_id: EntityId) -> Sender:
        if not self._separate:
            return self._sender
        sender = self._senders.pop(entity_id, None)
        if sender is None:
            sender = Sender(partial(self.session, queue=bytes(entity_id)), self._sending)
        self._senders[entity_id] = sender
        if len(self._senders) > MAX_VISITED:
            del self._senders[next(iter(self._senders))]
        return sender

    # Links

    async def session(self, server: SmpServer, *, queue: bytes = b"") -> SmpSession:
        return await self.link(Purpose(server.canonical, queue)).session()

    def link(self, purpose: Purpose) -> RouterLink:
        link = self._links.pop(purpose, None) or RouterLink(purpose.server, self._connect, self._inbox)
        self._links[purpose] = link
        if len(self._links) - len(self._kept) > MAX_VISITED:
            self._leave(next(purpose for purpose in self._links if purpose not in self._kept))
        return link

    def _leave(self, purpose: Purpose) -> None:
        """Peers name routers, as many as they like."""
        self._start(self._links.pop(purpose).close(), f"leaving {purpose.server.hosts[0]}")

    def _purpose_of(self, server: SmpServer, key: AuthPrivateKey | None) -> Purpose:
        """Of a recipient's command: from NEW on, each queue has a key of its own."""
        queue = key.public.der if self._separate and key is not None else b""
        return Purpose(server.canonical, queue)

    async def close(self) -> None:
        for link in list(self._links.values()):
            with suppress(Stopped):
                await link.close()
