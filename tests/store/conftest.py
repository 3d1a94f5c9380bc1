from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from store.interface import NtfStore
from store.policy import DEFAULT_CAPS, RowCaps
from store.sqlite import SqliteStore


class StoreFactory(Protocol):
    """Makes another, not yet opened store of the same data."""

    def __call__(self, *, caps: RowCaps = DEFAULT_CAPS) -> NtfStore: ...


@pytest.fixture(params=["sqlite"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFactory:
    assert request.param == "sqlite"

    def make(*, caps: RowCaps = DEFAULT_CAPS) -> NtfStore:
        return SqliteStore(tmp_path / "ntf.db", caps=caps)

    return make


@pytest.fixture
async def store(new_store: StoreFactory) -> AsyncIterator[NtfStore]:
    opened = new_store()
    await opened.open()
    yield opened
    await opened.close()
