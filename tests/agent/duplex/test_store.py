"""The agent's database when its files are taken away."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.duplex.secrets import Secrets
from agent.duplex.store import DuplexStore
from store.interface import StoreVanished


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
async def test_nothing_is_written_to_files_that_were_taken_away(tmp_path: Path, end: str) -> None:
    path = tmp_path / "phone.db"
    async with DuplexStore.open(path, Secrets(), lambda: 0.0) as store:
        await store.run(lambda tx: None)
        path.with_name(path.name + end).unlink()
        with pytest.raises(StoreVanished):
            await store.run(lambda tx: None)
