"""A connection that stays open is noticed on every version of Python."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing

import pytest

from store.sqlite_engine import connected
from tests.open_databases import open_connections


def test_an_open_connection_is_noticed() -> None:
    with closing(sqlite3.connect(":memory:")):
        (place,) = open_connections()
        assert __file__ in place
    assert open_connections() == []


async def test_a_caller_that_is_cancelled_leaves_no_connection_open() -> None:
    connecting, cancelled, made = threading.Event(), threading.Event(), threading.Event()

    def connect() -> sqlite3.Connection:
        connecting.set()
        cancelled.wait()
        connection = sqlite3.connect(":memory:")
        made.set()
        return connection

    opening = asyncio.create_task(connected(connect))
    await asyncio.to_thread(connecting.wait)
    opening.cancel()
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(cancelled.set))
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.to_thread(made.wait)
    assert open_connections() == []
