"""Takes over what the deployed server has: looks at all of it, then makes a store of it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

from ntf_server import setup
from ntf_server.asking import ProgressLines
from ntf_server.clock import SystemClock, utc_now
from ntf_server.config import Config
from ntf_server.data_folder import remember_database
from ntf_server.secret_files import write_secret
from ntf_server.stores import postgres_url
from store.importing import ReferenceDatabase
from store.interface import StoreError
from store.reference import Moment
from store.sqlite_errors import store_errors
from store.tables import TABLES, NewTables
from store.tables_postgres import NewPostgresTables, connected, holds_data
from store.tables_sqlite import NewSqliteTables, SqliteTables
from transport.certificates import CA_KEY

REPORT = "import-report.txt"
_BEGAN = "began"

NewStore = tuple[NewTables, Callable[[], Awaitable[None]]]


async def import_all(args: argparse.Namespace, config: Config, url: str) -> int:
    now = int(SystemClock().now())
    async with connected(url) as source, source.transaction(isolation="repeatable_read", readonly=True):
        if args.dry_run:
            reference = ReferenceDatabase(source, args.schema, Moment(now))
            await _look(reference, config)
            return 0
        async with _new_store(args.config_dir, config) as (new, finish):
            began = int(await new.note(_BEGAN) or now)
            reference = ReferenceDatabase(source, args.schema, Moment(began))
            await _look(reference, config)
            if reference.findings.problems and not args.skip_unreadable:
                raise StoreError(
                    f"{len(reference.findings.problems)} rows cannot be read, see"
                    f" {setup.data_folder(config) / REPORT}; --skip-unreadable leaves them out"
                )
            await new.begin(reference.fingerprint())
            await new.put_note(_BEGAN, str(began))
            await reference.write(new, ProgressLines())
            await reference.compare(new)
            if args.identity is not None:
                _take_identity(args.identity, args.config_dir)
            await finish()
    print(f"Done: all counts and hashes agree. Server address: {setup.address(args.config_dir, config)}")
    return 0


@asynccontextmanager
async def _new_store(config_dir: Path, config: Config) -> AsyncIterator[NewStore]:
    """A store that is being made, and what puts it in its place, which must be empty."""
    if config.STORE.database == "postgres":
        async with connected(postgres_url(config.STORE)) as db:
            if await holds_data(db):
                raise StoreError("the database of [STORE] url holds a store already")
            new = NewPostgresTables(db)
            await new.use()
            yield new, new.finish
        return
    path = setup.database_path(config)
    with store_errors(path):
        if path.exists() and not await _is_empty(path):
            raise StoreError(f"{path} holds a store already")
        with closing(NewSqliteTables(path)) as file:
            yield file, partial(_finish_file, file, config_dir, path)


async def _is_empty(path: Path) -> bool:
    with closing(SqliteTables(path)) as tables:
        tables.check_schema()
        return not any([await tables.count(table) for table in TABLES])


async def _finish_file(new: NewSqliteTables, config_dir: Path, path: Path) -> None:
    setup.put_aside(path.parent, setup.DATABASE_FILES, utc_now())
    new.finish()
    remember_database(config_dir)


async def _look(reference: ReferenceDatabase, config: Config) -> None:
    await reference.use()
    if others := await reference.other_sessions():
        print(f"Others use the deployed server's database ({others} sessions): is that server stopped?")
    await reference.look(ProgressLines())
    findings = reference.findings
    for name, total in findings.rows.items():
        print(f"{name}: {total} rows")
    for router, count, digest in reference.associations():
        print(f"{router.server.host_port}: {count} queues by service, hash {digest.hex()}")
    for line in findings.notes:
        print(line)
    if not findings.problems:
        print("Every row can be read.")
        return
    for reason, count in Counter(line.partition(": ")[2] for line in findings.problems).items():
        print(f"unreadable: {count} rows: {reason}")
    report = setup.data_folder(config) / REPORT
    write_secret(report, "".join(f"{line}\n" for line in findings.problems).encode())
    print(f"unreadable rows, one by one: {report}")


def _take_identity(source: Path, config_dir: Path) -> None:
    """What was in the place of these files is put aside."""
    files = {name: (source / name).read_bytes() for name in setup.IDENTITY_FILES if (source / name).exists()}
    if all(
        (config_dir / name).exists() and (config_dir / name).read_bytes() == files[name] for name in files
    ):
        return
    aside = setup.put_aside(config_dir, setup.IDENTITY_FILES, utc_now())
    if aside is not None:
        print(f"The identity that was here: {aside}")
    for name, content in files.items():
        write_secret(config_dir / name, content)
    if CA_KEY not in files:
        print(f"{source} has no {CA_KEY}: bring it for `ntf-server cert`, when the certificate expires")
