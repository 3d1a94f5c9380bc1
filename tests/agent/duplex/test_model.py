"""Any order of events between two agents: everything arrives once and in order, or a new ratchet helps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.duplex.outgoing import Prohibited
from tests.agent.duplex.simulation import Party, connected_parties, settle

STEPS = ("send", "send", "deliver", "deliver", "answer lost", "receive", "receive", "ack lost", "ack")


def step(who: Party, peer: Party, name: str, number: int) -> bytes | None:
    match name:
        case "send":
            body = b"%s %d" % (who.name.encode(), number)
            who.send(body)
            return body
        case "deliver":
            who.deliver(peer)
        case "answer lost":
            who.deliver(peer, answer_lost=True)
        case "receive":
            who.receive()
        case "ack lost":
            who.receive(ack_lost=True)
        case "ack":
            who.ack()
    return None


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(STEPS)), max_size=40))
def test_once_and_in_order(steps: list[tuple[bool, str]]) -> None:
    alice, bob = connected_parties()
    sent: dict[str, list[bytes]] = {"alice": [], "bob": []}
    for number, (hers, name) in enumerate(steps):
        who, peer = (alice, bob) if hers else (bob, alice)
        body = step(who, peer, name, number)
        if body is not None:
            sent[who.name].append(body)
    settle(alice, bob)
    assert bob.read == sent["alice"]
    assert alice.read == sent["bob"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    before=st.lists(st.tuples(st.booleans(), st.sampled_from(STEPS)), max_size=12),
    between=st.lists(st.tuples(st.booleans(), st.sampled_from(STEPS)), max_size=20),
    hers=st.booleans(),
)
def test_a_backup_is_restored(
    before: list[tuple[bool, str]], between: list[tuple[bool, str]], hers: bool
) -> None:
    """Whatever was lost, they can talk again after at most two synchronisations; nothing is shown twice."""
    alice, bob = connected_parties()
    restored, other = (alice, bob) if hers else (bob, alice)
    for number, (by_restored, name) in enumerate(before):
        step(*((restored, other) if by_restored else (other, restored)), name, number)
    settle(alice, bob)
    backup = restored.backup()
    for number, (by_restored, name) in enumerate(between, len(before)):
        step(*((restored, other) if by_restored else (other, restored)), name, number)
    settle(alice, bob)
    restored.restore(backup)
    restored.sync()
    settle(alice, bob)
    if any(party.wants_sync for party in (alice, bob)):
        restored.sync()
        settle(alice, bob)
    seen = len(alice.read), len(bob.read)
    alice.send(b"can you read me?")
    bob.send(b"and you me?")
    settle(alice, bob)
    assert bob.read[seen[1] :] == [b"can you read me?"]
    assert alice.read[seen[0] :] == [b"and you me?"]


def test_sending_waits_for_the_new_ratchet() -> None:
    alice, bob = connected_parties()
    alice.sync()
    with pytest.raises(Prohibited):
        alice.send(b"not now")
    settle(alice, bob)
    alice.send(b"now")
    settle(alice, bob)
    assert bob.read == [b"now"]
