"""Agents against a peer who knows all keys of its side and keeps to no rule."""

from __future__ import annotations

import random
import traceback
from contextlib import suppress

from agent.duplex.tables import send_queues
from agent.errors import INTERNAL, Prohibited
from protocol.smp_messages import Send
from tests.agent.duplex.simulation import Party, Routers
from tests.agent.duplex.test_hostile_peer import Peer, go_on
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import Finding, ParserRun

MESSAGES = 25
"Of one conversation; then others begin from nothing."
MOST_STEPS = 12


def fuzz_agents(inputs: int, seed: int) -> ParserRun:
    """So many messages to agents in all states. A defect would end the work, or show as INTERNAL."""
    run = ParserRun(0, [])
    mutator = Mutator(seed)
    for number in range(-(-inputs // MESSAGES)):
        chance = random.Random(f"{seed} {number}")
        try:
            _conversation(chance, mutator, run, min(MESSAGES, inputs - run.inputs))
        except Exception:
            data = f"conversation {number} of seed {seed}".encode()
            run.findings.append(Finding("agent", data, traceback.format_exc()))
            return run
    return run


def _conversation(chance: random.Random, mutator: Mutator, run: ParserRun, messages: int) -> None:
    routers = Routers()
    alice, bob = Party("alice", routers), Party("bob", routers)
    bob.join(alice.create())
    for _ in range(chance.randrange(MOST_STEPS + 1)):
        go_on(bob, alice)
        go_on(alice, bob)
    for _ in range(messages):
        victim, other = chance.choice(((alice, bob), (bob, alice)))
        run.inputs += 1
        sent = Peer(other, victim, chance).body()
        if sent is not None and routers.has(sent[0].sender_id):
            body = mutator.changed(sent[1])[: len(sent[1])] if mutator.chance(0.2) else sent[1]
            routers.answer(sent[0].sender_id, Send(False, body))
        what = chance.choice((victim.switch, victim.abort_switch, victim.sync, None, None, None))
        if what is not None and send_queues(victim.db, victim.connection_id):
            with suppress(Prohibited):
                what()
        go_on(victim, other)
    for party in (alice, bob):
        assert INTERNAL not in party.errors, party.errors
