"""The subscriptions of one session with a router: our service's queues all at once, the others one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

from agent.duplex.events import ServiceAll, ServiceDown, ServiceEnd, ServiceUp
from agent.duplex.inbox import Delivered, Inbox, SubscribedQueue
from agent.duplex.records import ReceiveQueue
from agent.duplex.replies import RouterFailure, TemporaryFailure, answer_to, failure_of
from protocol.addresses import SmpServer
from protocol.agent.retry import FAST, first
from protocol.encoding import EntityId
from protocol.errors import SERVICE_ERRORS
from protocol.smp_messages import Err, Msg, QueueSet, SmpMessage, Sok, Soks, Sub, Subs
from smp_client.errors import ClientError
from smp_client.session import SmpSession
from smp_client.subscriptions import Balance, ServiceBalance

SUBSCRIBED_AT_ONCE = 1000
SECOND_LOOK = 1.0
"Seconds until a difference is believed: a queue may just be on its way from the router to our file."


class Bulk(Enum):
    """How far the subscription of a service is, in one session."""

    NONE = "no service, or another client has it"
    PENDING = "SUBS is on its way"
    ACTIVE = "the router has confirmed it"


class SessionSubscriptions:
    """Of one session. Another session has another object: no answer of an old one counts in a new one."""

    def __init__(
        self,
        server: SmpServer,
        session: SmpSession,
        inbox: Inbox,
        received: Callable[[Sequence[Delivered]], Awaitable[None]],
        balance: ServiceBalance,
        unread: list[ReceiveQueue],
    ) -> None:
        """`unread`: queues that are subscribed one by one even if they are our service's."""
        self._server = server
        self._session = session
        self._inbox = inbox
        self._received = received
        self._balance = balance
        service = session.params.service
        self.service_id = None if service is None else service.service_id
        self.bulk = Bulk.NONE
        self._all_sent = False
        self._changed = asyncio.Event()
        self._unread = unread

    def subscribe_more(self) -> None:
        """There are queues that this session does not know, or has to ask for."""
        self._changed.set()

    async def run(self) -> None:
        """The service first: what the router counts to it need not be asked for."""
        if self.service_id is None:
            last = await self._subscribe_rest(0, None)
        else:
            last = await self._subscribe_service(self.service_id)
        while True:
            await self._changed.wait()
            last = await self._subscribe_rest(last, self.service_id)

    # All at once

    async def _subscribe_service(self, service_id: EntityId) -> int:
        """If the router has other queues than we think it has, all are also subscribed one by one."""
        self.bulk = Bulk.PENDING
        ours, routers = await self._ask_service(service_id)
        if self._balance.compare(ours, routers) is Balance.DRIFTED:
            await asyncio.sleep(SECOND_LOOK)
            ours, routers = await self._ask_service(service_id)
        if self._balance.compare(ours, routers) is not Balance.DRIFTED:
            self._confirmed(routers, ours, as_expected=True)
            return await self._subscribe_rest(0, service_id)
        last = await self._subscribe_rest(0, None)
        self._balance.settle(*await self._ask_service(service_id))
        self._confirmed(routers, ours, as_expected=False)
        return last

    def _confirmed(self, queues: QueueSet, expected: QueueSet, *, as_expected: bool) -> None:
        if self.bulk is not Bulk.PENDING:
            return  # another client took it over in the meantime
        self.bulk = Bulk.ACTIVE
        self._inbox.publish(ServiceUp(self._server, queues, expected, as_expected))
        if self._all_sent:
            self._inbox.publish(ServiceAll(self._server))

    async def _ask_service(self, service_id: EntityId) -> tuple[QueueSet, QueueSet]:
        """What we think is the service's, and what the router has."""
        retry = first(FAST)
        while True:
            ours = await self._inbox.service_queues(self._server, service_id)
            try:
                answer = await answer_to(self._session.subscribe_service(Subs(ours)))
                if isinstance(answer, Soks):
                    return ours, answer.queues
                await self._refused()
            except TemporaryFailure:
                pass
            except RouterFailure:
                await self._refused()
            await asyncio.sleep(retry.seconds)
            retry = retry.next(FAST)

    async def _refused(self) -> None:
        """Queue by queue, in another session: in this one the router expects the service's signature."""
        self.bulk = Bulk.NONE
        await self._inbox.logins.refused(self._server)
        await self._session.close()

    def all_sent(self) -> None:
        """ALLS. It may overtake the confirmation, but is told after it."""
        self._all_sent = True
        if self.bulk is Bulk.ACTIVE:
            self._inbox.publish(ServiceAll(self._server))

    def service_ended(self, queues: QueueSet) -> None:
        """ENDS: not taken back in this session, or two clients would take it from each other for ever."""
        self.bulk = Bulk.NONE
        self._inbox.publish(ServiceEnd(self._server, queues))

    async def lost(self) -> None:
        """The session has ended."""
        if self.service_id is not None and self.bulk is Bulk.ACTIVE:
            queues = await self._inbox.service_queues(self._server, self.service_id)
            self._inbox.publish(ServiceDown(self._server, queues))
        await self._inbox.lost(self._server, self.service_id)

    # One by one

    async def _subscribe_rest(self, last: int, without: EntityId | None) -> int:
        """All after the queue `last` that are not of this service; the last one found."""
        self._changed.clear()
        unread = self._unread.copy()
        self._unread.clear()
        unanswered = await self._subscribe_batch(unread) if unread else []
        while queues := await self._inbox.queues(self._server, without, last, SUBSCRIBED_AT_ONCE):
            last = queues[-1].queue_id
            unanswered += await self._subscribe_batch(queues)
        retry = first(FAST)
        while unanswered:
            await asyncio.sleep(retry.seconds)
            retry = retry.next(FAST)
            unanswered = [
                queue
                for start in range(0, len(unanswered), SUBSCRIBED_AT_ONCE)
                for queue in await self._subscribe_batch(unanswered[start : start + SUBSCRIBED_AT_ONCE])
            ]
        return last

    async def _subscribe_batch(self, queues: Sequence[ReceiveQueue]) -> list[ReceiveQueue]:
        """Those that the router did not answer for now."""
        requests = [queue.request(Sub()) for queue in queues]
        answers = list(zip(queues, await self._session.request_many(requests), strict=True))
        if any(self._is_about_service(answer) for _, answer in answers):
            await self._refused()
            return []
        done = [
            SubscribedQueue(queue, answer.service_id if isinstance(answer, Sok) else None)
            for queue, answer in answers
            if not isinstance(answer, Err | ClientError)
        ]
        if done:
            await self._inbox.subscribed(self._server, done)
        messages = [
            Delivered(queue.recipient_id, answer) for queue, answer in answers if isinstance(answer, Msg)
        ]
        await self._received(messages)
        return [queue for queue, answer in answers if self._failed(queue, answer)]

    def _failed(self, queue: ReceiveQueue, answer: SmpMessage | ClientError) -> bool:
        """Whether to try again."""
        failure = failure_of(answer)
        if isinstance(answer, Err) and not isinstance(failure, TemporaryFailure):
            self._inbox.unsubscribed(queue, answer)
            return False
        return failure is not None

    def _is_about_service(self, answer: SmpMessage | ClientError) -> bool:
        if isinstance(answer, Err):
            return self.service_id is not None and answer.error in SERVICE_ERRORS
        return isinstance(answer, Sok) and answer.service_id not in (None, self.service_id)
