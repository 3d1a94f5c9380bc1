"""A ratchet that went wrong is made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent.duplex.events import Failed, RatchetSync, ReceiptsReceived
from agent.duplex.synchronisation import start_sync
from agent.duplex.tables import connection, set_connection
from agent.errors import Prohibited
from protocol.agent.ratchet_sync import SyncState
from protocol.agent.versions import AGENT_SYNC, AGENT_VERSIONS
from smp_router.router import Router
from tests.agent.duplex.simulation import connected_parties
from tests.agent.duplex.world import Person, connect, person


def state(wanted: SyncState):  # type: ignore[no-untyped-def]
    return lambda event: event.state is wanted


async def synchronised(starter: Person, other: Person) -> None:
    for who in (starter, other):
        await who.event(RatchetSync, state(SyncState.AGREED))
        await who.event(RatchetSync, state(SyncState.OK))


@pytest.mark.parametrize("pq", [False, True])
async def test_after_a_backup_was_restored(tmp_path: Path, pq: bool) -> None:
    async with Router.start() as router, person(tmp_path / "alice.db", router.address) as alice:
        async with person(tmp_path / "bob.db", router.address) as bob:
            hers, his = await connect(alice, bob, pq=pq)
            await bob.agent.send(his, b"before")
            await alice.reads()
        shutil.copy(tmp_path / "bob.db", tmp_path / "backup.db")
        async with person(tmp_path / "bob.db", router.address) as bob:
            for number in range(2):
                await alice.agent.send(hers, b"%d" % number)
                await bob.reads()
                await bob.agent.send(his, b"%d" % number)
                await alice.reads()
        async with person(tmp_path / "backup.db", router.address) as bob:
            await alice.agent.send(hers, b"unreadable")
            await bob.event(RatchetSync, state(SyncState.REQUIRED))
            await bob.event(Failed)
            with pytest.raises(Prohibited):
                await bob.agent.send(his, b"not now")
            await bob.agent.sync(his)
            await bob.event(RatchetSync, state(SyncState.STARTED))
            await synchronised(bob, alice)
            await bob.agent.send(his, b"here I am")
            assert (await alice.reads()).body == b"here I am"
            await alice.agent.send(hers, b"welcome back")
            assert (await bob.reads()).body == b"welcome back"


async def test_both_at_once(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, his = await connect(alice, bob, pq=False)
        with pytest.raises(Prohibited):
            await alice.agent.sync(hers)
        await alice.agent.sync(hers, force=True)
        await bob.agent.sync(his, force=True)
        await synchronised(alice, bob)
        await alice.agent.send(hers, b"again")
        assert (await bob.reads()).body == b"again"


async def test_receipts(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, _ = await connect(alice, bob, pq=False)
        sent = [await alice.agent.send(hers, b"%d" % number) for number in range(2)]
        await bob.reads()
        await bob.reads(receipt=b"read")
        receipts = await alice.event(ReceiptsReceived)
        assert receipts.receipts == ((sent[1], True),)
        await alice.agent.ack(hers, receipts.message_id)


@pytest.mark.parametrize("pq", [True, False])
async def test_post_quantum_keys_come_and_go_with_a_new_ratchet(tmp_path: Path, pq: bool) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, his = await connect(alice, bob, pq=not pq)
        await alice.agent.sync(hers, force=True, pq=pq)
        await bob.agent.sync(his, force=True, pq=pq)
        await synchronised(alice, bob)
        for _ in range(3):
            await alice.agent.send(hers, b"question")
            await bob.reads()
            await bob.agent.send(his, b"answer")
            answer = await alice.reads()
        assert answer.pq is pq
        assert [conn.pq_support for conn in await alice.agent.connections()] == [pq]


def test_other_keys_when_both_had_agreed() -> None:
    """Somebody else, or a backup, has made keys too: a third ratchet is needed."""
    alice, bob = connected_parties()
    alice.sync()
    alice.deliver()
    bob.receive()
    assert connection(bob.db, bob.connection_id).sync_state is SyncState.AGREED
    alice.run(lambda tx: start_sync(tx, alice.connection_id, force=True))
    alice.deliver()
    bob.receive()
    assert connection(bob.db, bob.connection_id).sync_state is SyncState.REQUIRED
    assert bob.errors == ["A_CRYPTO RATCHET_SYNC"]


def test_keys_tell_that_the_peer_knows_a_later_version() -> None:
    alice, bob = connected_parties()
    bob.run(lambda tx: set_connection(tx, bob.connection_id, agent_version=AGENT_SYNC))
    alice.sync()
    alice.deliver()
    bob.receive()
    assert connection(bob.db, bob.connection_id).agent_version == AGENT_VERSIONS.max
