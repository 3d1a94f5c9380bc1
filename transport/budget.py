"""CPU time as a limited resource: who may use the event loop next, and how much each peer has used.

Everything that a peer can make this process compute (parsing, signatures, handshakes) is done in short slices
and charged to the peer's source by what it really cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from transport.limits import Bucket, Rate, network_of

SLICE = 0.0005
"Seconds of work after which a slice should end."
TURN = 0.001
"Seconds of slices in one turn of the event loop, on average."
GRANTS = 4
"Slices that begin in one turn of the event loop when others wait."
LEAST = 0.0001
"Seconds that a slice counts at least when the next source is chosen."
PAUSE = 0.02
"Seconds between checks of whether sources that have used up their share may go on."
KNOWN_SOURCES = 20_000
"Sources that are remembered; the one not seen for longest is forgotten first."
FAILURES = Rate(per_second=5, burst=500)
ADMISSIONS = Rate(per_second=5, burst=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """What one source, an IPv4 address or a /64 of IPv6, may use."""

    share: float = 0.5
    "CPU seconds per second in the long run; 0: no limit."
    burst: float = 5.0
    "CPU seconds at once."
    failures: Rate = FAILURES
    "Failed authorisations. A successful one makes up for a failed one."
    suspicion: float = 60.0
    "Seconds for which a source with more failures is suspect."
    admissions: Rate = ADMISSIONS
    "New connections of a suspect source: its honest clients get in, if more slowly."


DEFAULT = BudgetConfig()


class CpuBudget:
    """Shares the time of one event loop among the sources that send work to it.

        with await budget.take(source) as work:
            while items and not work.is_over:
                verify(items.pop())

    `take` waits until it is the source's turn. The network that has used least goes first, so that a source
    with many busy connections delays a quiet one by no more than a turn; sources of one network take turns,
    and so do connections of one source. A network is an IPv4 address or a /48 of IPv6: whoever has 65,536
    sources gets no turn for each. The block does about `SLICE` seconds of work, does not await, and is
    charged by the CPU time it really took. A source above its long-term share waits until it is below.

    Use `charge` for work measured elsewhere, such as in a thread. Report the outcome of authorisations with
    `authorised`, and ask `admits` before a new connection costs anything. `source` is what
    `transport.limits.source_of` returns. One instance serves all ports of a process.
    """

    def __init__(self, config: BudgetConfig = DEFAULT, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._networks: WeakValueDictionary[str, _Network] = WeakValueDictionary()
        "As long as a source in them is remembered."
        self._virtual = 0.0
        "CPU seconds that a network would have used if it had always had its fair part."
        self._queue: list[tuple[float, int, _Network]] = []
        "A heap with one entry per network that waits: what it has used, order of arrival, network."
        self._arrivals = 0
        self._over_share: set[_Source] = set()
        "Sources that wait, and have used up their share."
        self._left = TURN
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, source: str) -> Slice:
        """Wait for the source's turn; enter the result at once, and work without awaiting."""
        loop = asyncio.get_running_loop()
        state = self._source(source)
        if self._turn is None:
            self._turn = loop.call_soon(self._next_turn, loop)
        if self._left <= 0 or self._queue or state.waiting or not self._has_share(state):
            granted: asyncio.Future[None] = loop.create_future()
            state.waiting.append(granted)
            if len(state.waiting) == 1:
                self._wait(state)
            await granted
        else:
            self._virtual = max(self._virtual, state.network.used)
        return Slice(self, source)

    def measure(self, source: str) -> Slice:
        """A block that is charged like one of `take`, without waiting: for answers to what had its turn."""
        return Slice(self, source)

    def charge(self, source: str, seconds: float) -> None:
        """Count CPU time that was spent on the source's behalf."""
        state = self._source(source)
        self._left -= seconds
        state.network.used = max(state.network.used, self._virtual) + max(seconds, LEAST)
        if self.config.share:
            self._refill(state)
            state.level -= seconds

    def has_share(self, source: str) -> bool:
        """Whether the source is within its long-term share, for work that has turns of its own."""
        return self._has_share(self._source(source))

    def authorised(self, source: str, *, succeeded: int, failed: int) -> bool:
        """Count authorisations of one connection; False if it has to be closed.

        Connections of a suspect source stay open as long as theirs do not fail.
        """
        if not failed and source not in self._sources:
            return True
        state, rate, now = self._source(source), self.config.failures, self._clock()
        if state.failures is None:
            if not failed:
                return True
            state.failures = Bucket(rate, now)
        state.failures.give(rate, succeeded)
        if not failed:
            return True
        if not state.failures.take(rate, now, failed):
            if now >= state.suspect_until:
                state.admissions = Bucket(self.config.admissions, now)
            state.suspect_until = now + self.config.suspicion
        return now >= state.suspect_until

    def admits(self, source: str) -> bool:
        """Whether a new connection may be accepted."""
        state, now = self._sources.get(source), self._clock()
        if state is None or now >= state.suspect_until:
            return True
        assert state.admissions is not None  # since it is suspect
        return state.admissions.take(self.config.admissions, now)

    def _source(self, source: str) -> _Source:
        state = self._sources.get(source)
        if state is not None:
            self._sources.move_to_end(source)
            return state
        name = network_of(source)
        network = self._networks.get(name)
        if network is None:
            network = self._networks[name] = _Network(self._virtual)
        state = self._sources[source] = _Source(network, self.config.burst, self._clock())
        for _ in range(min(len(self._sources) - KNOWN_SOURCES, 2)):  # two: those that wait are kept
            oldest, forgotten = self._sources.popitem(last=False)
            if forgotten.waiting:
                self._sources[oldest] = forgotten
        return state

    def _has_share(self, state: _Source) -> bool:
        if not self.config.share:
            return True
        self._refill(state)
        return state.level > 0

    def _refill(self, state: _Source) -> None:
        now = self._clock()
        state.level = min(self.config.burst, state.level + (now - state.at) * self.config.share)
        state.at = now

    def _wait(self, state: _Source) -> None:
        """Let it take part in its network's turns."""
        state.network.turns.append(state)
        if len(state.network.turns) == 1:
            self._enqueue(state.network)

    def _enqueue(self, network: _Network) -> None:
        self._arrivals += 1
        heappush(self._queue, (max(network.used, self._virtual), self._arrivals, network))

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = min(TURN, self._left + TURN)
        grants = GRANTS
        while self._queue and grants and self._left > 0:
            grants -= self._grant_next()
        if self._over_share and self._timer is None:
            self._timer = loop.call_later(PAUSE, self._look_again, loop)
        self._turn = None
        if self._queue or self._left < TURN:
            self._turn = loop.call_soon(self._next_turn, loop)

    def _grant_next(self) -> int:
        """Let the network that has used least go on; returns how many slices will begin."""
        used, _, network = heappop(self._queue)
        if used < network.used:  # charged since it was put in
            self._enqueue(network)
            return 0
        granted = self._next_of(network)
        if granted is not None:
            self._virtual = max(self._virtual, used)
            network.used = self._virtual + LEAST
            granted.set_result(None)
        if network.turns:
            self._enqueue(network)
        return granted is not None

    def _next_of(self, network: _Network) -> asyncio.Future[None] | None:
        """The connection whose turn it is; None if the source whose turn it is has none that may go on."""
        state = network.turns.popleft()
        while state.waiting and state.waiting[0].done():  # cancelled
            state.waiting.popleft()
        if not state.waiting:
            return None
        if not self._has_share(state):
            self._over_share.add(state)
            return None
        granted = state.waiting.popleft()
        if state.waiting:
            network.turns.append(state)
        return granted

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for state in [each for each in self._over_share if self._has_share(each)]:
            self._over_share.discard(state)
            self._wait(state)
        if self._over_share:
            self._timer = loop.call_later(PAUSE, self._look_again, loop)
        if self._queue and self._turn is None:
            self._turn = loop.call_soon(self._next_turn, loop)


class Slice:
    """Work of one source; see `CpuBudget`."""

    __slots__ = ("_budget", "_source", "_until")

    def __init__(self, budget: CpuBudget, source: str) -> None:
        self._budget = budget
        self._source = source

    def __enter__(self) -> Self:
        self._until = time.thread_time() + SLICE
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.charge(self._source, time.thread_time() - self._until + SLICE)

    @property
    def is_over(self) -> bool:
        """Whether the rest of the work should wait for another slice."""
        return time.thread_time() >= self._until


class _Network:
    """Sources that have one part of the time together."""

    __slots__ = ("__weakref__", "turns", "used")

    def __init__(self, used: float) -> None:
        self.used = used
        "In the terms of `CpuBudget._virtual`."
        self.turns: deque[_Source] = deque()
        "Its sources that wait, but for those above their share."


class _Source:
    """What is known of one source."""

    __slots__ = ("admissions", "at", "failures", "level", "network", "suspect_until", "waiting")

    def __init__(self, network: _Network, level: float, now: float) -> None:
        self.network = network
        self.level = level
        "CPU seconds left of its long-term share, when it was last looked at."
        self.at = now
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.failures: Bucket | None = None
        self.suspect_until = now
        self.admissions: Bucket | None = None
