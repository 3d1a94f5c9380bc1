"""Which token is pushed to next. Pure: it takes the time and what happened, and returns jobs.

A job is a token with a reason to push to it; what the push carries is read from the store when its turn
comes. So a token has at most one push queued or under way, whatever arrives meanwhile joins the next one,
and a token that cannot be pushed to now costs no memory: the store still knows it as unsent.

Each destination has two lanes: messages, and urgent jobs (verification, check messages) that never wait
behind messages. Jobs of a token whose destination is not known yet pass through lanes of their own.

A push crosses this border four times: `add`, `take`, `loaded` and `ended`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from math import ceil
from typing import NamedTuple

from ntf_server.config import PushConfig
from ntf_server.push.lanes import (
    MAX_URGENT,
    SLOW_ANSWER,
    Attempts,
    BreakerState,
    Entry,
    Job,
    Kind,
    Lane,
    Party,
    Target,
    Targets,
)
from ntf_server.push.provider import Destination
from store.records import TokenKey

LOAD_BATCH = 256
"Tokens read from the store at once; a whole list of a statement of the store."
KNOWN_DESTINATIONS = 200_000
"Tokens whose destination is remembered, so that no read is needed to find out that it is down."
PROBE_CANDIDATES = 32
"Tokens remembered per destination while it is down: one of them is pushed to, to see whether it is up again."
TIMER_GRID = 0.05
"Seconds: what is due within one step of the grid is looked at together."
RATE_PAUSE = 0.1
"Seconds until a host that was pushed to too often has its next turn."
SWEEP_PAUSE, SWEEP_INTERVAL = 1.0, 900.0
"Seconds between two looks for unsent tokens in the store, at least and at most."
ANY_NUMBER = 1 << 20
HOSTS_PAUSE = 60.0
"Seconds until a host that found no room is looked for again."


class Added(Enum):
    QUEUED = 0
    JOINED = 1
    "The token has a push queued or under way: this goes into that one or into the next."
    LEFT = 2
    "The destination is down or full: the job comes back by itself."
    FULL = 3
    "Nothing was done: too many tokens are to be looked up. Try again when there is room."
    DROPPED = 4
    "An urgent job, one of too many: nothing in the store brings it back."


class Taken(NamedTuple):
    """A job whose turn has come, and what led to it."""

    job: Job
    arrived: bool
    "False: it is here only because the store said so."
    since: float | None
    joined: int
    attempts: Attempts | None


class Ended(NamedTuple):
    """What became of a push; its outcome is stored."""

    answered: bool
    "False: the destination failed as a whole."
    more: bool = False
    "Unsent entries are left, and another push follows at once."
    retry: tuple[Attempts, float] | None = None
    "The token is to be tried again at this time; whatever arrives until then joins."
    after: float | None = None
    "Seconds that the destination asked us to stay away."
    tells: bool = True
    "False: the device never took a push, so its answer says nothing about the destination."


class PushScheduler:
    """`random` gives numbers from 0 to 1. `now` must never go back from call to call.

    `web_pushes`: of all hosts of Web Push, under way at once."""

    def __init__(
        self, config: PushConfig, random: Callable[[], float], *, web_pushes: int = ANY_NUMBER
    ) -> None:
        self._config = config
        self._random = random
        self._entries: dict[Job, Entry] = {}
        self._targets = Targets(config, random, web_pushes)
        self._known: OrderedDict[TokenKey, Destination] = OrderedDict()
        self._unknown = {
            True: Lane(None, True, LOAD_BATCH, MAX_URGENT),
            False: Lane(None, False, LOAD_BATCH, config.queue_size),
        }
        self._ready: dict[bool, dict[Lane, None]] = {True: {}, False: {}}
        "Lanes that have a job and perhaps a place for it, by urgency; the first one's turn it is."
        self._timers: list[tuple[float, int, Entry | Lane | Target]] = []
        self._timer_number = 0
        self._sweep_at: float | None = None
        self._swept_at = float("-inf")

    # What is there

    def __len__(self) -> int:
        """Jobs in memory, in whatever state."""
        return len(self._entries) + sum(len(target.parked) for target in self._targets)

    @property
    def queue_length(self) -> int:
        """Jobs that wait for nothing but their turn."""
        return sum(len(lane.queue) for lane in self._all_lanes())

    @property
    def under_way(self) -> int:
        return sum(lane.taken for lane in self._all_lanes())

    @property
    def to_look_up(self) -> int:
        """Message jobs whose destination is not known yet."""
        return self._unknown[False].size

    @property
    def hosts_down(self) -> int:
        return self._targets.hosts_down

    def breaker_state(self, destination: Destination) -> BreakerState:
        target = self._targets.get(destination)
        return BreakerState.CLOSED if target is None else target.breaker.state

    def held_back(self, destination: Destination) -> int:
        """How often a push had to wait since the destination was last found down."""
        target = self._targets.get(destination)
        return 0 if target is None else target.held

    # What comes

    def add(self, job: Job, since: float | None, destination: Destination | None = None) -> Added:
        """There is a reason to push, since `since`; None: the store says so, nothing new came. A job whose
        `destination` is not known is read once more, to find out where it waits."""
        entry = self._entries.get(job)
        if entry is not None:
            if since is not None:
                entry.joined += self._config.coalesce and entry.is_waited_for
                entry.arrivals += 1
                if entry.since is None:
                    entry.since = since
            return Added.JOINED
        destination = destination or self._known.get(job.token_key)
        if destination is not None:
            return self._admit(destination, job, since, job.party)
        lane = self._unknown[job.urgent]
        if lane.size >= lane.bound:
            return Added.DROPPED if job.urgent else Added.FULL
        self._create(job, lane, since)
        return Added.QUEUED

    def want_sweep(self, at: float) -> None:
        """The tokens that the store knows as unsent should be added at this time."""
        at = max(at, self._swept_at + SWEEP_PAUSE)
        self._sweep_at = at if self._sweep_at is None else min(at, self._sweep_at)

    def sweep_due(self, now: float) -> bool:
        """Whether to add the store's unsent tokens now. Says so once: the sweep is then the caller's task."""
        if self._targets.turned_away:
            self._targets.turned_away = False
            self.want_sweep(now + HOSTS_PAUSE)
        if self._sweep_at is None or now < self._sweep_at:
            return False
        self._swept_at = now
        self._sweep_at = now + SWEEP_INTERVAL
        return True

    # What is next

    def take(self, now: float) -> list[Taken]:
        """The jobs whose turn it is, urgent ones first; the caller reads their tokens from the store and
        tells with `loaded` what it found."""
        self._wake_due(now)
        taken: list[Taken] = []
        for ready in self._ready.values():
            while ready and len(taken) < LOAD_BATCH:
                lane = next(iter(ready))
                del ready[lane]
                if lane.queue and lane.taken < lane.limit and self._has_place(lane, now):
                    taken.append(self._take(lane))
                    self._offer(lane)
        return taken

    def next_deadline(self) -> float | None:
        """When to call `take` and `sweep_due` even if nothing happens until then."""
        deadlines = [self._timers[0][0]] if self._timers else []
        if self._sweep_at is not None:
            deadlines.append(self._sweep_at)
        return min(deadlines, default=None)

    # What became of it

    def loaded(
        self, taken: Taken, destination: Destination | None, now: float, party: Party | None = None
    ) -> Added | None:
        """The store told the destination of a job that was taken; None: nothing is to be pushed, or the token
        is gone. `party`: whose device it is, if it took a push before. Returns None if the push is to start
        now; it then ends with `ended`."""
        entry = self._entries[taken.job]
        entry.started = now
        entry.party = party or entry.party
        if destination is None:
            self._idle(entry, now)
            return Added.LEFT
        target = entry.lane.target
        if target is not None and target.destination == destination:
            return None
        if taken.job.kind is not Kind.STATEMENT:  # comes once
            self._know(taken.job.token_key, destination)
        return self._move(entry, taken, destination, now)

    def ended(self, job: Job, end: Ended, now: float) -> bool:
        """True if this was the failure that opened the destination's breaker."""
        entry = self._entries[job]
        target = entry.lane.target
        assert target is not None, "a job that was started has a destination"
        opened = False
        if not end.tells:
            if target.probe == job:
                self._next_probe(target, now, known_only=True)
        elif end.answered:
            self._answered(target, job, now, now - entry.started)
        else:
            opened = self._failed(target, job, now, end.after)
        self._release(entry)
        if not end.answered and not target.breaker.is_closed:
            self._forget(entry, now)
            self._park(target, job, entry.since, entry.party)
        elif end.retry is not None:
            self._retry(entry, target, *end.retry, now)
        else:
            self._finish(entry, now, more=end.more)
        return opened

    # Jobs

    def _admit(self, destination: Destination, job: Job, since: float | None, party: Party | None) -> Added:
        target = self._targets.get_or_make(destination)
        if target is not None:
            if not target.breaker.is_closed:
                return self._park(target, job, since, party)
            lane = target.lane(job)
            if lane.has_room(sweeping=since is None):
                self._create(job, lane, since)
                return Added.QUEUED
            target.backlog |= not job.urgent
        return Added.DROPPED if job.urgent else Added.LEFT

    def _create(self, job: Job, lane: Lane, since: float | None) -> None:
        entry = Entry(job, lane, arrivals=since is not None, since=since, party=job.party)
        self._entries[job] = entry
        lane.count(1)
        lane.queue.append(entry)
        self._offer(lane)

    def _queue(self, entry: Entry, now: float) -> None:
        target = entry.lane.target
        if target is not None and not target.breaker.is_closed:
            self._forget(entry, now)
            self._park(target, entry.job, entry.since, entry.party)
            return
        entry.lane.queue.append(entry)
        self._offer(entry.lane)

    def _take(self, lane: Lane) -> Taken:
        entry = lane.queue.popleft()
        lane.hold(entry)
        taken = Taken(entry.job, entry.arrivals > 0, entry.since, entry.joined, entry.attempts)
        # What the store is about to be asked for includes everything that came so far.
        entry.arrivals = 0 if self._config.coalesce else max(0, entry.arrivals - 1)
        entry.joined = 0
        entry.since = None
        return taken

    def _move(self, entry: Entry, taken: Taken, destination: Destination, now: float) -> Added | None:
        """To the lane where it belongs: it starts if it is the first there."""
        was_probe = entry.lane.target is not None and entry.lane.target.probe == entry.job
        before = entry.lane.target
        self._release(entry)
        self._forget(entry, now)
        if was_probe and before is not None:
            self._next_probe(before, now)
        since = taken.since if taken.since is not None else (now if taken.arrived else None)
        added = self._admit(destination, entry.job, since, entry.party)
        moved = self._entries.get(entry.job)
        if added is not Added.QUEUED or moved is None:
            return added
        moved.attempts = taken.attempts
        moved.party = entry.party
        moved.arrivals += entry.arrivals
        moved.joined = taken.joined + entry.joined
        lane = moved.lane
        if lane.queue[0] is not moved or lane.taken >= lane.limit or lane.paused:
            return Added.QUEUED
        if not self._has_place(lane, now):
            return Added.QUEUED
        self._take(lane)
        moved.arrivals, moved.joined, moved.since = entry.arrivals, entry.joined, entry.since
        moved.started = now
        return None

    def _idle(self, entry: Entry, now: float) -> None:
        self._release(entry)
        target = entry.lane.target
        was_probe = target is not None and target.probe == entry.job
        if entry.arrivals:
            self._queue(entry, now)
        else:
            self._forget(entry, now)
        if was_probe and target is not None:  # it told nothing about the destination
            self._next_probe(target, now)

    def _finish(self, entry: Entry, now: float, *, more: bool) -> None:
        entry.attempts = None
        rests_until = entry.started + self._config.interval
        if more:
            self._queue(entry, now)
        elif not entry.job.urgent and self._config.coalesce and now < rests_until:
            self._wait(entry, rests_until)
        elif entry.arrivals:
            self._queue(entry, now)
        else:
            self._forget(entry, now)

    def _retry(self, entry: Entry, target: Target, attempts: Attempts, at: float, now: float) -> None:
        if target.retrying >= target.messages.bound // 4 and not entry.job.urgent:
            self._forget(entry, now)  # read from the store again when it is time
            self.want_sweep(at)
            return
        entry.attempts = attempts
        target.retrying += 1
        self._wait(entry, at)

    def _forget(self, entry: Entry, now: float) -> None:
        del self._entries[entry.job]
        entry.lane.count(-1)
        target = entry.lane.target
        if target is not None and target.backlog and target.has_drained:
            target.backlog = False
            self.want_sweep(now)

    # Turns

    def _offer(self, lane: Lane) -> None:
        if lane.queue and lane.taken < lane.limit and not lane.paused:
            self._ready[lane.urgent][lane] = None

    def _has_place(self, lane: Lane, now: float) -> bool:
        """Whether a job may start beside those of other lanes; if not, the lane is offered again later."""
        pool = lane.pool
        if pool is not None and pool.taken >= pool.limit:
            pool.waiting[lane] = None
            return False
        target = lane.target
        if target is not None and target.bucket is not None:
            rate = self._targets.rate
            if rate.per_second and not target.bucket.take(rate, now):
                lane.paused = True
                self._later(now + RATE_PAUSE, lane)
                return False
        return True

    def _release(self, entry: Entry) -> None:
        if entry.holds_place:
            waited = entry.lane.release(entry)
            self._offer(entry.lane)
            if waited is not None:
                self._offer(waited)

    def _wait(self, entry: Entry, until: float) -> None:
        self._later(ceil(until / TIMER_GRID) * TIMER_GRID, entry)

    def _later(self, at: float, what: Entry | Lane | Target) -> None:
        self._timer_number += 1
        heapq.heappush(self._timers, (at, self._timer_number, what))

    def _wake_due(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            what = heapq.heappop(self._timers)[2]
            if isinstance(what, Entry):
                self._wake(what, now)
            elif isinstance(what, Lane):
                what.paused = False
                self._offer(what)
            elif what.breaker.probe(now):
                self._next_probe(what, now)

    def _wake(self, entry: Entry, now: float) -> None:
        if entry.attempts is not None:
            assert entry.lane.target is not None
            entry.lane.target.retrying -= 1
            self._queue(entry, now)
        elif entry.arrivals:
            self._queue(entry, now)
        else:
            self._forget(entry, now)

    # Destinations

    def _all_lanes(self) -> Iterator[Lane]:
        yield from self._unknown.values()
        for target in self._targets:
            yield from (target.urgent, target.messages)

    def _know(self, token_key: TokenKey, destination: Destination) -> None:
        known = self._known
        if token_key not in known and len(known) >= KNOWN_DESTINATIONS:
            known.popitem(last=False)
        known[token_key] = destination

    def _answered(self, target: Target, job: Job, now: float, seconds: float) -> None:
        target.slow = seconds > SLOW_ANSWER
        if target.probe == job:
            target.probe = None
            self._close(target, now)
        elif target.breaker.is_closed:
            target.breaker.answered()

    def _failed(self, target: Target, job: Job, now: float, after: float | None) -> bool:
        target.slow = True
        opened = False
        if target.probe == job:
            target.probe = None
            target.breaker.probe_failed(now, after)
            target.held -= 1  # it was counted before it became the probe
        elif target.breaker.failed(now, after):
            opened = True
            target.held = target.parties = 0
            self._park_queued(target, now)
        else:
            return False
        self._later(target.breaker.retry_at, target)
        return opened

    def _park(self, target: Target, job: Job, since: float | None, party: Party | None) -> Added:
        """Send a job away until the destination is up again."""
        target.held += 1
        if job.urgent:
            if len(target.parked) >= target.urgent.bound:
                return Added.DROPPED
            target.parked.setdefault(job, since)
        else:
            target.backlog = True
            if party is not None:
                self._remember_candidate(target, job, party)
        return Added.LEFT

    def _remember_candidate(self, target: Target, job: Job, party: Party) -> None:
        """One of each party, and of all that came a random choice: nobody can occupy the probes."""
        if party in target.candidates:
            return
        target.parties += 1
        if len(target.candidates) >= PROBE_CANDIDATES:
            if self._random() * target.parties >= PROBE_CANDIDATES:
                return
            del target.candidates[self._chosen(target)]
        target.candidates[party] = job

    def _chosen(self, target: Target) -> Party:
        place = min(int(self._random() * len(target.candidates)), len(target.candidates) - 1)
        return list(target.candidates)[place]

    def _park_queued(self, target: Target, now: float) -> None:
        for lane in (target.urgent, target.messages):
            while lane.queue:
                entry = lane.queue.popleft()
                self._forget(entry, now)
                self._park(target, entry.job, entry.since, entry.party)

    def _next_probe(self, target: Target, now: float, *, known_only: bool = False) -> None:
        """Push to one of the devices that were sent away; without any, trust the destination.

        Those first that took a push before: their answers tell about the destination. `known_only`: another
        one was tried, and told nothing."""
        target.probe = None
        while target.candidates:
            job = target.candidates.pop(self._chosen(target))
            if job not in self._entries:
                self._probe(target, job, None)
                return
        for job in [] if known_only else list(target.parked):
            since = target.parked.pop(job)
            if job not in self._entries:
                self._probe(target, job, since)
                return
        self._close(target, now)

    def _probe(self, target: Target, job: Job, since: float | None) -> None:
        target.probe = job
        self._create(job, target.lane(job), since)

    def _close(self, target: Target, now: float) -> None:
        """The destination is up: bring back what was sent away."""
        target.breaker.probe_succeeded()
        target.candidates.clear()
        parked, target.parked = target.parked, {}
        for job, since in parked.items():
            if job not in self._entries:
                self._create(job, target.lane(job), since)
        if target.backlog:
            target.backlog = False
            self.want_sweep(now)
