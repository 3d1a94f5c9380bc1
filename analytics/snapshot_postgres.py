"""Snapshots of a PostgreSQL store."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import asyncpg

from analytics.snapshot import PAGE, Rows, SnapshotError, queries, with_names
from store.interface import StoreError
from store.postgres_errors import CAUGHT, store_error
from store.tables_postgres import PostgresTables, connected


class PostgresSource:
    """A store that several daemons may share, read in one transaction beside them."""

    QUERIES = queries(provider="convert_from(substr(device_token, 1, 2), 'UTF8')")

    def __init__(self, url: str) -> None:
        self._url = url

    def tables(self) -> Iterator[tuple[str, Rows]]:
        """See `SnapshotSource.tables`."""
        stack = AsyncExitStack()
        with asyncio.Runner() as runner:
            try:
                with explained():
                    db = runner.run(self._begin(stack))
                for name in self.QUERIES:
                    yield name, self._rows(runner, db, name)
            finally:
                runner.run(stack.aclose())

    async def _begin(self, stack: AsyncExitStack) -> asyncpg.Connection:
        db = await stack.enter_async_context(connected(self._url))
        tables = PostgresTables(db)
        await tables.use()
        await tables.check_schema()
        await db.execute("SET statement_timeout = 0")  # a page of a large store may take long
        await stack.enter_async_context(db.transaction(isolation="repeatable_read", readonly=True))
        return db

    def _rows(self, runner: asyncio.Runner, db: asyncpg.Connection, name: str) -> Rows:
        with explained():
            cursor = runner.run(open_cursor(db, self.QUERIES[name]))
            while page := runner.run(cursor.fetch(PAGE)):
                for row in page:
                    yield with_names(name, tuple(row))


async def open_cursor(db: asyncpg.Connection, query: str) -> asyncpg.cursor.Cursor:
    """A cursor of the current transaction."""
    return await db.cursor(query)


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the database in words for an operator."""
    try:
        yield
    except StoreError as error:
        raise SnapshotError(str(error)) from error
    except CAUGHT as error:
        raise SnapshotError(str(store_error(error))) from error
