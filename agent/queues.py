"""Connections of two queues: making them, sending, and reading with GET and ACK."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent import rows
from agent.envelopes import (
    MAX_CONTENT,
    Confirmation,
    Content,
    Envelope,
    open_envelope,
    parse_envelope,
    seal_confirmation,
    seal_content,
)
from agent.errors import Misused, Refused, Temporary, Unreachable
from agent.links import QueueLink, parse_link
from agent.records import Message, ReceiveQueue, SendQueue
from agent.rows import Change
from agent.sessions import Sessions
from agent.store import AgentStore
from protocol.addresses import SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey, X25519PublicKey
from protocol.encoding import NO_ENTITY, NONCE_SIZE
from protocol.errors import AUTH, DecodeError
from protocol.messages_crypto import RcvMessage, open_message
from protocol.smp_messages import Ack, Del, Get, Ids, Msg, New, QueueMode, Send, Skey, SmpCommand
from smp_client.requests import Request

logger = logging.getLogger(__name__)

KEY_SIZE = 32


@dataclass(frozen=True, slots=True)
class Opened:
    """What a received message is worth: the rows it changes, and the message if it is a new one."""

    changes: list[Change]
    message: Message | None = None


class Queues:
    """All connections. Calls about one connection wait for each other."""

    def __init__(self, store: AgentStore, sessions: Sessions, random: Callable[[int], bytes]) -> None:
        self._store = store
        self._sessions = sessions
        self._random = random
        self._creating = asyncio.Lock()
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    # Making connections

    async def create(self, server: SmpServer, *, wants_notifications: bool = True) -> int:
        """A new connection that can receive. It exists from the start: nothing that comes is unknown."""
        async with self._creating:
            connection_id = await self._store.new_connection_id()
            queue = self._new_receive_queue(connection_id, server)
            await self._store.write(
                [rows.put_connection(connection_id, wants_notifications), rows.put_receive_queue(queue)]
            )
        await self._create_at_router(connection_id)
        return connection_id

    async def link(self, connection_id: int) -> str:
        """What the other side needs to join."""
        return self._link(await self._usable_queue(connection_id)).text

    async def join(self, link: str, reply_at: SmpServer | None = None) -> int:
        """A new connection that can send; with `reply_at` also one that can receive, made at that router."""
        try:
            target = parse_link(link)
        except DecodeError:
            raise Misused("this is not a queue link") from None
        async with self._creating:
            connection_id = await self._store.new_connection_id()
            changes = [
                rows.put_connection(connection_id, wants_notifications=reply_at is not None),
                rows.put_send_queue(self._new_send_queue(connection_id, target)),
            ]
            if reply_at is not None:
                changes.append(rows.put_receive_queue(self._new_receive_queue(connection_id, reply_at)))
            await self._store.write(changes)
        await self._complete(connection_id)
        return connection_id

    async def _complete(self, connection_id: int) -> None:
        """Whatever a connection still needs, in whatever state the last run left it."""
        queue = await self._store.receive_queue(connection_id)
        if queue is not None and queue.recipient_id is None:
            await self._create_at_router(connection_id)
        await self._deliver(connection_id)

    async def delete(self, connection_id: int) -> None:
        """Delete the queue at its router, and everything known about the connection."""
        async with self._locks[connection_id]:
            queue = await self._store.receive_queue(connection_id)
            if queue is not None and queue.recipient_id is not None:
                request: Request[SmpCommand] = Request(queue.recipient_id, Del(), queue.recipient_key)
                try:
                    await self._sessions.smp.ask(queue.server, request)
                except Refused as refused:
                    if refused.error != AUTH:  # AUTH: it is gone already
                        raise
            await self._store.write([rows.drop_connection(connection_id)])

    def _new_receive_queue(self, connection_id: int, server: SmpServer) -> ReceiveQueue:
        return ReceiveQueue(
            connection_id=connection_id,
            server=server,
            recipient_key=Ed25519PrivateKey(self._random(KEY_SIZE)),
            dh_key=X25519PrivateKey(self._random(KEY_SIZE)),
            e2e_key=X25519PrivateKey(self._random(KEY_SIZE)),
        )

    def _new_send_queue(self, connection_id: int, target: QueueLink) -> SendQueue:
        return SendQueue(
            connection_id=connection_id,
            server=target.server,
            sender_id=target.sender_id,
            auth_key=X25519PrivateKey(self._random(KEY_SIZE)),
            e2e_key=X25519PrivateKey(self._random(KEY_SIZE)),
            recipient_key=target.dh_key,
        )

    async def _create_at_router(self, connection_id: int) -> ReceiveQueue:
        async with self._locks[connection_id]:
            queue = await self._store.receive_queue(connection_id)
            if queue is None:
                raise Misused("the connection was deleted")
            if queue.recipient_id is not None:
                return queue
            command = New(
                recipient_key=queue.recipient_key.public,
                dh_key=queue.dh_key.public,
                subscribe=False,  # it is read with GET
                mode=QueueMode.MESSAGING,
            )
            ids = await self._sessions.smp.ask(queue.server, Request(NO_ENTITY, command, queue.recipient_key))
            queue = _created(queue, ids)
            await self._store.write([rows.put_receive_queue(queue)])
            return queue

    def _link(self, queue: ReceiveQueue) -> QueueLink:
        assert queue.sender_id is not None
        return QueueLink(queue.server, queue.sender_id, queue.e2e_key.public)

    async def _usable_queue(self, connection_id: int) -> ReceiveQueue:
        queue = await self._store.receive_queue(connection_id)
        if queue is None or queue.recipient_id is None:
            raise Misused(f"connection {connection_id} cannot receive")
        return queue

    # Sending

    async def send(self, connection_id: int, body: bytes, *, notification: bool = True) -> None:
        """Keep the message, then hand it to the router. After `Temporary` it is kept and sent later."""
        if len(body) > MAX_CONTENT:
            raise Misused(f"a message has at most {MAX_CONTENT} bytes")
        async with self._locks[connection_id]:
            queue = await self._store.send_queue(connection_id)
            if queue is None:
                raise Misused(f"connection {connection_id} cannot send (yet)")
            number = queue.last_number + 1
            secret = queue.e2e_key.exchange(queue.recipient_key)
            sealed = seal_content(secret, self._random(NONCE_SIZE), Content(number, body))
            await self._store.write(
                [
                    rows.put_send_queue(replace(queue, last_number=number)),
                    rows.add_outgoing(connection_id, sealed, notification=notification),
                ]
            )
        await self._complete(connection_id)

    async def _deliver(self, connection_id: int) -> None:
        """Everything that waits in the outbox of a connection, in order."""
        async with self._locks[connection_id]:
            queue = await self._store.send_queue(connection_id)
            if queue is None:
                return
            if not queue.confirmed:
                queue = await self._confirm(queue)
            if not queue.secured:
                await self._ask_sender(queue, Skey(queue.auth_key.public))
                queue = replace(queue, secured=True)
                await self._store.write([rows.put_send_queue(queue)])
            for waiting in await self._store.outbox(connection_id):
                await self._ask_sender(queue, Send(waiting.notification, waiting.body))
                await self._store.write([rows.drop_outgoing(waiting.key)])

    async def _ask_sender(self, queue: SendQueue, command: Skey | Send) -> None:
        await self._sessions.smp.ask(queue.server, Request(queue.sender_id, command, queue.auth_key))

    async def _confirm(self, queue: SendQueue) -> SendQueue:
        """Put the confirmation before all other messages, with the queue for answers if there is one."""
        own = await self._store.receive_queue(queue.connection_id)
        reply_to = (
            None if own is None or own.sender_id is None or own.sender_key is not None else self._link(own)
        )
        nonce = self._random(NONCE_SIZE)
        body = seal_confirmation(queue.e2e_key, queue.recipient_key, nonce, Confirmation(reply_to))
        queue = replace(queue, confirmed=True)
        await self._store.write(
            [rows.put_send_queue(queue), rows.add_outgoing(queue.connection_id, body, notification=False)]
        )
        return queue

    # Receiving

    async def fetch(self, connection_id: int) -> list[Message]:
        """All messages that wait in the queue, each kept before it is acknowledged."""
        received: list[Message] = []
        async with self._locks[connection_id]:
            while True:
                queue = await self._usable_queue(connection_id)
                answer = await self._ask_recipient(queue, Get())
                if not isinstance(answer, Msg):
                    break
                opened = self._open(queue, answer)
                if opened.changes:
                    await self._store.write(opened.changes)
                if opened.message is not None:
                    received.append(opened.message)
                await self._acknowledge(queue, answer)
        await self._deliver(connection_id)  # a confirmation may have brought the queue for answers
        return received

    async def _acknowledge(self, queue: ReceiveQueue, message: Msg) -> None:
        try:
            await self._ask_recipient(queue, Ack(message.message_id))
        except Refused as refused:
            # The session in which GET was answered is gone. GET will bring the message again.
            raise Temporary(f"the message could not be acknowledged: {refused.error}") from None

    async def _ask_recipient(self, queue: ReceiveQueue, command: Get | Ack) -> object:
        assert queue.recipient_id is not None
        return await self._sessions.smp.ask(
            queue.server, Request(queue.recipient_id, command, queue.recipient_key)
        )

    def _open(self, queue: ReceiveQueue, received: Msg) -> Opened:
        """A message that cannot be opened changes nothing: it will never open, so it is acknowledged too."""
        assert queue.router_secret is not None
        try:
            outer = open_message(queue.router_secret, received.message_id, received.body)
            if not isinstance(outer, RcvMessage):
                return Opened([])
            envelope = parse_envelope(outer.body)
            sender_key = self._sender_key(queue, envelope)
            inner = open_envelope(queue.e2e_key.exchange(sender_key), envelope)
        except DecodeError:
            return Opened([])
        newest = max(outer.timestamp, queue.last_broker_ts or 0)
        changed = replace(queue, sender_key=sender_key, last_broker_ts=newest)
        if isinstance(inner, Confirmation):
            return Opened([rows.put_receive_queue(changed), *self._answer_queue(queue, inner)])
        if inner.number <= queue.last_number:
            return Opened([rows.put_receive_queue(changed)])
        message = Message(
            connection_id=queue.connection_id,
            message_id=received.message_id,
            broker_ts=outer.timestamp,
            number=inner.number,
            body=inner.body,
        )
        changed = replace(changed, last_number=inner.number)
        return Opened([rows.put_receive_queue(changed), rows.add_message(message)], message)

    def _sender_key(self, queue: ReceiveQueue, envelope: Envelope) -> X25519PublicKey:
        """The first key counts; a message without one, or with another, comes from somebody else."""
        if queue.sender_key is None:
            if envelope.key is None:
                raise DecodeError
            return envelope.key
        if envelope.key not in (None, queue.sender_key):
            raise DecodeError
        return queue.sender_key

    def _answer_queue(self, queue: ReceiveQueue, confirmation: Confirmation) -> list[Change]:
        """A repeated confirmation says nothing new: the keys for the queue for answers exist already."""
        if confirmation.reply_to is None or queue.sender_key is not None:
            return []
        return [rows.put_send_queue(self._new_send_queue(queue.connection_id, confirmation.reply_to))]

    # Going on after a restart

    async def resume(self) -> None:
        """Finish what a previous run began."""
        for connection in await self._store.connections():
            try:
                await self._complete(connection.connection_id)
            except (Refused, Unreachable) as error:
                logger.warning("connection %d: %s", connection.connection_id, error)


def _created(queue: ReceiveQueue, answer: object) -> ReceiveQueue:
    """The queue with what the router says about it."""
    if not isinstance(answer, Ids):
        raise Unreachable("the router did not answer NEW with IDS")
    try:
        secret = queue.dh_key.exchange(answer.dh_key)
    except DecodeError:
        raise Unreachable("the router's key is of no use") from None
    return replace(queue, recipient_id=answer.recipient_id, sender_id=answer.sender_id, router_secret=secret)
