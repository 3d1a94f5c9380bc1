"""Tasks that wait between attempts, and those who hurry them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.duplex.outgoing import delivered, next_delivery
from agent.duplex.store import Tx
from agent.duplex.tables import send_queues
from agent.duplex.workers import Wait, WorkerTasks
from smp_router.router import Router
from tests.agent.duplex.simulation import carry, connected_parties
from tests.agent.duplex.world import DEADLINE, connect, person
from transport.cancellation import TaskGroup

FOR_EVER = 1e6


async def test_a_hurry_that_comes_before_the_wait_counts() -> None:
    """As when a queue has room again before its worker has stored that it was full."""
    attempts = 0

    async def step(key: int, wait: Wait) -> bool:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            workers.wake(key, hurry=True)
            await wait.sleep(FOR_EVER)
        return attempts < 2

    async with asyncio.timeout(DEADLINE), TaskGroup() as tasks:
        workers: WorkerTasks[int] = WorkerTasks("attempts", tasks, step)
        workers.wake(1)
        await workers.idle.wait()
    assert attempts >= 2


async def test_what_is_given_up_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router is away: whoever waits for it is told when its connection is deleted."""
    rests, sleep = asyncio.Queue[None](), Wait.sleep

    async def for_ever(self: Wait, _seconds: float) -> None:
        rests.put_nowait(None)
        await sleep(self, FOR_EVER)

    async with (
        asyncio.timeout(DEADLINE),
        Router.start() as one,
        Router.start() as two,
        person(tmp_path / "alice.db", one.address) as alice,
        person(tmp_path / "bob.db", two.address) as bob,
    ):
        _, his = await connect(alice, bob, pq=False)
        _, link = await alice.agent.create_invitation(pq=False)
        monkeypatch.setattr(Wait, "sleep", for_ever)
        one.faults.refuse(True)
        one.faults.drop_connections()
        await bob.agent.send(his, b"never sent")
        other = await bob.agent.join(link, b"Bob", pq=False)
        for _ in range(2):
            await rests.get()
        await bob.agent.delete(his)
        await bob.agent.delete(other)
        await bob.agent.settled()
        assert await bob.agent.connections() == []


def test_nobody_waits_to_send_to_a_queue_that_was_replaced() -> None:
    alice, bob = connected_parties()
    (old,) = send_queues(bob.db, bob.connection_id)
    assert alice.switch()
    carry(alice, bob, 0)  # QADD
    carry(bob, alice, 0)  # QKEY
    carry(alice, bob, 0)  # QUSE
    (new,) = {queue.queue_id for queue in send_queues(bob.db, bob.connection_id)} - {old.queue_id}
    test = next_delivery(bob.db, new)
    assert test is not None

    def switched(tx: Tx) -> set[object]:
        delivered(tx, test)
        return {*tx.hurried}

    assert bob.run(switched) == {old.queue_id}
