"""Where jobs wait, and how long after a failure. A destination (a provider, or one host of Web Push) has
lanes, bounds and a breaker of its own, so that a slow or broken one hurts nobody else."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from ntf_server.config import PushConfig
from ntf_server.push.provider import Destination
from protocol.device_token import Provider
from store.records import TokenKey
from store.statement_records import PushKey, RegistrationKey
from transport.limits import Bucket, Rate

MAX_URGENT = 8_192
"Urgent jobs per provider, and for all tokens whose destination is not known yet."
URGENT_CONCURRENCY = 100
URGENT_SHARE = 16
"Where open files are few: one push in so many is an urgent one to a fast host, another one to a slow host."
HOST_URGENT = 256
HOST_URGENT_CONCURRENCY = 10
MAX_HOSTS = 4_096
"Hosts of Web Push in memory. Clients choose them: jobs of further ones stay in the store for a while."
HOSTS_LOOKED_AT = 32
"Of them, looking for one that has nothing to do."
HOST_SHARE = 8
"A host has at most this part of Web Push's bound,"
FAIR_SIZE = 64
"and at least so many places, however many other hosts there are."
SLOW_ANSWER = 2.0
"Seconds: hosts that took longer the last time, and new ones, share other places than those that were fast."
FIRST_RETRY = 2.0
"Seconds until the first retry; doubled with each further one."
LONGEST_RETRY = 300.0
RETRY_JITTER = 0.25
"Up to this part of a delay is added at random."
MAX_ATTEMPTS = 8
"The first one included."
MAX_FAILURES = 300
"Failures of one push in a row while its destination works: with the longest delays, about a day."
FAILURES = 5
"Failures of the whole destination in a row, without any answer between them, that open the breaker."
FIRST_PAUSE = 1.0
"Seconds until the first probe; doubled after each probe that fails."
LONGEST_PAUSE = 60.0
HOST_LONGEST_PAUSE = 900.0
"Of a Web Push host: there may be thousands that will never answer again."
LONGEST_WISH = 900.0
"Seconds that a destination may ask us to stay away; a longer wish is cut to this."
JITTER = 0.2
"Up to this part of a pause is added at random."


class Kind(IntEnum):
    MESSAGE = 0
    VERIFICATION = 1
    CHECK = 2
    STATEMENT = 3
    DEVICE = 4
    "A code for a device that was registered at the statement gateway."


URGENT = (Kind.VERIFICATION, Kind.CHECK, Kind.DEVICE)
Party = TokenKey | bytes
"Whose device it is: a token, or a client of the statement gateway."


class Job(NamedTuple):
    kind: Kind
    token_key: TokenKey
    "A statement is pushed by itself, not with others of its device: its push stands for it."

    @property
    def urgent(self) -> bool:
        return self.kind in URGENT

    @property
    def party(self) -> Party | None:
        """Of a token that was verified by a push."""
        return self.token_key if self.kind in (Kind.MESSAGE, Kind.CHECK) else None

    @property
    def push_key(self) -> PushKey:
        """Of a statement."""
        return PushKey(-self.token_key)

    @property
    def registration_key(self) -> RegistrationKey:
        """Of a device."""
        return RegistrationKey(-self.token_key)


def statement_job(push_key: PushKey) -> Job:
    """Negative: no token has such a key."""
    return Job(Kind.STATEMENT, TokenKey(-push_key))


def device_job(registration_key: RegistrationKey) -> Job:
    return Job(Kind.DEVICE, TokenKey(-registration_key))


@dataclass(slots=True, eq=False)
class Entry:
    """A job and what is known about it while it is in memory."""

    job: Job
    lane: Lane
    arrivals: int
    "Reasons to push that came since the job was last taken."
    since: float | None
    "When the oldest of them came."
    joined: int = 0
    "Those of them that have no push of their own."
    pool: Pool | None = None
    "Where it holds a place beside its lane's."
    holds_place: bool = False
    started: float = 0.0
    attempts: Attempts | None = None
    party: Party | None = field(default=None, repr=False)
    "Who may speak for the destination with it; None: its device never took a push, as far as is known."

    @property
    def is_waited_for(self) -> bool:
        """Whether its next push has something to say; the first that comes after one was taken begins it."""
        return self.arrivals > 0 or (self.attempts is not None and not self.holds_place)


@dataclass(slots=True, eq=False)
class Pool:
    """Pushes under way of several lanes together."""

    limit: int
    taken: int = 0
    waiting: dict[Lane, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Lane:
    """Jobs of one destination and class, first come, first served."""

    target: Target | None
    "Whose it is; None: jobs of tokens whose destination is not known yet."
    urgent: bool
    limit: int
    "Pushes under way."
    bound: int
    "Jobs in memory."
    queue: deque[Entry] = field(default_factory=deque)
    size: int = 0
    "Jobs in whatever state."
    taken: int = 0
    paused: bool = False
    "By the destination's rate."

    @property
    def pool(self) -> Pool | None:
        target = self.target
        return target.shared.pools[self.urgent, target.slow] if target and target.shared else None

    def has_room(self, *, sweeping: bool) -> bool:
        """A sweep uses half of the room at most: what arrives now has the rest."""
        if self.size >= (self.bound // 2 if sweeping else self.bound):
            return False
        shared = self.target.shared if self.target else None
        return shared is None or self.urgent or self.size < FAIR_SIZE or shared.messages < shared.bound

    def count(self, change: int) -> None:
        """Jobs came or left."""
        self.size += change
        target = self.target
        if target is not None and target.shared is not None and not self.urgent:
            target.shared.messages += change

    def hold(self, entry: Entry) -> None:
        """Give a place to a job."""
        entry.holds_place = True
        self.taken += 1
        entry.pool = self.pool
        if entry.pool is not None:
            entry.pool.taken += 1

    def release(self, entry: Entry) -> Lane | None:
        """Take its place back; returns a lane that waited for it."""
        entry.holds_place = False
        self.taken -= 1
        pool, entry.pool = entry.pool, None
        if pool is None:
            return None
        pool.taken -= 1
        first = next(iter(pool.waiting), None)
        if first is not None:
            del pool.waiting[first]
        return first


class Shared:
    """What all hosts of Web Push have together. Those that are fast do not wait for those that are not."""

    def __init__(self, config: PushConfig, under_way: int) -> None:
        """`under_way`: pushes of all pools together, so that their connections leave open files to others."""
        urgent = min(URGENT_CONCURRENCY, under_way // URGENT_SHARE)
        limits = {True: urgent, False: min(config.concurrency, under_way // 2 - urgent)}
        self.pools = {
            (urgent, slow): Pool(limits[urgent]) for urgent in (True, False) for slow in (True, False)
        }
        self.bound = config.queue_size
        self.messages = 0


@dataclass(slots=True, eq=False)
class Target:
    """A destination, with everything that another one must not use up."""

    destination: Destination
    breaker: CircuitBreaker
    resume_at: int
    "When so few message jobs are left, the store is asked for those that it kept."
    shared: Shared | None = None
    bucket: Bucket | None = None
    slow: bool = True
    messages: Lane = field(init=False)
    urgent: Lane = field(init=False)
    retrying: int = 0
    probe: Job | None = None
    candidates: dict[Party, Job] = field(default_factory=dict, repr=False)
    "Messages that may serve as the next probe, one of each party."
    parties: int = 0
    "Jobs that could have been candidates since the breaker last opened."
    parked: dict[Job, float | None] = field(default_factory=dict)
    "Urgent jobs, with their times: the store does not know them."
    backlog: bool = False
    "Tokens were left in the store."
    held: int = 0
    "How often a job was sent away since the breaker last opened."

    def lane(self, job: Job) -> Lane:
        return self.urgent if job.urgent else self.messages

    @property
    def is_idle(self) -> bool:
        return not (self.messages.size or self.urgent.size or self.parked)

    @property
    def has_drained(self) -> bool:
        return self.breaker.is_closed and self.messages.size <= self.resume_at


class Targets:
    """The destinations in memory; hosts of Web Push come and go."""

    def __init__(self, config: PushConfig, random: Callable[[], float], web_pushes: int) -> None:
        self._config = config
        self._random = random
        self._by_destination: dict[Destination, Target] = {}
        self._hosts: dict[Destination, None] = {}
        self._shared = Shared(config, web_pushes)
        self.rate = Rate(per_second=config.host_rate, burst=config.host_rate)
        self.turned_away = False
        "Jobs of a host stay in the store, and nothing here remembers it."

    def __iter__(self) -> Iterator[Target]:
        return iter(self._by_destination.values())

    @property
    def hosts_down(self) -> int:
        return sum(not self._by_destination[host].breaker.is_closed for host in self._hosts)

    def get(self, destination: Destination) -> Target | None:
        return self._by_destination.get(destination)

    def get_or_make(self, destination: Destination) -> Target | None:
        """None: a host, and there is no room for another one."""
        target = self._by_destination.get(destination)
        if target is None:
            is_host = destination.provider is Provider.WEB_PUSH
            if is_host and len(self._hosts) >= MAX_HOSTS and not self._forget_host():
                self.turned_away = True
                return None
            target = self._make_host(destination) if is_host else self._make_provider(destination)
            self._by_destination[destination] = target
        return target

    def _make_provider(self, destination: Destination) -> Target:
        size = self._config.queue_size
        target = Target(destination, CircuitBreaker(self._random), size // 4)
        target.messages = Lane(target, False, self._config.concurrency, size)
        target.urgent = Lane(target, True, URGENT_CONCURRENCY, MAX_URGENT)
        return target

    def _make_host(self, destination: Destination) -> Target:
        breaker = CircuitBreaker(self._random, longest_pause=HOST_LONGEST_PAUSE)
        target = Target(destination, breaker, FAIR_SIZE // 4, self._shared, Bucket(self.rate, 0.0))
        size = max(FAIR_SIZE, self._config.queue_size // HOST_SHARE)
        target.messages = Lane(target, False, self._config.host_concurrency, size)
        target.urgent = Lane(target, True, HOST_URGENT_CONCURRENCY, HOST_URGENT)
        self._hosts[destination] = None
        return target

    def _forget_host(self) -> bool:
        for host in list(itertools.islice(self._hosts, HOSTS_LOOKED_AT)):
            del self._hosts[host]
            target = self._by_destination[host]
            if target.is_idle:
                self.turned_away = self.turned_away or target.backlog
                del self._by_destination[host]
                return True
            self._hosts[host] = None  # looked at again when its turn comes
        return False


@dataclass(frozen=True, slots=True)
class Attempts:
    """What is remembered of a token between an attempt that failed and the next one."""

    push_id: str
    "Of the push that failed last; another id means another content."
    count: int
    "Attempts of that push that failed because of its device."
    level: int
    "Failures of the token in a row, whatever their cause: new content does not shorten its delays."


def failed_again(before: Attempts | None, push_id: str, *, counts: bool) -> Attempts:
    """`counts`: the device is the cause."""
    if before is None:
        return Attempts(push_id, int(counts), 1)
    same = before.count if before.push_id == push_id else 0
    return Attempts(push_id, same + counts, before.level + 1)


def retry_delay(level: int, after: float | None, random: Callable[[], float]) -> float:
    """Seconds until the next attempt of a token that failed `level` times in a row."""
    return _doubled(FIRST_RETRY, level - 1, LONGEST_RETRY, after) * (1 + RETRY_JITTER * random())


def _doubled(first: float, times: int, longest: float, after: float | None) -> float:
    """A delay that grows with each failure, and is no shorter than the destination wishes."""
    delay = min(first * 2.0 ** min(times, 32), longest)  # an outage may last for weeks
    return delay if after is None else max(delay, min(after, LONGEST_WISH))


class BreakerState(Enum):
    CLOSED = 0
    "Pushes flow."
    OPEN = 1
    "No push until `retry_at`."
    PROBING = 2
    "One push is on its way to find out."


class CircuitBreaker:
    """When to stop pushing to a destination that is down or refuses us, and when to try again. Time is an
    argument; `random` gives numbers from 0 to 1."""

    def __init__(self, random: Callable[[], float], *, longest_pause: float = LONGEST_PAUSE) -> None:
        self._random = random
        self._longest_pause = longest_pause
        self._failures = 0
        self._openings = 0
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def answered(self) -> None:
        """A push sent while the breaker was closed got an answer, whatever it said about the device."""
        self._failures = 0

    def failed(self, now: float, after: float | None = None) -> bool:
        """A push failed for a reason that concerns the whole destination. True if this opened the breaker."""
        if not self.is_closed:
            return False  # sent before the breaker opened: nothing new
        self._failures += 1
        if self._failures < FAILURES:
            return False
        self._open(now, after)
        return True

    def probe(self, now: float) -> bool:
        """Start probing if the pause is over; the caller then owes `probe_succeeded` or `probe_failed`."""
        if self.state is not BreakerState.OPEN or now < self.retry_at:
            return False
        self.state = BreakerState.PROBING
        return True

    def probe_succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = self._openings = 0

    def probe_failed(self, now: float, after: float | None = None) -> None:
        self._open(now, after)

    def _open(self, now: float, after: float | None) -> None:
        pause = _doubled(FIRST_PAUSE, self._openings, self._longest_pause, after)
        self._openings += 1
        self.retry_at = now + pause * (1 + JITTER * self._random())
        self.state = BreakerState.OPEN
