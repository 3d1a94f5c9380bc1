"""Snapshots of a PostgreSQL store."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import asyncpg

from analytics.errors import AnalyticsError
from analytics.snapshot import PAGE, Ask
from store.interface import StoreError
from store.postgres_errors import CAUGHT, store_error
from store.tables_postgres import PostgresTables, connected

T = TypeVar("T")


@contextmanager
def postgres_store(url: str) -> Iterator[Ask]:
    """A store that several daemons may share, read in one transaction beside them."""
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        try:
            db = told(runner, begin(stack, url))

            def ask(query: str) -> Iterator[Sequence[Any]]:
                cursor = told(runner, open_cursor(db, query))
                while page := told(runner, cursor.fetch(PAGE)):
                    yield from map(tuple, page)

            yield ask
        finally:
            runner.run(stack.aclose())


def told(runner: asyncio.Runner, action: Coroutine[Any, Any, T]) -> T:
    """What came of it; errors of the database in words for an operator."""
    try:
        return runner.run(action)
    except StoreError as error:
        raise AnalyticsError(str(error)) from error
    except CAUGHT as error:
        raise AnalyticsError(str(store_error(error))) from error


async def begin(stack: AsyncExitStack, url: str) -> asyncpg.Connection:
    """A connection in a transaction."""
    db = await stack.enter_async_context(connected(url))
    tables = PostgresTables(db)
    await tables.use()
    await tables.check_schema()
    await db.execute("SET statement_timeout = 0")  # a page of a large store may take long
    await stack.enter_async_context(db.transaction(isolation="repeatable_read", readonly=True))
    return db


async def open_cursor(db: asyncpg.Connection, query: str) -> asyncpg.cursor.Cursor:
    """A cursor of the current transaction."""
    return await db.cursor(query)
