"""Whatever arrives, fails or crashes: nothing is lost, and nothing is pushed twice without a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ntf_server.config import PushConfig
from ntf_server.push import lanes
from ntf_server.push.composing import Composed, compose
from ntf_server.push.lanes import Attempts, Job, Kind
from ntf_server.push.provider import Destination
from ntf_server.push.scheduler import Added, Ended, PushScheduler, Taken
from protocol.addresses import SmpServer
from protocol.device_token import Provider
from protocol.encoding import EntityId
from protocol.push_messages import PUSH_PADDING
from store.records import LastNotification, SubKey, TokenKey

TOKENS, QUEUES = 6, 9
ROUTER = SmpServer(("router.example",), "", b"k" * 32)
DESTINATIONS = (
    Destination(Provider.APNS_PROD),
    Destination(Provider.WEB_PUSH, b"one.example"),
    Destination(Provider.WEB_PUSH, b"two.example"),
)
MAX_TOKENS = 5
FAILURES = lanes.FAILURES
ATTEMPTS = Attempts("id 1", 1, 1)


def destination_of(token_key: TokenKey) -> Destination:
    return DESTINATIONS[token_key % len(DESTINATIONS)]


@dataclass
class Flight:
    """A push that a provider has; nobody knows yet what it will say."""

    taken: Taken
    composed: Composed[LastNotification]


@dataclass
class ModelStore:
    """The last notification of each queue of each token."""

    entries: dict[tuple[TokenKey, SubKey], LastNotification] = field(default_factory=dict)
    seq: int = 0

    def add(self, token_key: TokenKey, sub_key: SubKey) -> None:
        self.seq += 1
        self.entries[token_key, sub_key] = LastNotification(
            sub_key, self.seq, ROUTER, EntityId(b"n" * 24), 0, b"n" * 24, b"m", False
        )

    def of(self, token_key: TokenKey) -> list[LastNotification]:
        found = [entry for (key, _), entry in self.entries.items() if key == token_key]
        return sorted(found, key=lambda entry: entry.seq)

    def unsent_tokens(self) -> list[TokenKey]:
        return sorted({key for (key, _), entry in self.entries.items() if not entry.sent})

    def set_sent(self, token_key: TokenKey, sent: Sequence[LastNotification]) -> None:
        for entry in sent:
            stored = self.entries.get((token_key, entry.sub_key))
            if stored is not None and stored.seq == entry.seq:
                self.entries[token_key, entry.sub_key] = entry._replace(sent=True)


class Pushing(RuleBasedStateMachine):
    """Plays the dispatcher, the store and the providers around a real scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = ModelStore()
        self.flights: list[Flight] = []
        self.accepted: list[Flight] = []
        "Accepted, but not marked in the store yet."
        self.times_accepted: Counter[int] = Counter()
        self.forgiven: Counter[int] = Counter()
        "Acceptances whose mark was lost in a crash: they excuse a repetition."
        self.waiting: list[TokenKey] = []
        "Tokens whose bringer waits for room."

    @initialize(failures=st.sampled_from([1, 3]))
    def choose(self, failures: int) -> None:
        lanes.FAILURES = failures
        self.start()

    def start(self) -> None:
        config = PushConfig(queue_size=MAX_TOKENS, concurrency=2, host_concurrency=1, host_rate=3)
        self.scheduler = PushScheduler(config, lambda: 0.0)
        self.scheduler.want_sweep(self.now)

    @rule(token=st.integers(1, TOKENS), queue=st.integers(1, QUEUES))
    def arrive(self, token: int, queue: int) -> None:
        self.store.add(TokenKey(token), SubKey(queue))
        if self.scheduler.add(Job(Kind.MESSAGE, TokenKey(token)), self.now) is Added.FULL:
            self.waiting.append(TokenKey(token))

    @rule(token=st.integers(1, TOKENS))
    def arrive_in_many_queues(self, token: int) -> None:
        for queue in range(1, QUEUES + 1):
            self.arrive(token, queue)

    @rule(token=st.integers(1, TOKENS))
    def delete(self, token: int) -> None:
        for key in [key for key in self.store.entries if key[0] == token]:
            del self.store.entries[key]

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def dispatch(self) -> None:
        while self.waiting:
            if self.scheduler.add(Job(Kind.MESSAGE, self.waiting[0]), self.now) is Added.FULL:
                break
            self.waiting.pop(0)
        if self.scheduler.sweep_due(self.now):
            for token_key in self.store.unsent_tokens():
                if self.scheduler.add(Job(Kind.MESSAGE, token_key), None) is Added.FULL:
                    self.waiting.append(token_key)
        for taken in self.scheduler.take(self.now):
            composed = compose(self.store.of(taken.job.token_key), PUSH_PADDING - 2)
            destination = destination_of(taken.job.token_key) if composed.entries else None
            if self.scheduler.loaded(taken, destination, self.now) is None:
                self.flights.append(Flight(taken, composed))

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        self.accept_flight(self.land(data))

    def accept_flight(self, flight: Flight) -> None:
        self.times_accepted.update(entry.seq for entry in flight.composed.unsent)
        self.accepted.append(flight)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def limit_token(self, data: st.DataObject) -> None:
        job = self.land(data).taken.job
        self.scheduler.ended(job, Ended(answered=True, retry=(ATTEMPTS, self.now + 2.0)), self.now)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def fail_provider(self, data: st.DataObject) -> None:
        job = self.land(data).taken.job
        self.scheduler.ended(job, Ended(answered=False, retry=(ATTEMPTS, self.now + 2.0)), self.now)

    @rule()
    def store_outcomes(self) -> None:
        accepted, self.accepted = self.accepted, []
        for flight in accepted:
            job = flight.taken.job
            self.store.set_sent(job.token_key, flight.composed.unsent)
            self.scheduler.ended(job, Ended(answered=True, more=flight.composed.more), self.now)

    @rule()
    def crash(self) -> None:
        for flight in self.accepted:
            self.forgiven.update(entry.seq for entry in flight.composed.unsent)
        self.accepted.clear()
        self.flights.clear()
        self.waiting.clear()
        self.start()

    def land(self, data: st.DataObject) -> Flight:
        return self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))

    @invariant()
    def nothing_twice(self) -> None:
        for seq, times in self.times_accepted.items():
            assert times <= 1 + self.forgiven[seq]

    @invariant()
    def one_push_per_token(self) -> None:
        under_way = [flight.taken.job for flight in (*self.flights, *self.accepted)]
        assert len(under_way) == len(set(under_way))

    @invariant()
    def bounded(self) -> None:
        # Each destination has its bound, so has what is to be looked up; a probe of each may come on top.
        assert len(self.scheduler) <= (MAX_TOKENS + 1) * len(DESTINATIONS) + MAX_TOKENS

    def teardown(self) -> None:
        """From now on all goes well: everything must get through, without a restart."""
        for _ in range(400):
            self.dispatch()
            for flight in self.flights:
                self.accept_flight(flight)
            self.flights.clear()
            self.store_outcomes()
            self.nothing_twice()
            self.now += 5.0
        lanes.FAILURES = FAILURES
        assert self.store.unsent_tokens() == []
        assert all(self.times_accepted[entry.seq] for entry in self.store.entries.values())
        assert len(self.scheduler) == 0
        assert self.scheduler.under_way == 0


Pushing.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPushing = Pushing.TestCase
