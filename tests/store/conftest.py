from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from store.interface import NtfStore
from store.policy import DEFAULT_CAPS, RowCaps
from store.postgres import PostgresStore
from store.sqlite import SqliteStore
from tests.postgres import PostgresCluster


class StoreFactory(Protocol):
    """Makes another, not yet opened store of the same data."""

    def __call__(self, *, caps: RowCaps = DEFAULT_CAPS) -> NtfStore: ...


@pytest.fixture(params=["sqlite", "postgres"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFactory:
    if request.param == "sqlite":
        return lambda *, caps=DEFAULT_CAPS: SqliteStore(tmp_path / "ntf.db", caps=caps)
    cluster: PostgresCluster = request.getfixturevalue("postgres")
    url = cluster.new_database()
    return lambda *, caps=DEFAULT_CAPS: PostgresStore(url, caps=caps)


@pytest.fixture
async def store(new_store: StoreFactory) -> AsyncIterator[NtfStore]:
    opened = new_store()
    await opened.open()
    yield opened
    await opened.close()
