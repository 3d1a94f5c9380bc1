"""What an agent does by itself, now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.duplex import agent as agent_module
from agent.duplex.events import RatchetSync
from agent.duplex.ratchets import is_seen, seen_before
from agent.duplex.store import Tx
from agent.duplex.tables import set_connection
from protocol.agent.ratchet_sync import SyncState
from smp_router.router import Router
from tests.agent.duplex.world import connect, person
from tests.waiting import until

KIND, DIGEST = "encrypted", bytes(32)


async def test_a_synchronisation_that_is_due_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that were sent, and never answered."""
    monkeypatch.setattr(agent_module, "SYNC_INTERVAL", 0.01)
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, his = await connect(alice, bob, pq=False)
        await alice.agent._transact(
            lambda tx: set_connection(tx, hers, sync_state=SyncState.STARTED, sync_due=tx.now)
        )
        for who in (alice, bob):
            await who.event(RatchetSync, lambda event: event.state is SyncState.OK)
        await bob.agent.send(his, b"with the new ratchet")
        assert (await alice.reads()).body == b"with the new ratchet"


async def test_old_hashes_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_CLEANING", "CLEANING_INTERVAL"):
        monkeypatch.setattr(agent_module, name, 0.01)
    async with Router.start() as router, person(tmp_path / "alice.db", router.address) as alice:
        connection_id, _ = await alice.agent.create_invitation(pq=False)

        def long_ago(tx: Tx) -> None:
            tx.now = 0
            seen_before(tx, connection_id, KIND, DIGEST)

        async def is_forgotten() -> bool:
            return not await alice.agent._transact(lambda tx: is_seen(tx, connection_id, KIND, DIGEST))

        for _ in range(2):
            await alice.agent._transact(long_ago)
            await until(is_forgotten)
