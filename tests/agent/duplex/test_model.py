"""Any order of events between two agents: everything arrives once and in order, or a new ratchet helps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.errors import NoConnection, Prohibited
from protocol.agent.ratchet_sync import SyncState
from protocol.smp_messages import Del
from tests.agent.duplex.simulation import (
    DATABASES,
    Killed,
    Party,
    Routers,
    carry,
    connected_parties,
    in_order_or_told,
    settle,
)

pytestmark = pytest.mark.timeout(240)
"Seconds for one test: an example takes 0.2, and what is to arrive has a limit of its own."

TALK = (
    "send",
    "send",
    "deliver",
    "deliver",
    "answer lost",
    "receive",
    "receive",
    "ack lost",
    "ack",
    "restart",
)
BAD_ROUTERS = ("lose", "reorder", "duplicate")
ROTATION = ("switch", "abort", "command", "command lost") + ("carry",) * 6

SEEDS = st.integers(0, 2**32 - 1)
"Of keys and delays: which side sends first in a new ratchet, and who moves where."
Step = tuple[bool, str, int]
"Whose, what, and which of several queues."


def steps(names: tuple[str, ...], max_size: int) -> st.SearchStrategy[list[Step]]:
    """Long ones: left alone, Hypothesis makes lists of five on average, in which nothing much can happen."""
    step = st.tuples(st.booleans(), st.sampled_from(names), st.integers(0, 1))
    return st.lists(step, min_size=max_size // 2, max_size=max_size)


def step(who: Party, peer: Party, name: str, choice: int, number: int) -> bytes | None:
    """What was sent, if anything."""
    match name:
        case "send":
            body = b"%s %d" % (who.name.encode(), number)
            try:
                who.send(body)
            except (Prohibited, NoConnection):
                return None
            return body
        case "deliver":
            who.deliver(choice)
        case "answer lost" | "command lost":
            who.answer_lost = True
            (who.deliver if name == "answer lost" else who.command)(choice)
            who.answer_lost = False
        case "receive":
            who.receive(choice)
        case "ack lost":
            who.receive(choice, ack_lost=True)
        case "ack":
            who.ack()
        case "restart":
            who.restart()
        case "switch":
            who.switch()
        case "abort":
            who.abort_switch()
        case "lose" | "reorder" | "duplicate":
            who.disturb(name, choice)
        case "command":
            who.command(choice)
        case "carry":
            carry(who, peer, choice)
        case "sync":
            with suppress(NoConnection):
                who.sync()
        case "settle":
            settle(who, peer)
        case "synchronise again":
            who.synchronise_again()
    return None


def perform(alice: Party, bob: Party, script: list[Step], first: int = 0) -> dict[str, list[bytes]]:
    """What each has sent."""
    sent: dict[str, list[bytes]] = {"alice": [], "bob": []}
    for number, (hers, name, choice) in enumerate(script, first):
        who, peer = (alice, bob) if hers else (bob, alice)
        body = step(who, peer, name, choice, number)
        if body is not None:
            sent[who.name].append(body)
    return sent


def play(alice: Party, bob: Party, script: list[Step], first: int = 0) -> dict[str, list[bytes]]:
    """The same, and everything arrives."""
    sent = perform(alice, bob, script, first)
    settle(alice, bob)
    return sent


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps(TALK, 40))
def test_once_and_in_order(script: list[Step]) -> None:
    alice, bob = connected_parties()
    sent = play(alice, bob, script)
    assert bob.read == sent["alice"]
    assert alice.read == sent["bob"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps(TALK + BAD_ROUTERS, 60))
@example([(True, "send", 0)] * 3 + [(True, "deliver", 0)] * 3 + [(False, "reorder", 0)] * 2)
def test_routers_lose_repeat_and_mix_up_messages(script: list[Step]) -> None:
    """Nothing is shown twice, and what is missing is told by what comes after it."""
    alice, bob = connected_parties()
    sent = play(alice, bob, script)
    for who in (alice, bob):
        who.send(b"the end")
    settle(alice, bob)
    for reader, writer in ((bob, alice), (alice, bob)):
        assert len(set(reader.read)) == len(reader.read)
        missing = set(sent[writer.name]) - set(reader.read)
        assert {writer.sent_ids[body] for body in missing} <= reader.told_lost()
        assert in_order_or_told(reader, [*sent[writer.name], b"the end"])
        assert not reader.errors


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps(TALK + ROTATION, 60))
def test_queues_are_replaced_meanwhile(script: list[Step]) -> None:
    """While two queues are in use a later message may come first; then it says so."""
    alice, bob = connected_parties()
    sent = play(alice, bob, script)
    for reader, writer in ((bob, alice), (alice, bob)):
        assert sorted(reader.read) == sorted(sent[writer.name])
        assert in_order_or_told(reader, sent[writer.name])
        assert not reader.failures
    for party in (alice, bob):  # whatever became of it, there can be another one
        assert party.switch()
        settle(alice, bob)
        assert party.queues() == 1


def secured_new_queue() -> tuple[Party, Party]:
    """Alice moves; Bob does not know yet that her new queue can be used."""
    alice, bob = connected_parties()
    assert alice.switch()
    carry(alice, bob, 0)  # QADD
    carry(bob, alice, 0)  # QKEY
    assert alice.command()  # KEY; QUSE is to be sent
    return alice, bob


OLD, NEW = 0, 1


def test_what_the_old_router_did_not_take_goes_to_the_new_one() -> None:
    alice, bob = secured_new_queue()
    bob.send(b"waits")
    carry(alice, bob, OLD)  # QUSE
    while bob.deliver(NEW) and bob.sends_to() > 1:
        pass
    settle(alice, bob)
    assert alice.read == [b"waits"]


def test_an_old_queue_that_is_gone_is_no_failure() -> None:
    """What comes on the new queue before QTEST is enough for its owner to delete the old one."""
    alice, bob = secured_new_queue()
    bob.send(b"both ways")
    carry(alice, bob, OLD)  # QUSE
    bob.deliver(NEW)
    assert alice.receive(NEW)
    assert alice.command()  # DEL
    bob.deliver(OLD)
    settle(alice, bob)
    assert alice.read == [b"both ways"]
    assert not bob.failures
    assert bob.sends_to() == 1


def test_an_old_queue_is_read_to_its_end() -> None:
    alice, bob = secured_new_queue()
    for body in (b"unread", b"neither"):
        bob.send(body)
        bob.deliver(OLD)
    carry(alice, bob, OLD)  # QUSE
    carry(bob, alice, NEW)  # QTEST
    assert not alice.command(), "the old queue has messages"
    settle(alice, bob)
    assert alice.read == [b"unread", b"neither"]
    assert alice.queues() == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    before=steps(TALK + ROTATION, 25),
    between=steps(TALK, 20),
    after=steps(TALK + ROTATION, 25),
    hers=st.booleans(),
    seed=SEEDS,
)
def test_a_backup_is_restored(
    before: list[Step], between: list[Step], after: list[Step], hers: bool, seed: int
) -> None:
    """Messages are under way. They talk again after at most two synchronisations; nothing is shown twice.

    A backup from before a queue was replaced is of no use: nobody sends to the queues that it knows.
    """
    alice, bob = connected_parties(seed)
    restored = alice if hers else bob
    play(alice, bob, before)
    backup = restored.backup()
    under_way = perform(alice, bob, between, 100)
    restored.restore(backup)
    restored.sync()
    settle(alice, bob)
    if alice.wants_sync or bob.wants_sync:
        restored.sync()
        settle(alice, bob)
    lost = set(under_way[bob.name if hers else alice.name]) - set(restored.read)
    assert len(lost) <= len(restored.errors), "each message that cannot be read is told of"
    seen = len(alice.read), len(bob.read)
    sent = play(alice, bob, after, 200)
    assert sorted(bob.read[seen[1] :]) == sorted(sent["alice"])
    assert sorted(alice.read[seen[0] :]) == sorted(sent["bob"])


SYNCHRONISATION = ("sync", "synchronise again", "settle")
EVERYTHING = TALK + ROTATION + SYNCHRONISATION


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps(EVERYTHING, 60), st.booleans(), SEEDS)
def test_everything_at_once(script: list[Step], hers: bool, seed: int) -> None:
    """Nothing is shown twice, everything ends by itself, and in the end the connection can be deleted."""
    alice, bob = connected_parties(seed)
    play(alice, bob, script)
    for _ in range(8):
        for who in (alice, bob):
            who.synchronise_again()
            settle(alice, bob)
    for party in (alice, bob):
        assert len(set(party.read)) == len(party.read)
        assert party.sync_state.may_send
    seen = len(alice.read), len(bob.read)
    for writer in (alice, bob):
        writer.send(b"in the end, %s" % writer.name.encode())
    settle(alice, bob)
    assert alice.read[seen[0] :] == [b"in the end, bob"]
    assert bob.read[seen[1] :] == [b"in the end, alice"]
    for party in (alice, bob):
        assert party.sync_state is SyncState.OK
        party.abort_switch()
        settle(alice, bob)
        assert party.switch()
        settle(alice, bob)
        assert party.queues() == 1
    who = alice if hers else bob
    who.loses = Del
    assert who.delete()
    for _ in range(3):
        settle(alice, bob)
    assert who.deleted
    assert not who.has_connection()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    before=steps(EVERYTHING, 40),
    after=steps(EVERYTHING, 20),
    hers=st.booleans(),
    wait=st.booleans(),
    seed=SEEDS,
)
def test_a_deletion_at_any_time(
    before: list[Step], after: list[Step], hers: bool, wait: bool, seed: int
) -> None:
    """Whatever was going on, its queues go from their routers, and only then the connection is gone."""
    alice, bob = connected_parties(seed)
    who, peer = (alice, bob) if hers else (bob, alice)
    perform(alice, bob, before)
    assert who.delete(wait=wait)
    perform(alice, bob, after, 100)
    assert not who.deleted or not who.has_connection()
    for _ in range(3):
        settle(alice, bob)
    assert who.deleted
    assert not who.has_connection()
    nameless = alice.nameless_queues + bob.nameless_queues
    assert len(who.routers.queues) == peer.queues() + nameless
    assert not {"INTERNAL", "A_MESSAGE"} & set(alice.errors + bob.errors)


def test_sending_waits_for_the_new_ratchet() -> None:
    alice, bob = connected_parties()
    alice.sync()
    with pytest.raises(Prohibited):
        alice.send(b"not now")
    settle(alice, bob)
    alice.send(b"now")
    settle(alice, bob)
    assert bob.read == [b"now"]


class Life:
    """Two people get to know each other, talk, move and synchronise; one of them dies at some point."""

    def __init__(self, mortal: str, dies_at: int) -> None:
        routers = Routers()
        self.alice, self.bob = Party("alice", routers), Party("bob", routers)
        self.mortal = self.alice if mortal == "alice" else self.bob
        self.mortal.dies_at = dies_at
        self.died = False
        self.sent: dict[str, list[bytes]] = {"alice": [], "bob": []}
        self.perhaps: list[bytes] = []

    def do(self, work: Callable[[], object]) -> bool:
        """False if it was the end."""
        try:
            work()
        except Killed:
            self.died = True
            self.mortal.restart()
            return False
        return True

    def settle(self) -> None:
        if not self.do(lambda: settle(self.alice, self.bob)):
            settle(self.alice, self.bob)

    def say(self, who: Party, body: bytes) -> None:
        (self.sent[who.name] if self.do(lambda: who.send(body)) else self.perhaps).append(body)

    def talk(self, word: bytes) -> None:
        for who in (self.alice, self.bob):
            self.say(who, b"%s, %s" % (word, who.name.encode()))
        self.settle()

    def make_connection(self) -> None:
        links: list[str] = []
        while not self.do(lambda: links.append(self.alice.create())):
            pass
        while not self.do(lambda: self.bob.join(links[0])) and not self.bob.has_connection():
            pass
        self.bob.connection_id = 1
        self.settle()

    def live(self) -> None:
        self.make_connection()
        self.talk(b"first")
        for who in (self.alice, self.bob):
            self.do(who.switch)
            self.talk(b"while %s moves" % who.name.encode())
        self.do(self.alice.sync)
        self.settle()
        self.talk(b"last")


@pytest.mark.parametrize("mortal", ["alice", "bob"])
def test_death_at_every_step(mortal: str) -> None:
    """Before and after each commit and each command to a router: nothing is lost or shown twice."""
    for dies_at in range(1, 10_000):
        DATABASES.close()
        life = Life(mortal, dies_at)
        life.live()
        for reader, writer in ((life.alice, "bob"), (life.bob, "alice")):
            certain = [body for body in reader.read if body not in life.perhaps]
            assert sorted(certain) == sorted(life.sent[writer]), f"death at step {dies_at}"
            assert len(set(reader.read)) == len(reader.read), f"death at step {dies_at}"
        if not life.died:
            assert dies_at > 100, "that was a short life"
            return
    raise AssertionError("it never ends")
