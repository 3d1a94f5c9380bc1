"""One session per router: requests of everybody, and the subscriptions of our queues there, kept alive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agent.duplex.defects import survive
from agent.duplex.inbox import Delivered, Inbox
from agent.duplex.records import ReceiveQueue
from agent.duplex.subscribing import SUBSCRIBED_AT_ONCE, SessionSubscriptions
from protocol.addresses import SmpServer
from protocol.agent.retry import RECONNECT, first
from protocol.connection import Received
from protocol.encoding import CorrId, EntityId
from protocol.smp_messages import Alls, Deld, End, Ends, Msg, SmpCommand, SmpMessage
from smp_client.errors import ClientError
from smp_client.requests import Request
from smp_client.session import SmpEvents, SmpSession
from smp_client.subscriptions import ServiceBalance
from transport.cancellation import TaskGroup, raise_if_cancelled

MAX_UNACKNOWLEDGED = 100_000
MAX_EARLY = 1000
"Queues with a message that are not stored: more are not of our making."
SHORT_SESSION = 1.0
"Seconds: after one that was shorter, a router is left alone for a while, as after none."

Connect = Callable[[SmpServer, SmpEvents], Awaitable[SmpSession]]


class RouterLink:
    """A router: connected when needed, and always while we have queues there (`keep`)."""

    def __init__(self, server: SmpServer, connect: Connect, inbox: Inbox) -> None:
        self._server = server
        self._connect = connect
        self._inbox = inbox
        self._lock = asyncio.Lock()
        self._session: SmpSession | None = None
        self._acks: asyncio.Queue[Request[SmpCommand]] = asyncio.Queue()
        self._unacknowledged: set[EntityId] = set()
        "Queues with a message that this session has brought: a router has to wait with their next."
        self._early: set[EntityId] = set()
        "Queues that brought a message before they were stored."
        self._unread: list[ReceiveQueue] = []
        "Those of them that are stored now: the router repeats the message after SUB."
        self._balance = ServiceBalance()
        self._subscriptions: SessionSubscriptions | None = None

    async def request(self, request: Request[SmpCommand], corr_id: CorrId | None = None) -> SmpMessage:
        """The answer to one command; raises `ClientError` if there is none."""
        session = await self.session()
        return await session.request(*request, corr_id=corr_id)

    async def session(self) -> SmpSession:
        async with self._lock:
            if self._session is None or self._session.is_closed:
                await self.close()
                self._session = await self._connect(self._server, self._on_events)
            return self._session

    def acknowledge(self, ack: Request[SmpCommand]) -> None:
        """In the background; if the ACK gets lost, the router repeats the message in the next session."""
        self._acks.put_nowait(ack)

    def subscribe_more(self, queue: ReceiveQueue) -> None:
        """It was stored; the current session may not know it."""
        if queue.recipient_id in self._early:
            self._early.discard(queue.recipient_id)
            self._unread.append(queue)
        if self._subscriptions is not None:
            self._subscriptions.subscribe_more()

    async def keep(self, only: EntityId | None = None) -> None:
        """Hold a session for our queues until cancelled, or for `only` this one until it is to be deleted."""
        if only is not None:
            self._inbox = replace(self._inbox, only=only)
        clock, retry = asyncio.get_running_loop().time, first(RECONNECT)
        while only is None or await self._inbox.queues(self._server, None, 0, 1):
            lived = 0.0
            try:
                session, began = await self.session(), clock()
                await self._serve(session)
                lived = clock() - began
            except ClientError:
                pass
            except Exception as defect:
                raise_if_cancelled()
                survive(defect, f"the session with {self._server.hosts[0]}")
                await self.close()
            if lived > SHORT_SESSION:
                retry = first(RECONNECT)
            else:
                await asyncio.sleep(retry.seconds)
                retry = retry.next(RECONNECT)

    async def _serve(self, session: SmpSession) -> None:
        self._unacknowledged.clear()
        self._subscriptions = subscriptions = SessionSubscriptions(
            self._server, session, self._inbox, self._received, self._balance, self._unread
        )
        async with TaskGroup() as tasks:
            work = [
                tasks.create_task(subscriptions.run(), name=f"subscriptions at {self._server.hosts[0]}"),
                tasks.create_task(self._acknowledge(session), name=f"ACKs to {self._server.hosts[0]}"),
            ]
            await session.wait_closed()
            for task in work:
                task.cancel()
        while not self._acks.empty():  # what they were for comes again
            self._acks.get_nowait()
        self._subscriptions = None
        await subscriptions.lost()

    async def _acknowledge(self, session: SmpSession) -> None:
        while True:
            acks = [await self._acks.get()]
            while not self._acks.empty() and len(acks) < SUBSCRIBED_AT_ONCE:
                acks.append(self._acks.get_nowait())
            self._unacknowledged.difference_update(ack.entity_id for ack in acks)
            answers = await session.request_many(acks)
            following = [
                Delivered(ack.entity_id, answer)
                for ack, answer in zip(acks, answers, strict=True)
                if isinstance(answer, Msg)
            ]
            await self._received(following)
            if any(isinstance(answer, ClientError) for answer in answers):
                # The router waits for an ACK that got lost, or we for a message that came with its answer.
                await session.close()
                return

    async def _received(self, messages: Sequence[Delivered]) -> None:
        if messages:
            unknown = await self._inbox.received(self._server, messages, self.acknowledge)
            if unknown:
                await self._came_early(unknown)

    async def _came_early(self, unknown: Sequence[EntityId]) -> None:
        self._unacknowledged.difference_update(unknown)
        if len(self._early) >= MAX_EARLY:
            self._early.clear()
        self._early.update(unknown)
        for queue in await self._inbox.stored(self._server, unknown):  # in the meantime
            self.subscribe_more(queue)

    async def _on_events(self, events: list[Received[SmpMessage]]) -> None:
        messages = [
            Delivered(event.entity_id, event.message)
            for event in events
            if isinstance(event.message, Msg) and self._is_expected(event.entity_id)
        ]
        await self._received(messages)
        ended = [event.entity_id for event in events if isinstance(event.message, End)]
        if ended:
            await self._inbox.ended(self._server, ended)
        deleted = [event.entity_id for event in events if isinstance(event.message, Deld)]
        if deleted:
            await self._inbox.deleted(self._server, deleted)
        for event in events:
            if isinstance(event.message, Ends) and self._subscriptions is not None:
                self._subscriptions.service_ended(event.message.queues)
            elif isinstance(event.message, Alls) and self._subscriptions is not None:
                self._subscriptions.all_sent()

    def _is_expected(self, recipient_id: EntityId) -> bool:
        """One message of a queue, until its ACK: whoever sends more does not wake the application."""
        if recipient_id in self._unacknowledged:
            return False
        if len(self._unacknowledged) >= MAX_UNACKNOWLEDGED:
            self._unacknowledged.clear()  # of queues that there are not
        self._unacknowledged.add(recipient_id)
        return True

    async def close(self) -> None:
        """End the session. A defect in reading what the router sent shows now."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await session.close()
            except ClientError:
                pass
            except Exception as defect:
                raise_if_cancelled()
                survive(defect, f"reading from {self._server.hosts[0]}")
