"""Which token is pushed to next. Pure: it takes the time and what happened, and returns jobs.

A job is a token with a reason to push to it; what the push carries is read from the store when its turn
comes. So a token has at most one push queued or under way, whatever arrives meanwhile joins the next one,
and a token that cannot be pushed to now costs no memory: the store still knows it as unsent.

Each provider has a breaker and two lanes: messages, and urgent jobs (verification, check messages) that never
wait behind messages. Jobs of a token whose provider is not known yet pass through a lane of their own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import ceil
from typing import NamedTuple

from ntf_server.push.breaker import BreakerSettings, BreakerState, CircuitBreaker
from ntf_server.push.retries import Attempts
from protocol.device_token import Provider
from store.records import TokenKey

PROBE_CANDIDATES = 32
"Tokens remembered per provider while it is down: one of them is pushed to, to see whether it is up again."


TIMER_GRID = 0.05
"Seconds: what is due within one step of the grid is looked at together."


class Kind(IntEnum):
    MESSAGE = 0
    VERIFICATION = 1
    CHECK = 2


class Job(NamedTuple):
    kind: Kind
    token_key: TokenKey

    @property
    def urgent(self) -> bool:
        return self.kind is not Kind.MESSAGE


class Added(Enum):
    QUEUED = 0
    JOINED = 1
    "The token has a push queued or under way: this goes into that one or into the next."
    DEFERRED = 2
    "The provider is down: the job comes back when it is up again."
    FULL = 3
    "Nothing was done: try again when there is room."
    DROPPED = 4
    "An urgent job of a provider that has been down for long, one of too many."


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    coalesce: bool = True
    "Off: one push for each notification, also if an earlier push carried it already."
    interval: float = 0.4
    "Seconds between the pushes of one token, unless more is unsent than fits in one; not after a rest."
    max_tokens: int = 32_768
    "Tokens with a push queued, under way or due soon; when so many are, `add` answers FULL."
    max_urgent: int = 8_192
    "The same for urgent jobs, and how many of them are kept for a provider that is down."
    max_waiting: int = 16_384
    "Tokens waiting for a retry; more of them are read from the store again when it is time."
    concurrency: int = 1_000
    "Pushes under way per provider."
    urgent_concurrency: int = 100
    load_batch: int = 64
    "Tokens read from the store at once: bounds how long encrypting them holds up everything else."
    known_providers: int = 200_000
    "Tokens whose provider is remembered, so that no read is needed to find out that it is down."


class _State(Enum):
    QUEUED = 0
    TAKEN = 1
    WAITING = 2
    "For a retry, or for the interval after a push to pass."


@dataclass(slots=True, eq=False)
class _Lane:
    """Jobs of one provider and class, first come, first served."""

    lanes: _ProviderLanes | None
    "Whose it is; None: jobs of tokens whose provider is not known yet."
    limit: int
    queue: deque[_Entry] = field(default_factory=deque)
    taken: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A job and what is known about it while it is in memory."""

    job: Job
    lane: _Lane
    arrivals: int
    "Reasons to push that came since the job was last taken."
    since: float | None
    "When the oldest of them came."
    joined: int = 0
    "Those of them that found the job already here."
    state: _State = _State.QUEUED
    holds_place: bool = False
    "Counted in `lane.taken`."
    started: float = 0.0
    attempts: Attempts | None = None


@dataclass(slots=True, eq=False)
class _ProviderLanes:
    provider: Provider
    breaker: CircuitBreaker
    messages: _Lane = field(init=False)
    urgent: _Lane = field(init=False)
    probe: Job | None = None
    candidates: dict[Job, None] = field(default_factory=dict)
    "Messages that may serve as the next probe."
    parked: dict[Job, float | None] = field(default_factory=dict)
    "Urgent jobs, with their times: the store does not know them."
    backlog: bool = False
    "Tokens were sent away while the breaker was not closed; the store knows which."

    def lane(self, job: Job) -> _Lane:
        return self.urgent if job.urgent else self.messages


class Taken(NamedTuple):
    """A job whose turn has come, and what led to it."""

    job: Job
    arrived: bool
    "False: it is here only because the store said so."
    since: float | None
    joined: int
    attempts: Attempts | None


class PushScheduler:
    """`random` gives numbers from 0 to 1. `now` must never go back from call to call."""

    def __init__(
        self, settings: SchedulerSettings, breaker: BreakerSettings, random: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._breaker_settings = breaker
        self._random = random
        self._entries: dict[Job, _Entry] = {}
        self._urgent_entries = 0
        self._providers: dict[Provider, _ProviderLanes] = {}
        self._provider_of: dict[TokenKey, Provider] = {}
        self._unknown = _Lane(None, settings.load_batch)
        self._unknown_urgent = _Lane(None, settings.load_batch)
        self._timers: list[tuple[float, int, _Entry]] = []
        self._timer_number = 0
        self._retrying = 0
        self._sweep_at: float | None = None

    # What is there

    def __len__(self) -> int:
        """Jobs in memory, in whatever state."""
        parked = sum(len(lanes.parked) for lanes in self._providers.values())
        return len(self._entries) + parked

    @property
    def queue_length(self) -> int:
        """Jobs that wait for nothing but their turn."""
        return sum(len(lane.queue) for lane in self._all_lanes())

    @property
    def under_way(self) -> int:
        return sum(lane.taken for lane in self._all_lanes())

    def breaker_state(self, provider: Provider) -> BreakerState:
        lanes = self._providers.get(provider)
        return BreakerState.CLOSED if lanes is None else lanes.breaker.state

    # What comes

    def add(self, job: Job, since: float | None) -> Added:
        """There is a reason to push, since `since`; None: the store says so, nothing new came."""
        entry = self._entries.get(job)
        if entry is not None:
            if since is not None:
                entry.arrivals += 1
                entry.joined += 1
                if entry.since is None:
                    entry.since = since
            return Added.JOINED
        provider = self._provider_of.get(job.token_key)
        if provider is not None:
            lanes = self._lanes(provider)
            if not lanes.breaker.is_closed:
                return self._park(lanes, job, since)
        if self._is_full(job):
            return Added.FULL
        self._enqueue(job, since)
        return Added.QUEUED

    def want_sweep(self, at: float) -> None:
        """The tokens that the store knows as unsent should be added at this time."""
        self._sweep_at = at if self._sweep_at is None else min(at, self._sweep_at)

    def sweep_due(self, now: float) -> bool:
        """Whether to add the store's unsent tokens now. Says so once: the sweep is then the caller's task."""
        if self._sweep_at is None or now < self._sweep_at:
            return False
        self._sweep_at = None
        return True

    # What is next

    def take(self, now: float) -> list[Taken]:
        """The jobs whose turn it is, urgent ones first; the caller reads their tokens from the store.

        Each then goes through `may_start`, or ends with `idle`. A job that was started goes through
        `answered` and ends with `finished` or `retry`, or through `unreachable`, which says what follows.
        """
        self._wake_due(now)
        self._start_probes(now)
        taken: list[Taken] = []
        for lane in self._all_lanes():
            while lane.queue and lane.taken < lane.limit and len(taken) < self._settings.load_batch:
                taken.append(self._take(lane))
        return taken

    def next_deadline(self) -> float | None:
        """When to call `take` and `sweep_due` even if nothing happens until then."""
        deadlines = [
            lanes.breaker.retry_at
            for lanes in self._providers.values()
            if lanes.breaker.state is BreakerState.OPEN
        ]
        if self._timers:
            deadlines.append(self._timers[0][0])
        if self._sweep_at is not None:
            deadlines.append(self._sweep_at)
        return min(deadlines, default=None)

    # What became of it

    def may_start(self, taken: Taken, provider: Provider, now: float) -> bool:
        """The store told the provider of a job that was taken. False: its turn there is yet to come."""
        job = taken.job
        entry = self._entries[job]
        entry.started = now
        if entry.lane.lanes is not None and entry.lane.lanes.provider is provider:
            return True
        self._remember(job.token_key, provider)
        self._release(entry, now)
        lanes = self._lanes(provider)
        if not lanes.breaker.is_closed:
            self._forget(entry)
            self._park(lanes, job, taken.since)
            return False
        entry.lane = lanes.lane(job)
        if entry.lane.taken < entry.lane.limit:
            self._hold(entry)
            return True
        entry.arrivals += taken.arrived
        entry.joined += taken.joined
        entry.since = taken.since if taken.since is not None else entry.since
        entry.state = _State.QUEUED
        entry.lane.queue.appendleft(entry)
        return False

    def idle(self, job: Job, now: float) -> None:
        """There was nothing to push, or the token is gone."""
        entry = self._entries[job]
        self._release(entry, now)
        if entry.arrivals:
            self._queue(entry)
        else:
            self._forget(entry)

    def answered(self, job: Job, now: float) -> bool:
        """The provider gave an answer: the job leaves its place, but stays taken until the outcome is stored.
        True if another job waits for the place."""
        entry = self._entries[job]
        lanes = _lanes_of(entry)
        if lanes.probe == job:
            lanes.probe = None
            self._close(lanes, now)
        elif lanes.breaker.is_closed:
            lanes.breaker.answered()
        self._release(entry, now)
        return bool(entry.lane.queue)

    def unreachable(self, job: Job, now: float, after: float | None) -> bool:
        """The provider failed as a whole. True: end the job with `retry` or `finished`; False: the provider
        is down, and the job comes back by itself when it is up again."""
        entry = self._entries[job]
        lanes = _lanes_of(entry)
        if lanes.probe == job:
            lanes.probe = None
            lanes.breaker.probe_failed(now, after)
        elif lanes.breaker.failed(now, after):
            self._park_queued(lanes)
        self._release(entry, now)
        if lanes.breaker.is_closed:
            return True
        self._forget(entry)
        self._park(lanes, job, entry.since)
        return False

    def finished(self, job: Job, now: float, *, more: bool) -> None:
        """The outcome is stored. `more`: unsent entries are left, and another push follows at once."""
        entry = self._entries[job]
        entry.attempts = None
        rests_until = entry.started + self._settings.interval
        if more:
            self._queue(entry)
        elif not job.urgent and self._settings.coalesce and now < rests_until:
            self._wait(entry, rests_until)
        elif entry.arrivals:
            self._queue(entry)
        else:
            self._forget(entry)

    def retry(self, job: Job, attempts: Attempts, at: float) -> None:
        """The token is to be tried again; whatever arrives until then joins."""
        entry = self._entries[job]
        if self._retrying >= self._settings.max_waiting and not job.urgent:
            self._forget(entry)
            self.want_sweep(at)
            return
        entry.attempts = attempts
        self._retrying += 1
        self._wait(entry, at)

    # Entries

    def _is_full(self, job: Job) -> bool:
        if job.urgent:
            return self._urgent_entries >= self._settings.max_urgent
        return len(self._entries) - self._urgent_entries >= self._settings.max_tokens

    def _enqueue(self, job: Job, since: float | None) -> None:
        provider = self._provider_of.get(job.token_key)
        if provider is not None:
            lane = self._lanes(provider).lane(job)
        else:
            lane = self._unknown_urgent if job.urgent else self._unknown
        self._create(job, lane, since)

    def _create(self, job: Job, lane: _Lane, since: float | None) -> None:
        entry = self._entries[job] = _Entry(job, lane, arrivals=since is not None, since=since)
        self._urgent_entries += job.urgent
        lane.queue.append(entry)

    def _queue(self, entry: _Entry) -> None:
        lanes = entry.lane.lanes
        if lanes is not None and not lanes.breaker.is_closed:
            self._forget(entry)
            self._park(lanes, entry.job, entry.since)
            return
        entry.state = _State.QUEUED
        entry.lane.queue.append(entry)

    def _take(self, lane: _Lane) -> Taken:
        entry = lane.queue.popleft()
        entry.state = _State.TAKEN
        self._hold(entry)
        taken = Taken(entry.job, entry.arrivals > 0, entry.since, entry.joined, entry.attempts)
        # What the store is about to be asked for includes everything that came so far.
        entry.arrivals = 0 if self._settings.coalesce else max(0, entry.arrivals - 1)
        entry.joined = 0
        entry.since = None
        return taken

    def _wait(self, entry: _Entry, until: float) -> None:
        entry.state = _State.WAITING
        self._timer_number += 1
        heapq.heappush(self._timers, (ceil(until / TIMER_GRID) * TIMER_GRID, self._timer_number, entry))

    def _wake_due(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            entry = heapq.heappop(self._timers)[2]
            if entry.attempts is not None:
                self._retrying -= 1
                self._queue(entry)
            elif entry.arrivals:
                self._queue(entry)
            else:
                self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.job]
        self._urgent_entries -= entry.job.urgent

    # Providers

    def _lanes(self, provider: Provider) -> _ProviderLanes:
        lanes = self._providers.get(provider)
        if lanes is None:
            breaker = CircuitBreaker(self._breaker_settings, self._random)
            lanes = self._providers[provider] = _ProviderLanes(provider, breaker)
            lanes.messages = _Lane(lanes, self._settings.concurrency)
            lanes.urgent = _Lane(lanes, self._settings.urgent_concurrency)
        return lanes

    def _all_lanes(self) -> list[_Lane]:
        """Urgent ones first."""
        providers = self._providers.values()
        urgent = [lanes.urgent for lanes in providers]
        return [*urgent, self._unknown_urgent, *(lanes.messages for lanes in providers), self._unknown]

    def _remember(self, token_key: TokenKey, provider: Provider) -> None:
        known = self._provider_of
        if token_key not in known and len(known) >= self._settings.known_providers:
            del known[next(iter(known))]
        known[token_key] = provider

    def _hold(self, entry: _Entry) -> None:
        entry.holds_place = True
        entry.lane.taken += 1

    def _release(self, entry: _Entry, now: float) -> None:
        if entry.holds_place:
            entry.holds_place = False
            entry.lane.taken -= 1
        lanes = entry.lane.lanes
        if lanes is not None and lanes.probe == entry.job:  # it told nothing about the provider
            self._next_probe(lanes, now)

    def _park(self, lanes: _ProviderLanes, job: Job, since: float | None) -> Added:
        """Send a job away until the provider is up again."""
        if job.urgent:
            if len(lanes.parked) >= self._settings.max_urgent:
                return Added.DROPPED
            lanes.parked.setdefault(job, since)
        else:
            lanes.backlog = True
            if len(lanes.candidates) < PROBE_CANDIDATES:
                lanes.candidates[job] = None
        return Added.DEFERRED

    def _park_queued(self, lanes: _ProviderLanes) -> None:
        for lane in (lanes.urgent, lanes.messages):
            while lane.queue:
                entry = lane.queue.popleft()
                self._forget(entry)
                self._park(lanes, entry.job, entry.since)

    def _start_probes(self, now: float) -> None:
        for lanes in self._providers.values():
            if lanes.breaker.probe(now):
                self._next_probe(lanes, now)

    def _next_probe(self, lanes: _ProviderLanes, now: float) -> None:
        """Push to one of the tokens that were sent away; without any, trust the provider."""
        lanes.probe = None
        for candidates in (lanes.parked, lanes.candidates):
            for job in list(candidates):
                since = candidates.pop(job)
                if job not in self._entries:
                    lanes.probe = job
                    self._create(job, lanes.lane(job), since)
                    return
        self._close(lanes, now)

    def _close(self, lanes: _ProviderLanes, now: float) -> None:
        """The provider is up: bring back what was sent away."""
        lanes.breaker.probe_succeeded()
        lanes.candidates.clear()
        parked, lanes.parked = lanes.parked, {}
        for job, since in parked.items():
            if job not in self._entries:
                self._enqueue(job, since)
        if lanes.backlog:
            lanes.backlog = False
            self.want_sweep(now)


def _lanes_of(entry: _Entry) -> _ProviderLanes:
    assert entry.lane.lanes is not None, "a job that was started has a provider"
    return entry.lane.lanes
