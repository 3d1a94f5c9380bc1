from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from store.interface import NtfStore
from store.sqlite import SqliteStore

StoreFactory = Callable[[], NtfStore]
"Another, not yet opened store of the same data."


@pytest.fixture(params=["sqlite"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFactory:
    assert request.param == "sqlite"
    return lambda: SqliteStore(tmp_path / "ntf.db")


@pytest.fixture
async def store(new_store: StoreFactory) -> AsyncIterator[NtfStore]:
    opened = new_store()
    await opened.open()
    yield opened
    await opened.close()
