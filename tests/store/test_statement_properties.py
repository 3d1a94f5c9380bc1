"""Any interleaving of rules, statements, replays, outages, restarts and time: a device gets a statement
at most once, and only one that is newer than the rule; and once if it was new, allowed and deliverable.

The store is real: SQLite and PostgreSQL. The node, its connection and the provider are played by the rules
of the machine, in the order in which the gateway's watcher and dispatcher ask the store.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from store.interface import NtfStore
from store.postgres import PostgresStore
from store.sqlite import SqliteStore
from store.statement_records import (
    DEFAULT_GATEWAY_CAPS,
    NewGatewaySubscription,
    PushKey,
    PushLimits,
    ReceivedStatement,
    Rule,
    RuleEdit,
)
from tests.postgres import PostgresCluster
from tests.store.test_contract_statements import NOW, new

T = TypeVar("T")
SENDERS, TOPICS = [b"a" * 32, b"b" * 32], [b"1" * 32, b"2" * 32]
RULES = [Rule(sender, topic) for sender in SENDERS for topic in TOPICS]
LIMITS = PushLimits(per_minute=6)
LIFE = 300
rules = st.sampled_from(RULES)
Pair = tuple[int, bytes]
"A device, by its number, and a statement."
MakeStore = Callable[[], NtfStore]
"Another store of the same data."


class Gateway(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.make_store = self.new_data()
        self.now = float(NOW)
        self.node: dict[bytes, ReceivedStatement] = {}
        self.connected = False
        self.devices: dict[int, NewGatewaySubscription | None] = {}
        self.tokens = [new(bytes([number]) * 32) for number in range(2)]
        self.kept_rules: dict[int, dict[Rule, int]] = {0: {}, 1: {}}
        "Rules of each device, with the number of the moment when they were made."
        self.moment = 0
        self.published_at: dict[bytes, int] = {}
        "The moment of each statement, by its hash."
        self.owed: dict[Pair, set[Rule]] = {}
        "What must be pushed, unless all these rules go before."
        self.sent: Counter[Pair] = Counter()
        self.count = 0

    def new_data(self) -> MakeStore:
        """Stores of empty data."""
        raise NotImplementedError

    def do(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.loop.run_until_complete(awaited())

    @initialize()
    def open(self) -> None:
        self.store = self.make_store()
        self.do(self.store.open())
        for number in range(2):
            self.register(number)
        self.connect()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.close())
        self.loop.close()

    # Clients

    def register(self, number: int) -> None:
        made = new(self.tokens[number].client_id, device_token=self.tokens[number].device_token)
        assert self.do(self.store.add_gateway_subscription(made, None, DEFAULT_GATEWAY_CAPS)) is None
        self.devices[number] = made

    @rule(number=st.integers(0, 1))
    def register_again(self, number: int) -> None:
        made = self.devices[number]
        assert made is not None
        self.do(self.store.delete_gateway_subscriptions(made.client_id, [made.subscription_id], None))
        for one in list(self.kept_rules[number]):
            self._revoke(number, one)
        self.register(number)

    @rule(number=st.integers(0, 1), how=st.sampled_from(RuleEdit), chosen=st.sets(rules, max_size=3))
    def edit(self, number: int, how: RuleEdit, chosen: set[Rule]) -> None:
        self._edit(number, how, chosen)
        if self.connected:
            self._read_baselines()

    @rule(number=st.integers(0, 1), one=rules)
    def ends_while_the_node_is_read(self, number: int, one: Rule) -> None:
        """The connection is lost before it is known what was stored before a rule."""
        self._edit(number, RuleEdit.ADD, {one})
        self.do(self.store.begin_baseline([one.topic]))
        self.connected = False

    def _edit(self, number: int, how: RuleEdit, chosen: set[Rule]) -> None:
        made, self.now = self.devices[number], self.now + 2
        assert made is not None
        ids = made.client_id, made.subscription_id
        self.do(
            self.store.edit_rules(*ids, how, sorted(chosen), None, now=self.now, caps=DEFAULT_GATEWAY_CAPS)
        )
        self.now += 2
        kept = self.kept_rules[number]
        gone = chosen if how is RuleEdit.REMOVE else set(kept) - chosen if how is RuleEdit.REPLACE else set()
        for one in gone & set(kept):
            self._revoke(number, one)
        if how is not RuleEdit.REMOVE:
            self.moment += 1
            for one in chosen - set(kept):
                kept[one] = self.moment

    def _revoke(self, number: int, one: Rule) -> None:
        del self.kept_rules[number][one]
        for (device, name), allowed in list(self.owed.items()):
            if device == number:
                allowed.discard(one)
                if not allowed:
                    del self.owed[device, name]

    # The node

    @rule(sender=st.sampled_from(SENDERS), topics=st.lists(st.sampled_from(TOPICS), min_size=1, unique=True))
    def publish(self, sender: bytes, topics: list[bytes]) -> None:
        self.count += 1
        name = b"%032d" % self.count
        came = ReceivedStatement(name, sender, tuple(topics), b"", int(self.now) + LIFE, received_at=self.now)
        self.node[name] = came
        self.published_at[came.statement_hash] = self.moment
        if self.connected:
            self._owe(came)
            self._accept(came)
        else:
            self._owe_later(came)

    def _owe_later(self, came: ReceivedStatement) -> None:
        """Rules of which it is known what was stored before them: to them, the replay brings news."""
        self._owe(came, settled_only=True)

    def _owe(self, came: ReceivedStatement, *, settled_only: bool = False) -> None:
        for number, kept in self.kept_rules.items():
            allowed = {Rule(came.sender, topic) for topic in came.topics} & set(kept)
            if settled_only:
                unsettled = set(self.do(self.store.new_rule_topics(100)))
                allowed = {one for one in allowed if one.topic not in unsettled}
            if allowed:
                self.owed[number, came.statement_hash] = allowed

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        self.connected = False

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self._replay()
        self._read_baselines()

    @precondition(lambda self: self.connected)
    @rule()
    def topics_are_subscribed_again(self) -> None:
        self._replay()

    def _replay(self) -> None:
        stored = [one._replace(is_stored=True) for one in self.node.values()]
        self._accept(*stored)

    def _read_baselines(self) -> None:
        while topics := self.do(self.store.new_rule_topics(1)):
            self.do(self.store.begin_baseline(topics))
            named = [one for one in self.node.values() if set(one.topics) & set(topics)]
            self._accept(*(one._replace(is_stored=True) for one in named))
            self.do(self.store.settle_rules(topics))

    def _accept(self, *statements: ReceivedStatement) -> None:
        """Limits drop what they drop."""
        fresh = [one for one in statements if one.expires_at > self.now]
        accepted = self.do(self.store.accept_statements(fresh, self.now, limits=LIMITS))
        if accepted.limited or accepted.device_limited:
            for number, made in self.devices.items():
                assert made is not None
                for record in self.do(self.store.push_records(made.subscription_id)):
                    if record.outcome in ("limited", "device_limited"):
                        self.owed.pop((number, record.statement_hash), None)

    # Time and the provider

    @rule(seconds=st.sampled_from([1, 30, 61, LIFE + 1]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.node = {name: one for name, one in self.node.items() if one.expires_at > self.now}
        alive = {one.statement_hash for one in self.node.values()}
        self.owed = {pair: allowed for pair, allowed in self.owed.items() if pair[1] in alive}
        self.do(self.store.purge_statements(int(self.now), 100))

    @rule(lost=st.booleans())
    def push(self, lost: bool) -> None:
        """All that wait; `lost`: the process dies after the provider took them."""
        while keys := self.do(self.store.unsent_statement_pushes(after=PushKey(0), limit=100)):
            claim = self.do(self.store.claim_statement_pushes(keys, self.now, LIMITS))
            for push in self.do(self.store.statement_pushes(sorted(claim.claimed))):
                pair = self._number(push.device_token), push.statement_hash
                made_at = self.kept_rules[pair[0]][Rule(push.sender, push.topic)]
                assert made_at <= self.published_at[push.statement_hash], "older than its rule"
                self.sent[pair] += 1
                self.owed.pop(pair, None)
            if lost:
                self.restart()
                return
            self.do(
                self.store.end_statement_pushes(
                    sent=sorted(claim.claimed), given_up=[], again=[], now=int(self.now)
                )
            )
        assert self.connected <= (not self.owed), "not pushed"

    @rule()
    def provider_is_down(self) -> None:
        keys = self.do(self.store.unsent_statement_pushes(after=PushKey(0), limit=100))
        claim = self.do(self.store.claim_statement_pushes(keys, self.now, LIMITS))
        self.do(
            self.store.end_statement_pushes(
                sent=[], given_up=[], again=sorted(claim.claimed), now=int(self.now)
            )
        )

    @rule()
    def restart(self) -> None:
        self.do(self.store.close())
        self.store = self.make_store()
        self.do(self.store.open())
        self.do(self.store.abandon_claimed_pushes())
        self.connected = False

    def _number(self, token: object) -> int:
        return [one.device_token for one in self.tokens].index(token)  # type: ignore[arg-type]

    @invariant()
    def nothing_is_pushed_twice(self) -> None:
        assert all(count == 1 for count in self.sent.values())


EXAMPLES = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
FEWER = settings(EXAMPLES, max_examples=15)
"Each has a database of its own, which takes a second."


def test_any_interleaving_with_sqlite() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = (Path(folder) / f"{number}.db" for number in itertools.count())

        class WithSqlite(Gateway):
            def new_data(self) -> MakeStore:
                file = next(files)
                return lambda: SqliteStore(file)

        run_state_machine_as_test(WithSqlite, settings=EXAMPLES)


def test_any_interleaving_with_postgres(postgres: PostgresCluster) -> None:
    class WithPostgres(Gateway):
        def new_data(self) -> MakeStore:
            url = postgres.new_database()
            return lambda: PostgresStore(url)

    run_state_machine_as_test(WithPostgres, settings=FEWER)
