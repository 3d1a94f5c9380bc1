"""One session with a router: subscribe what the store says, keep it so, and notice when it is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ntf_server.clock import Clock
from ntf_server.journal import EventSink
from ntf_server.metrics import counter
from ntf_server.service_credentials import ServiceLogin
from ntf_server.subscriber_config import SubscriberConfig
from protocol.crypto import decode_private_key
from protocol.encoding import EntityId
from protocol.errors import DecodeError
from protocol.smp_messages import Nsub, QueueSet, SmpCommand, Soks
from protocol.statuses import SubEvent, SubInput, SubState, bulk_move
from smp_client.errors import RequestTimeout
from smp_client.requests import Request
from smp_client.session import SmpSession
from smp_client.subscriptions import (
    SERVICE_REFUSED,
    Balance,
    Flight,
    Outcomes,
    ServiceBalance,
    WaitingQueues,
    sort_outcomes,
)
from store.interface import SubscriberStore
from store.journal_schema import JournalEvent
from store.records import Moved, QueueEvent, QueueRow, ServerKey, SubKey

logger = logging.getLogger(__name__)

SUBSCRIBED = counter("smp_subscribed", "Queues that a router confirmed one by one")
REFUSED = counter("smp_subscribe_errors", "Queues that could not be subscribed", ["status"])
DRIFTS = counter("smp_service_drifts", "Times a router had another set of queues than this server")
DRIFTED_QUEUES = counter(
    "smp_service_drifted_queues", "Difference in the number of queues, when sets differed"
)
HEALED = counter("smp_service_healed_queues", "Queues that routers had lost and that were bound again")

HANDED_OVER = SubEvent(SubInput.HANDED_OVER)
BAD_KEY = SubEvent.failed("the notifier key cannot be used")
FROM_START = SubKey(0)


class EndSession(Exception):
    """The session is of no use any more; `delay` is the wish for the time until the next one."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(reason)
        self.delay = delay


class RouterState:
    """What is known of a router beyond one session."""

    def __init__(self, key: ServerKey, host: str, waiting_limit: int) -> None:
        self.key = key
        self.host = host
        self.waiting = WaitingQueues(waiting_limit)
        self.balance = ServiceBalance()
        self.wake = asyncio.Event()
        "Set when there may be something to do."
        self.shrunk = False
        "Subscriptions went away since it was last asked whether any are left."
        self.service_queues = 0
        self.individual_queues = 0
        self.is_subscribed = False
        "Everything that was stored at the start of the session has been asked for."

    def record_moves(self, journal: EventSink, moves: Sequence[Moved]) -> None:
        """Note in the journal which subscriptions changed; being on the way (PENDING) is not worth a note."""
        for move in moves:
            if move.after is not SubState.PENDING:
                journal.record(
                    JournalEvent.SUB_STATUS_CHANGED,
                    server=self.host,
                    subscription=move.subscription_id,
                    token=move.token_id,
                    status_from=move.before.value,
                    status_to=move.after.value,
                )


class ServiceCheck(NamedTuple):
    """The answer to NSUBS."""

    balance: Balance
    ours: QueueSet
    routers: QueueSet


class SessionWork:
    """What a daemon does in one session. `run` ends with `EndSession`, `StoreError` or by cancellation."""

    def __init__(
        self,
        state: RouterState,
        session: SmpSession,
        store: SubscriberStore,
        login: ServiceLogin,
        clock: Clock,
        config: SubscriberConfig,
        journal: EventSink,
    ) -> None:
        self._state = state
        self._session = session
        self._store = store
        self._login = login
        self._clock = clock
        self._config = config
        self._journal = journal
        self._flight: Flight | None = None
        self._verified_at = clock.monotonic()
        service = session.params.service
        self._service_id = None if service is None else service.service_id
        self._retry_at: int | None = None
        self._ending: EndSession | None = None

    async def run(self) -> None:
        state = self._state
        # Whatever waits is stored already, so the sweep finds it; what comes from now on waits anew.
        state.waiting.clear()
        state.individual_queues = state.service_queues = 0
        record = await self._store.server(state.key)
        await self._login.adopt(record, self._session.params.service)
        balance = Balance.EQUAL
        if self._service_id is not None and self._service_id == record.service_id and record.associated_count:
            balance = await self._service_balance()
        await self._sweep(associated=False)
        state.is_subscribed = True
        if balance is not Balance.EQUAL:
            await self._heal()
        await self._keep()

    def end(self, reason: EndSession) -> None:
        """Stop at the next opportunity."""
        self._ending = reason
        self._state.wake.set()

    def absorbs(self, notifier_id: EntityId, event: SubEvent) -> bool:
        """Whether an event is dealt with together with the batch on its way."""
        return self._flight is not None and self._flight.absorbs(notifier_id, event)

    # The service as a whole

    async def _service_balance(self) -> Balance:
        check = await self._subscribe_service()
        return Balance.DRIFTED if check is None else check.balance

    async def _subscribe_service(self) -> ServiceCheck | None:
        """NSUBS, and how our set of queues compares with the router's; None if it is refused."""
        state = self._state
        record = await self._store.server(state.key)
        ours = QueueSet(record.associated_count, record.associated_hash)
        answer = await self._session.subscribe_service(ours)
        self._verified_at = self._clock.monotonic()
        if not isinstance(answer, Soks):
            if await self._login.refused():
                raise EndSession("the router refuses the service subscription", self._config.first_delay)
            return None
        routers = answer.queues
        changed = await self._store.set_service_subscribed(state.key)
        state.service_queues = ours.count
        total = await self._store.subscription_count(state.key)
        self._journal.record(
            JournalEvent.SMP_SERVICE_SUBSCRIBED,
            server=state.host,
            count=routers.count,
            expected=ours.count,
            total=total,
            changed=changed,
        )
        return ServiceCheck(state.balance.compare(ours, routers), ours, routers)

    async def _heal(self) -> None:
        """Bind every associated queue again, one by one, unless the router's set is ours by now."""
        before = await self._subscribe_service()
        if before is not None and before.balance is Balance.EQUAL:
            return
        if before is not None and before.balance is Balance.DRIFTED:
            self._report_drift(before)
        started = self._clock.monotonic()
        await self._sweep(associated=True)
        after = await self._subscribe_service()
        if before is None or after is None or (before.balance is after.balance is Balance.UNCERTAIN):
            return
        if after.balance is Balance.DRIFTED:
            self._state.balance.settle(after.ours, after.routers)
        self._report_healed(after, after.routers.count - before.routers.count, started)

    def _report_drift(self, check: ServiceCheck) -> None:
        host, ours, routers = self._state.host, check.ours.count, check.routers.count
        DRIFTS.inc()
        DRIFTED_QUEUES.inc(abs(routers - ours))
        logger.warning("%s has %d queues of this service instead of %d", host, routers, ours)
        self._journal.record(JournalEvent.SMP_DRIFT, server=host, count=routers, expected=ours)

    def _report_healed(self, check: ServiceCheck, gained: int, started: float) -> None:
        host, healed = self._state.host, max(0, gained)
        took = int((self._clock.monotonic() - started) * 1_000_000)
        HEALED.inc(healed)
        logger.info("%s has %d queues of this service again, %d more", host, check.routers.count, healed)
        self._journal.record(JournalEvent.SMP_HEALED, server=host, count=healed, latency_us=took)

    # Queues one by one

    async def _sweep(self, *, associated: bool) -> None:
        """Subscribe all stored queues of a kind, page by page, and between the pages whatever is new."""
        after = FROM_START
        while page := await self._store.queues(
            self._state.key, after=after, limit=self._config.batch_size, associated=associated
        ):
            await self._subscribe(page)
            await self._subscribe_waiting()
            after = page[-1].key

    async def _keep(self) -> None:
        """Subscribe what is new or due, for ever."""
        while True:
            self._state.wake.clear()
            if self._state.waiting.overflowed:
                self._state.waiting.clear()
                self._state.individual_queues = 0
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
        self._check_ending()
        state = self._state
        notifier_ids = state.waiting.take(self._config.batch_size, self._clock.monotonic())
        if not notifier_ids:
            return False
        rows = await self._store.queues_by_id(state.key, notifier_ids)
        await self._move_queues([(row.notifier_id, HANDED_OVER) for row in rows])
        await self._subscribe(rows)
        return True

    async def _subscribe_due(self) -> bool:
        """Queues that failed some time ago; False if none is due."""
        now = int(self._clock.now())
        self._retry_at = await self._store.next_retry(self._state.key)
        if self._retry_at is None or self._retry_at > now:
            return False
        rows = await self._store.due_retries(self._state.key, now, self._config.batch_size)
        await self._subscribe(rows)
        return True

    async def _subscribe(self, rows: Sequence[QueueRow]) -> None:
        self._check_ending()
        notifier_ids: list[EntityId] = []
        requests: list[Request[SmpCommand]] = []
        unusable: list[tuple[EntityId, SubEvent]] = []
        for row in rows:
            try:
                requests.append(Request(row.notifier_id, Nsub(), decode_private_key(row.notifier_key)))
                notifier_ids.append(row.notifier_id)
            except DecodeError:
                unusable.append((row.notifier_id, BAD_KEY))
        await self._move_queues(unusable)
        if not requests:
            return
        batch = self._session.new_batch(len(requests))
        self._flight = flight = Flight(notifier_ids, batch)
        try:
            answers = await self._session.send(batch, requests)
            await self._store_outcomes(sort_outcomes(notifier_ids, answers, self._service_id))
        finally:
            self._flight = None
        await self._move_queues(flight.overtaken)
        if all(isinstance(answer, RequestTimeout) for answer in answers):
            raise EndSession("the router does not answer NSUB")

    async def _store_outcomes(self, outcomes: Outcomes) -> None:
        state = self._state
        await self._set_subscribed(outcomes.associated, self._service_id)
        await self._set_subscribed(outcomes.individual, None)
        state.individual_queues += len(outcomes.individual)
        retry_at = self._clock.monotonic() + self._config.unanswered_delay
        state.waiting.add_later(outcomes.unanswered, retry_at)
        changed = outcomes.changed
        restart = outcomes.service_failed and await self._login.refused()
        if restart:  # these are not lost: the next session subscribes them
            changed = [change for change in changed if change[1] is not SERVICE_REFUSED]
        await self._move_queues(changed)
        if restart:
            raise EndSession("the router refuses the service for a queue", self._config.first_delay)

    async def _set_subscribed(self, notifier_ids: Sequence[EntityId], service_id: EntityId | None) -> None:
        if notifier_ids:
            moves = await self._store.set_subscribed(self._state.key, notifier_ids, service_id=service_id)
            self._state.record_moves(self._journal, moves)
            SUBSCRIBED.inc(len(notifier_ids))

    async def _move_queues(self, changes: Sequence[tuple[EntityId, SubEvent]]) -> None:
        if not changes:
            return
        counts = Counter(event.input for _, event in changes if event is not HANDED_OVER)
        for refused, count in counts.items():
            REFUSED.labels(bulk_move(refused).target).inc(count)
            self._state.shrunk = True
        moves = await self._store.move_queues(
            self._state.key, [QueueEvent(*change) for change in changes], now=int(self._clock.now())
        )
        self._state.record_moves(self._journal, moves)

    # Waiting

    def _check_ending(self) -> None:
        if self._ending is not None:
            raise self._ending

    def _is_verification_due(self) -> bool:
        return (
            self._service_id is not None
            and self._state.service_queues > 0
            and self._clock.monotonic() - self._verified_at >= self._config.verify_interval
        )

    async def _check_needed(self) -> None:
        state = self._state
        record = await self._store.server(state.key)
        state.service_queues = record.associated_count if self._service_id is not None else 0
        if state.shrunk:
            state.shrunk = False
            if not await is_needed(self._store, state):
                raise EndSession("no subscription is left", 0)

    async def _rest(self) -> None:
        """Until something is handed over, an event comes, or something is due."""
        delay = self._config.longest_rest
        if (later := self._state.waiting.next_at()) is not None:
            delay = min(delay, later - self._clock.monotonic())
        if self._retry_at is not None:
            delay = min(delay, self._retry_at - self._clock.now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(delay, 0)):
                await self._state.wake.wait()
        self._check_ending()


async def is_needed(store: SubscriberStore, state: RouterState) -> bool:
    """Whether the router has any queue for us: now, or after a slow retry."""
    if await store.queues(state.key, after=FROM_START, limit=1):
        return True
    return await store.next_retry(state.key) is not None or len(state.waiting) > 0 or state.waiting.overflowed
