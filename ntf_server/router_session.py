"""One session with a router: log in, subscribe what the store says, keep it so, notice when it is not.

What the router tells meanwhile goes to the store: notifications and then on to the push side, ends to their
queues. Everything that changes during a session is changed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ntf_server.clock import MICROSECONDS
from ntf_server.metrics import counter
from ntf_server.service_credentials import RouterService
from ntf_server.surroundings import Surroundings, store_backoff
from protocol.addresses import SmpServer, canonical_host
from protocol.connection import Received
from protocol.crypto import decode_private_key
from protocol.encoding import EntityId
from protocol.errors import DecodeError
from protocol.smp_messages import Ends, Nmsg, Nsub, Nsubs, QueueSet, SmpCommand, SmpMessage, Soks
from protocol.statuses import SubEvent, SubState, bulk_move
from smp_client.backoff import Backoff
from smp_client.errors import BadAnswer, ClientError, RequestTimeout
from smp_client.requests import Nonsense, Request
from smp_client.session import FormerSession, SmpSession
from smp_client.subscriptions import (
    DELETED,
    QUEUE_EVENTS,
    SERVICE_REFUSED,
    Balance,
    Flight,
    ServiceBalance,
    SubscribeOutcomes,
    WaitingQueues,
    WaitingRoom,
    error_text,
    is_temporary,
    refusal,
    sort_outcomes,
)
from store.interface import LeaseLost, RouterGone, StoreError, SubscriberStore
from store.journal_schema import JournalEvent
from store.leases import of_router
from store.records import Moved, Notification, QueueEvent, QueueRow, ServerKey, Stored, SubKey

logger = logging.getLogger(__name__)

WAITING_LIMIT = 10_000
"New queues kept in memory per router; more are found in the store."
WAITING_IN_ALL, WAITING_SHARE = 200_000, 64
"Those of all routers together, some 300 bytes each; and what each router may keep in any case."
BATCH_SIZE = 900
"Queues asked for at once."
VERIFY_INTERVAL = 180.0
"Between comparisons of our queues with a router's, while a session lasts."
LONGEST_REST = 60.0
"Between looks at what is due."
FIRST_BUSY, LONGEST_BUSY = 1.0, 30.0
"Seconds between attempts while a router answers that it cannot serve requests now."
LEASE_LOOK = 1.0
"Between looks whether this daemon owns the router again."

RECEIVED = counter("notifications_received", "Received notifications")
RECEIVED_OWN = counter("notifications_received_own", "Received notifications, of own servers", ["server"])
WITHOUT_TOKEN = counter(
    "notifications_received_without_token", "Received notifications that have no subscription or active token"
)
LATE = counter("notifications_late", "Received notifications of routers that another daemon had taken over")
SUBSCRIBED = counter("smp_subscribed", "Queues that a router confirmed one by one")
REFUSED = counter("smp_subscribe_errors", "Queues that could not be subscribed", ["status"])
BUSY = counter("smp_temporary_errors", "Subscription requests that routers answered with a temporary error")
DRIFTS = counter("smp_service_drifts", "Times a router had another set of queues than this server")
DRIFTED_QUEUES = counter(
    "smp_service_drifted_queues", "Difference in the number of queues, when sets differed"
)
HEALED = counter("smp_service_healed_queues", "Queues that routers had lost and that were bound again")

BAD_KEY = SubEvent.failed("the notifier key cannot be used")
FROM_START = SubKey(0)


class EndSession(Exception):
    """The session is of no use any more; with `at_once` the next one need not wait."""

    def __init__(self, reason: str, *, at_once: bool = False) -> None:
        super().__init__(reason)
        self.at_once = at_once


class RouterBusy(Exception):
    """The router cannot serve requests now. Its queues and our service there stay as they are."""


class TakenOver(EndSession):
    """Another instance has the service now."""


class KnownRouter:
    """A router as the store knows it, and what of it outlives a session."""

    def __init__(self, key: ServerKey, server: SmpServer, room: WaitingRoom, *, own: bool) -> None:
        self.key = key
        self.server = server
        self.name = server.host_port
        "In logs and in the journal."
        self.host = canonical_host(server.hosts[0])
        self.has_own_hosts = own
        self.is_own = False
        "It has also proved its identity at these hosts: clients may name any host with any key."
        self.waiting: WaitingQueues[QueueRow] = WaitingQueues(WAITING_LIMIT, room)
        self.balance = ServiceBalance()
        self.former: FormerSession | None = None
        "The session before this one, as long as it may bring something."


class ServiceCheck(NamedTuple):
    """The answer to NSUBS."""

    balance: Balance
    ours: QueueSet
    routers: QueueSet

    @property
    def surplus(self) -> int:
        """How many queues more the router has."""
        return self.routers.count - self.ours.count


class RouterSession:
    """Made before its connection, whose events go to `receive`; `run` does all the rest."""

    def __init__(self, router: KnownRouter, parts: Surroundings, service: RouterService) -> None:
        self._router = router
        self._parts = parts
        self._store = parts.store
        self._push_sink = parts.push_sink
        self._clock = parts.clock
        self._journal = parts.journal
        self._service = service
        self._session: SmpSession | None = None
        self._service_id: EntityId | None = None
        self._flight: Flight | None = None
        self._wake = asyncio.Event()
        self._ending: EndSession | None = None
        self._shrunk = False
        "Subscriptions went away since it was last asked whether any are left."
        self._verified_at = parts.clock.monotonic()
        self._retry_at: int | None = None
        self._is_retired = False
        self._busy = Backoff(FIRST_BUSY, LONGEST_BUSY, random.random)
        self._was_busy = False
        self._has_service = True
        "False once the router rejected NSUBS in this session: its queues are subscribed one by one."
        self.has_queues = False
        "The router confirmed some, so it may have notifications for this session."
        self.service_queues = 0
        self.individual_queues = 0
        self.is_subscribed = False
        "Everything that was stored at the start of the session has been asked for."

    @property
    def session(self) -> SmpSession:
        assert self._session is not None
        return self._session

    async def run(self, session: SmpSession) -> None:
        """Ends with `EndSession`, `ClientError` or by cancellation. A store that fails for a while does not
        end it: the router's next words would be lost with the connection."""
        self._session = session  # before anything is read: events need it
        session.when_closed(self._wake.set)
        backoff = store_backoff()
        while True:
            try:
                self._check_owner()
                await self._subscribe_all()
                backoff.reset()
                self._was_busy = False
                await self._keep()
            except LeaseLost:
                await self._only_read(LEASE_LOOK)  # what comes until the new owner has the queues
            except RouterGone:
                raise EndSession("no subscription is left", at_once=True) from None
            except RouterBusy as error:
                if not self._was_busy:  # once per outage
                    logger.warning("%s: cannot subscribe, retrying: %s", self._router.name, error)
                self._was_busy = True
                await self._only_read(self._busy.next())
            except StoreError as error:
                logger.error("%s: cannot subscribe, the store fails: %s", self._router.name, error)
                await self._only_read(backoff.next())

    async def _subscribe_all(self) -> None:
        self.individual_queues = 0
        # Whatever waits is stored already, so the sweep finds it; what comes from now on waits anew.
        self._router.waiting.clear()
        record = await self._store.server(self._router.key)
        service = self.session.params.service
        self._service_id = None if service is None else service.service_id
        await self._service.adopt(record, service)
        balance = Balance.EQUAL
        if self._service_id is not None and self._service_id == record.service_id and record.associated_count:
            balance = await self._service_balance()
        await self._sweep(associated=False)
        self.is_subscribed = True
        if balance is not Balance.EQUAL:
            await self._heal()
        if self._router.former is not None:
            self._router.former.succeeded()

    def retire(self) -> None:
        """From now on only notifications count: its queues are a matter of its successor."""
        self._is_retired = True

    def look(self, *, shrunk: bool = False) -> None:
        """There may be something to do: queues wait, or (`shrunk`) are gone."""
        self._shrunk |= shrunk
        self._wake.set()

    def end(self, reason: EndSession) -> None:
        """Stop at the next opportunity."""
        self._ending = reason
        self._wake.set()

    def _check_owner(self) -> None:
        """Before the router is asked for anything: it would take it from the daemon that has it."""
        if self._parts.ownership.is_shared and not self._parts.ownership.owns(of_router(self._router.key)):
            raise LeaseLost("another daemon may own it by now")

    def _check_open(self) -> None:
        if self._ending is not None:
            raise self._ending
        self.session.check_open()

    # The service as a whole

    async def _service_balance(self) -> Balance:
        check = await self._subscribe_service()
        return Balance.DRIFTED if check is None else check.balance

    async def _subscribe_service(self) -> ServiceCheck | None:
        """NSUBS, and how our set of queues compares with the router's; None if it is rejected.

        Raises RouterBusy for a temporary error. Only an error about the service resets the service.
        """
        key = self._router.key
        record = await self._store.server(key)
        ours = QueueSet(record.associated_count, record.associated_hash)
        self._check_owner()
        answer: SmpMessage | ClientError
        try:
            answer = await self.session.subscribe_service(Nsubs(ours))
        except BadAnswer as error:  # it would be no better in another session
            answer = error
        self._verified_at = self._clock.monotonic()
        if not isinstance(answer, Soks):
            await self._service_rejected(answer)
            return None
        routers = answer.queues
        self.has_queues |= routers.count > 0
        changed = await self._store.set_service_subscribed(key)
        self.service_queues = ours.count
        total = await self._store.subscription_count(key)
        self._journal.record(
            JournalEvent.SMP_SERVICE_SUBSCRIBED,
            server=self._router.name,
            count=routers.count,
            expected=ours.count,
            total=total,
            changed=changed,
        )
        return ServiceCheck(self._router.balance.compare(ours, routers), ours, routers)

    async def _is_service_known(self) -> bool:
        """A queue may be refused for ever because of the service: that must not reset it at every retry."""
        return self._service_id is not None and await self._subscribe_service() is not None

    async def _service_rejected(self, answer: SmpMessage | ClientError) -> None:
        if is_temporary(answer):
            BUSY.inc()
            raise RouterBusy(f"the router answered NSUBS with {error_text(answer)}")
        if refusal(answer) is SERVICE_REFUSED and await self._service.refused():
            raise EndSession("the router rejected the service subscription")
        self._has_service = False
        name, error = self._router.name, error_text(answer)
        logger.warning("%s: NSUBS was rejected with %s; subscribing its queues one by one", name, error)

    async def _heal(self) -> None:
        """Bind every associated queue again, one by one, unless the router's set is ours by now."""
        before = await self._subscribe_service()
        if before is not None and before.balance is Balance.EQUAL:
            return
        # What was deleted here is no drift: the sweep shows whether it is all of the difference.
        is_known = before is None or not self._router.balance.explains(before.surplus)
        if before is not None and before.balance is Balance.DRIFTED and is_known:
            self._report_drift(before.ours.count, before.routers.count)
        started = self._clock.monotonic()
        await self._sweep(associated=True)
        after = await self._subscribe_service()
        if before is None or after is None or (before.balance is after.balance is Balance.UNCERTAIN):
            return
        if after.balance is Balance.DRIFTED:
            self._router.balance.settle(after.ours, after.routers)
        gained = after.routers.count - before.routers.count
        if not is_known:
            if (lost := min(gained, after.surplus - before.surplus)) <= 0:
                logger.info("%s: has %d queues that were deleted here", self._router.name, after.surplus)
                return
            self._report_drift(before.ours.count, before.ours.count - lost)
        self._report_healed(after, gained, started)

    def _report_drift(self, ours: int, routers: int) -> None:
        name = self._router.name
        DRIFTS.inc()
        DRIFTED_QUEUES.inc(abs(routers - ours))
        if routers == ours:
            logger.warning("%s: has a different set of %d queues of this service", name, ours)
        else:
            logger.warning("%s: has %d queues of this service instead of %d", name, routers, ours)
        self._journal.record(JournalEvent.SMP_DRIFT, server=name, count=routers, expected=ours)

    def _report_healed(self, check: ServiceCheck, gained: int, started: float) -> None:
        name, healed = self._router.name, max(0, gained)
        took = int((self._clock.monotonic() - started) * MICROSECONDS)
        HEALED.inc(healed)
        logger.info("%s: has %d queues of this service now, %d more", name, check.routers.count, healed)
        self._journal.record(JournalEvent.SMP_HEALED, server=name, count=healed, latency_us=took)

    # Queues one by one

    async def _sweep(self, *, associated: bool) -> None:
        """Subscribe all stored queues of a kind, page by page, and between the pages whatever is new."""
        after = FROM_START
        while page := await self._store.queues(
            self._router.key, after=after, limit=BATCH_SIZE, associated=associated
        ):
            await self._subscribe(page)
            await self._subscribe_waiting()
            after = page[-1].key

    async def _keep(self) -> None:
        """Subscribe what is new or due, for ever."""
        waiting = self._router.waiting
        while True:
            self._wake.clear()
            if waiting.is_overflow_due(self._clock.monotonic()):
                waiting.clear()
                self.individual_queues = 0
                await self._sweep(associated=False)
            if await self._subscribe_waiting() or await self._subscribe_due():
                continue
            if self._is_verification_due():
                if await self._service_balance() is Balance.DRIFTED:
                    await self._heal()
                continue
            await self._check_needed()
            await self._rest()

    async def _subscribe_waiting(self) -> bool:
        """The next batch of those that were handed over; False if there is none."""
        self._check_open()
        rows = self._router.waiting.take(BATCH_SIZE, self._clock.monotonic())
        if rows:
            await self._subscribe(rows)
        return bool(rows)

    async def _subscribe_due(self) -> bool:
        """Queues that failed some time ago; False if none is due."""
        now = int(self._clock.now())
        self._retry_at = await self._store.next_retry(self._router.key)
        if self._retry_at is None or self._retry_at > now:
            return False
        due = await self._store.due_retries(self._router.key, now, BATCH_SIZE)
        await self._subscribe(due, failed_before=True)
        return True

    async def _subscribe(self, rows: Sequence[QueueRow], *, failed_before: bool = False) -> None:
        self._check_open()
        self._check_owner()
        usable: dict[EntityId, QueueRow] = {}
        requests: list[Request[SmpCommand]] = []
        unusable: list[QueueEvent] = []
        for row in rows:
            try:
                requests.append(Request(row.notifier_id, Nsub(), decode_private_key(row.notifier_key)))
                usable[row.notifier_id] = row
            except DecodeError:
                unusable.append(QueueEvent(row.notifier_id, BAD_KEY))
        await self._move(unusable)
        if not requests:
            return
        batch = self.session.new_batch(len(requests))
        self._flight = flight = Flight(list(usable), batch)
        try:
            answers = await self.session.send(batch, requests)
            outcomes = sort_outcomes(list(usable), answers, self._service_id)
            if failed_before and outcomes.service_failed:
                outcomes.service_failed = not await self._is_service_known()
            await self._store_outcomes(outcomes, usable)
        finally:
            self._flight = None
        await self._move([QueueEvent(*overtaken) for overtaken in flight.overtaken])
        if all(isinstance(answer, RequestTimeout) for answer in answers):
            raise EndSession("the router does not answer NSUB")
        self._check_busy(answers)

    def _check_busy(self, answers: Sequence[SmpMessage | ClientError]) -> None:
        """Raise RouterBusy if the router serves nothing now.

        A few queues that it cannot serve wait by themselves: it may never be able to, and starting over would
        subscribe all others again and again.
        """
        busy = sum(is_temporary(answer) for answer in answers)
        BUSY.inc(busy)
        if busy == len(answers) and (busy >= BATCH_SIZE or not self.has_queues):
            raise RouterBusy(f"the router answered NSUB with {error_text(answers[0])}")
        if not busy:
            self._busy.reset()

    async def _store_outcomes(self, outcomes: SubscribeOutcomes, rows: dict[EntityId, QueueRow]) -> None:
        await self._set_subscribed(outcomes.associated, self._service_id)
        await self._set_subscribed(outcomes.individual, None)
        self.individual_queues += len(outcomes.individual)
        if outcomes.retried:
            retry_at = self._clock.monotonic() + self._busy.next()
            self._router.waiting.add_later([rows[id] for id in outcomes.retried], retry_at)
        changed = [QueueEvent(*change) for change in outcomes.changed]
        restart = outcomes.service_failed and await self._service.refused()
        if restart:  # these are not lost: the next session subscribes them
            changed = [change for change in changed if change.event is not SERVICE_REFUSED]
        await self._move(changed)
        if restart:
            raise EndSession("the router refuses the service for a queue")

    async def _set_subscribed(self, notifier_ids: Sequence[EntityId], service_id: EntityId | None) -> None:
        if notifier_ids:
            self.has_queues = True
            moves = await self._store.set_subscribed(self._router.key, notifier_ids, service_id=service_id)
            self._router.balance.no_surplus(notifier_ids)  # queues that were given up and are ours again
            self._record_moves(moves)
            SUBSCRIBED.inc(len(notifier_ids))

    async def _move(self, events: Sequence[QueueEvent]) -> list[Moved]:
        """Store what ended queues, or kept them from being subscribed."""
        if not events:
            return []
        moves = await self._store.move_queues(self._router.key, events, now=int(self._clock.now()))
        for ended, count in Counter(event.event.input for event in events).items():
            REFUSED.labels(bulk_move(ended).target).inc(count)
        self._record_moves(moves)
        self._shrunk = True
        return moves

    def _record_moves(self, moves: Sequence[Moved]) -> None:
        """Note in the journal which subscriptions changed; being on the way (PENDING) is not worth a note."""
        for move in moves:
            if move.after is not SubState.PENDING:
                self._journal.record(
                    JournalEvent.SUB_STATUS_CHANGED,
                    server=self._router.name,
                    subscription=move.subscription_id,
                    token=move.token_id,
                    status_from=move.before.value,
                    status_to=move.after.value,
                )

    # Waiting

    def _is_verification_due(self) -> bool:
        return (
            self._service_id is not None
            and self._has_service
            and self.service_queues > 0
            and self._clock.monotonic() - self._verified_at >= VERIFY_INTERVAL
        )

    async def _check_needed(self) -> None:
        record = await self._store.server(self._router.key)
        self.service_queues = record.associated_count if self._service_id is not None else 0
        if self._shrunk:
            self._shrunk = False
            if not await is_needed(self._store, self._router):
                raise EndSession("no subscription is left", at_once=True)

    async def _rest(self) -> None:
        """Until something is handed over, an event comes, something is due, or the session ends."""
        delay = LONGEST_REST
        if (later := self._router.waiting.next_at()) is not None:
            delay = min(delay, later - self._clock.monotonic())
        if self._retry_at is not None:
            delay = min(delay, self._retry_at - self._clock.now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(delay, 0)):
                await self._wake.wait()
        self._check_open()

    async def _only_read(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    self._wake.clear()
                    self._check_open()
                    await self._wake.wait()

    # What the router tells, in the task that reads; nothing more is read until it is stored

    async def receive(self, events: list[Received[SmpMessage]]) -> None:
        block = [
            Notification(event.entity_id, *event.message)
            for event in events
            if type(event.message) is Nmsg  # a tuple, and this loop is hot
        ]
        if block:
            await self._store_notifications(block)
        if len(block) < len(events) and not self._is_retired:
            await self._store_ends(events)

    async def _store_ends(self, events: Sequence[Received[SmpMessage]]) -> None:
        ended: list[QueueEvent] = []
        for _, notifier_id, message, _ in events:
            if (event := QUEUE_EVENTS.get(type(message))) is not None:
                if self._flight is None or not self._flight.absorbs(notifier_id, event):
                    ended.append(QueueEvent(notifier_id, event))
            elif isinstance(message, Ends) and notifier_id == self._service_id:
                self.end(TakenOver("another instance took over"))
            elif not isinstance(message, Nmsg):
                self.session.blame(Nonsense.UNASKED, 1)
        if not ended:
            return
        try:
            moves = await self._parts.patiently(lambda: self._move(ended), self._router.name)
        except LeaseLost:
            return  # their new owner knows; notifications of other queues may still be on their way
        deleted = [event.notifier_id for event in ended if event.event is DELETED]
        given_up = self._router.balance.no_surplus(deleted)
        self.session.blame(Nonsense.UNKNOWN, max(0, len(ended) - len(moves) - given_up))
        self.individual_queues = max(0, self.individual_queues - len(moves))
        self._wake.set()

    async def _store_notifications(self, block: Sequence[Notification]) -> None:
        """One transaction for those of a block; then the push side, which may take its time."""
        received_at = self._clock.monotonic()
        timestamp = int(self._clock.now())
        key = self._router.key
        try:
            stored = await self._parts.patiently(
                lambda: self._store.add_notifications(key, block, received_at=timestamp), self._router.name
            )
        except LeaseLost:
            # The router will not send it to the new owner.
            stored = await self._parts.patiently(
                lambda: self._store.add_late_notifications(key, block, received_at=timestamp),
                self._router.name,
            )
            LATE.inc(len(block))
        self._count(stored)
        if arrived := [entry for entry in stored if entry is not None]:
            await self._push_sink.notify(arrived, received_at)

    def _count(self, stored: Sequence[Stored | None]) -> None:
        RECEIVED.inc(len(stored))
        if self._router.is_own:
            RECEIVED_OWN.labels(self._router.host).inc(len(stored))
        ids = [(entry.token_id, entry.subscription_id) for entry in stored if entry is not None]
        if ids:
            self.session.praise(len(ids))
            self._journal.record_received(self._router.name, ids)
        if lost := len(stored) - len(ids):
            self.session.blame(Nonsense.UNKNOWN, lost)
            WITHOUT_TOKEN.inc(lost)
            self._journal.record(JournalEvent.NTF_RECEIVED, server=self._router.name, count=lost)


async def is_needed(store: SubscriberStore, router: KnownRouter) -> bool:
    """Whether the router has any queue for us: now, or after a slow retry."""
    if await store.queues(router.key, after=FROM_START, limit=1):
        return True
    waiting = router.waiting
    return await store.next_retry(router.key) is not None or len(waiting) > 0 or waiting.overflowed
