"""Our queues as the sessions with routers know them: which there are, and what becomes of what they bring."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agent.duplex.events import Event, Failed, ServerDown, ServerUp
from agent.duplex.incoming import receive
from agent.duplex.records import ReceiveQueue
from agent.duplex.rotation import queues_deleted
from agent.duplex.services import Logins, service_queues, set_queue_services, subscriptions_ended
from agent.duplex.store import DuplexStore, Transact, Tx
from agent.duplex.tables import connections_at, queues_at, receive_queue_of
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.hiding import hides_bytes
from protocol.smp_messages import Ack, Err, Msg, QueueSet, SmpCommand
from smp_client.requests import Request

Acknowledge = Callable[[Request[SmpCommand]], None]


@hides_bytes
class Delivered(NamedTuple):
    """A message of one of our queues."""

    recipient_id: EntityId
    message: Msg


@hides_bytes
class SubscribedQueue(NamedTuple):
    queue: ReceiveQueue
    service_id: EntityId | None
    "To which service the router counts it now."


@dataclass(frozen=True, slots=True)
class Inbox:
    _store: DuplexStore
    _transact: Transact
    publish: Callable[[Event], None]
    _room: Callable[[], Awaitable[object]]
    "Waits until the application has taken events."
    _start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    logins: Logins
    only: EntityId | None = field(default=None, repr=False)
    "The one queue that the session is for; all of the router without it."

    async def queues(
        self, server: SmpServer, service_id: EntityId | None, after: int, limit: int
    ) -> list[ReceiveQueue]:
        """The next to be subscribed one by one: all, or those that are not this service's."""
        return await self._store.read(lambda db: queues_at(db, server, service_id, after, limit, self.only))

    async def service_queues(self, server: SmpServer, service_id: EntityId) -> QueueSet:
        """What is the service's, as far as we know."""
        return await self._store.read(lambda db: service_queues(db, server, service_id))

    async def stored(self, server: SmpServer, recipient_ids: Sequence[EntityId]) -> list[ReceiveQueue]:
        """Those of these that we know."""

        def look(db: sqlite3.Connection) -> list[ReceiveQueue]:
            found = [receive_queue_of(db, server, recipient_id) for recipient_id in recipient_ids]
            return [queue for queue in found if queue is not None]

        return await self._store.read(look)

    async def received(
        self, server: SmpServer, messages: Sequence[Delivered], acknowledge: Acknowledge
    ) -> list[EntityId]:
        """One transaction for all that came together; then ACKs for what the application need not see.

        Returns which queues are unknown: a queue may be stored a moment after its first message has come.
        """

        def take(tx: Tx) -> tuple[list[ReceiveQueue | None], list[EntityId]]:
            queues = [receive(tx, server, *delivered) for delivered in messages]
            waiting = [
                delivered.recipient_id
                for delivered, queue in zip(messages, queues, strict=True)
                if queue is None
            ]
            return queues, [each for each in waiting if receive_queue_of(tx.db, server, each) is None]

        queues, unknown = await self._transact(take)
        acks = [
            queue.request(Ack(delivered.message.message_id))
            for queue, delivered in zip(queues, messages, strict=True)
            if queue is not None
        ]
        if acks:
            self._start(self._acknowledge(acks, acknowledge), "ACKs")
        found: list[EntityId] = unknown
        return found

    async def _acknowledge(self, acks: Sequence[Request[SmpCommand]], acknowledge: Acknowledge) -> None:
        await self._room()
        for ack in acks:
            acknowledge(ack)

    async def subscribed(self, server: SmpServer, queues: Sequence[SubscribedQueue]) -> None:
        changed = [(queue.queue_id, at) for queue, at in queues if queue.service_id != at]
        if changed:
            await self._transact(lambda tx: set_queue_services(tx, changed))
        self.publish(ServerUp(server, tuple(dict.fromkeys(queue.connection_id for queue, _ in queues))))

    def unsubscribed(self, queue: ReceiveQueue, error: Err) -> None:
        self.publish(Failed(queue.connection_id, f"SMP {error.error}"))

    async def ended(self, server: SmpServer, recipient_ids: Sequence[EntityId]) -> None:
        """Another client has these queues now."""
        await self._room()
        await self._transact(lambda tx: subscriptions_ended(tx, server, recipient_ids))

    async def deleted(self, server: SmpServer, recipient_ids: Sequence[EntityId]) -> None:
        """The router has deleted these queues."""
        await self._room()
        await self._transact(lambda tx: queues_deleted(tx, server, recipient_ids, self.logins.servers))

    async def lost(self, server: SmpServer, service_id: EntityId | None) -> None:
        """The session has ended; those of the service are told of by themselves."""
        connection_ids = await self._store.read(lambda db: connections_at(db, server, service_id, self.only))
        self.publish(ServerDown(server, connection_ids))
