"""Moves all data between SQLite and PostgreSQL, and makes the configuration name the new place.

Nobody sees a store before it is complete: it is made beside its place. The old one is put aside afterwards,
so that no server can go on with it by mistake.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

import asyncpg

from ntf_server import setup
from ntf_server.asking import ProgressLines
from ntf_server.clock import utc_now
from ntf_server.config import CONFIG_FILE, Config, with_value
from ntf_server.data_folder import (
    MADE_MARK,
    FolderInUse,
    expect_database,
    expect_log,
    held,
    remember_database,
)
from ntf_server.secret_files import write_secret
from ntf_server.stores import postgres_url
from store import tables_postgres
from store.interface import StoreError
from store.moving import CopyDiffers, Follower, compare, copy, copy_parents, parents_copied
from store.sqlite_engine import DatabaseFile
from store.sqlite_errors import store_errors
from store.tables import SOURCE_NOTE, TABLES, ReadTables, Sum
from store.tables_postgres import NewPostgresTables, PostgresTables, connected, holds_data
from store.tables_sqlite import ChangeLog, NewSqliteTables, SqliteTables

FEW_CHANGES = 2000
"A round that brought no more is fast: the server may be stopped for the next one."

MOST_ROUNDS = 20
"If changes never get fewer, the stop takes longer; but there is one."

WAIT = 0.2
"Seconds between two attempts to get the folder of a server that is being stopped."


async def to_postgres(config_dir: Path, config: Config, *, online: bool) -> int:
    path = setup.database_path(config)
    expect_database(config_dir, path)
    if not path.exists():
        raise StoreError(f"{path} does not exist: there is nothing to move")
    with ExitStack() as stack, store_errors(path):
        is_held = _try_to_hold(stack, path.parent, online=online)
        if not is_held:
            expect_log(path)
        async with connected(postgres_url(config.STORE)) as db:
            source, live = SqliteTables(path), DatabaseFile(path)
            stack.callback(source.close)
            source.check_schema()
            live.remember()
            log = ChangeLog(source)
            stack.callback(log.close)
            name = log.start()
            if await holds_data(db):
                if not (is_held and await tables_postgres.came_from(db) == name and log.size() == 0):
                    raise StoreError(_FULL)
                # Everything but the last steps of an earlier run was done.
            else:
                follower = Follower(source, log, await _begin(db, name))
                await _copy_in_use(source, follower)
                if not is_held:
                    await _wait_for_stop(stack, path.parent, follower)
                live.check()  # else the server has written last what nobody else can read
                await _end(source, follower)
        _switch(config_dir, "postgres")
        log.remove()
        log.close()
        source.close()
        setup.put_aside(path.parent, setup.DATABASE_FILES, utc_now())
        (config_dir / MADE_MARK).unlink(missing_ok=True)
    return 0


_FULL = (
    "the PostgreSQL database holds a store already: name another database in [STORE] url, or put that one"
    " aside (ALTER SCHEMA ntf RENAME TO …)"
)


def _try_to_hold(stack: ExitStack, folder: Path, *, online: bool) -> bool:
    try:
        stack.enter_context(held(folder))
    except FolderInUse as error:
        if not online:
            raise FolderInUse(f"{error}, or copy while it runs: --online") from None
        return False
    return True


async def _begin(db: asyncpg.Connection, name: str) -> NewPostgresTables:
    """What an earlier run with the same change log has made, or a new one."""
    new = NewPostgresTables(db)
    await new.use()
    if await new.note(SOURCE_NOTE) != name or not await parents_copied(new):
        await tables_postgres.remove_new(db)
        await new.use()
        await new.put_note(SOURCE_NOTE, name)
    return new


async def _copy_in_use(source: SqliteTables, follower: Follower) -> None:
    new, progress = follower.new, ProgressLines()
    if not await parents_copied(new):
        with source.snapshot():
            await copy_parents(source, new, progress)
    await copy(source, new, progress)
    await new.prepare_use()
    await _catch_up_until_few(follower)
    _print_sums(await follower.catch_up_and_compare(progress))
    await _catch_up_until_few(follower)  # comparing takes its time


async def _catch_up_until_few(follower: Follower) -> None:
    for _ in range(MOST_ROUNDS):
        changed = await follower.catch_up()
        print(f"changed meanwhile: {changed} rows", flush=True)
        if changed <= FEW_CHANGES:
            return


async def _wait_for_stop(stack: ExitStack, folder: Path, follower: Follower) -> None:
    print("Everything is copied and compared. Stop the server now; this goes on by itself.", flush=True)
    while True:
        try:
            stack.enter_context(held(folder))
            return
        except FolderInUse:
            await follower.catch_up()
            await asyncio.sleep(WAIT)


async def _end(source: SqliteTables, follower: Follower) -> None:
    """The server is stopped: what changed last, in a hurry."""
    began = time.monotonic()
    changed = await follower.catch_up()
    await follower.compare_counts()
    await follower.new.set_marks(await source.marks())
    await follower.new.finish()
    print(f"the last {changed} changes took {time.monotonic() - began:.1f} s")


def _print_sums(sums: dict[str, Sum]) -> None:
    for name, total in sums.items():
        print(f"{name}: {total}, the same in both")


async def to_sqlite(config_dir: Path, config: Config) -> int:
    path = setup.database_path(config)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = utc_now()
    with store_errors(path), held(path.parent):
        async with connected(postgres_url(config.STORE)) as db:
            source = PostgresTables(db)
            await source.check_schema()
            await source.use()
            async with source.standing_still():
                if path.exists():
                    await _check_copied(source, path)
                else:
                    (await _copied_to_sqlite(source, path)).finish()
                _switch(config_dir, "sqlite")
                remember_database(config_dir)
                await tables_postgres.put_aside(db, f"{source.schema}_moved_{now:%Y%m%d_%H%M%S}")
    return 0


async def _check_copied(source: PostgresTables, path: Path) -> None:
    """An earlier run may have ended just before it switched."""
    with closing(SqliteTables(path)) as there:
        there.check_schema()
        try:
            await compare(source, there, ProgressLines())
        except CopyDiffers:
            raise StoreError(f"{path} exists: put it aside first") from None


async def _copied_to_sqlite(source: PostgresTables, path: Path) -> NewSqliteTables:
    """A copy begun by an earlier run may be of another time: then it differs, and is made anew."""
    while True:
        new, progress = NewSqliteTables(path), ProgressLines()
        is_continued = await parents_copied(new)
        try:
            if not is_continued:
                new.close()
                NewSqliteTables.remove(path)
                new = NewSqliteTables(path)
                await copy_parents(source, new, progress)
            await copy(source, new, progress)
            _print_sums(await compare(source, new, progress))
            await new.set_marks(await source.marks())
            await new.prepare_use()
            return new
        except CopyDiffers:
            new.close()
            NewSqliteTables.remove(path)
            if not is_continued:
                raise
            print("The database has changed since the copy was begun: copying it anew.")
        except BaseException:
            new.close()
            raise


def _switch(config_dir: Path, kind: str) -> None:
    file = config_dir / CONFIG_FILE
    write_secret(file, with_value(file.read_text("utf-8"), "STORE", "database", kind).encode())
    print(f"{file}: [STORE] database = {kind}. Start the server.")
    if "NTF_STORE_DATABASE" in os.environ:
        print(f"NTF_STORE_DATABASE in the environment counts more than the file: make it {kind}.")


async def look(config_dir: Path, config: Config) -> int:
    """What a move would do; nothing is changed."""
    path = setup.database_path(config)
    async with connected(postgres_url(config.STORE)) as db:
        if config.STORE.database == "sqlite":
            expect_database(config_dir, path)
            with store_errors(path), closing(SqliteTables(path)) as source:
                source.check_schema()
                await _print_counts(source)
            if await holds_data(db):
                raise StoreError(_FULL)
        else:
            tables = PostgresTables(db)
            await tables.check_schema()
            await tables.use()
            await _print_counts(tables)
            if path.exists():
                raise StoreError(f"{path} exists: put it aside first")
    return 0


async def _print_counts(source: ReadTables) -> None:
    for table in TABLES:
        print(f"{table.name}: {await source.count(table)} rows to move")


async def cancel(config: Config) -> int:
    path = setup.database_path(config)
    if found := NewSqliteTables.is_there(path):
        with held(path.parent):  # else a move or import is writing it
            NewSqliteTables.remove(path)
    if path.exists():
        with store_errors(path), closing(SqliteTables(path)) as source:
            if source.has_change_log():  # else nothing is opened to write: a server may be using it
                with closing(ChangeLog(source)) as log:
                    found = log.remove() or found
    if config.STORE.url or config.STORE.url_file:
        async with connected(postgres_url(config.STORE)) as db:
            found = await tables_postgres.remove_new(db) or found
    print("removed" if found else "nothing to remove")
    return 0
