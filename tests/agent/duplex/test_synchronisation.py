"""A ratchet that went wrong is made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent.duplex.events import Failed, RatchetSync, ReceiptsReceived
from agent.duplex.outgoing import Prohibited
from protocol.agent.ratchet_sync import SyncState
from smp_router.router import Router
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
