"""`ntf-server migrate`: to another version of the schema, or to the other kind of database."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from ntf_server import setup
from ntf_server.asking import confirmed
from ntf_server.config import Config, ConfigError, configured
from ntf_server.data_folder import MADE_MARK, expect_database, held
from ntf_server.stores import need_driver, postgres_url
from store import migrate
from store.schema_steps import Migration

KINDS = ("sqlite", "postgres")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Changes the schema of the store that is configured, or moves all data to the other kind of database:"
        " SQLite in [STORE] data_dir, PostgreSQL at [STORE] url. A move that was interrupted goes on when it"
        " is run again."
    )
    option = parser.add_argument
    about = "schema version (the newest if not given), or the kind of database to move to"
    option("--to", type=_target, metavar="VERSION|sqlite|postgres", help=about)
    option("--dry-run", action="store_true", help="only say what would be done")
    option("--yes", action="store_true", help="do not ask before a downgrade")
    about = "with --to postgres: copy while the server runs; it is stopped only for the end"
    option("--online", action="store_true", help=about)
    option("--cancel", action="store_true", help="remove what a move that was interrupted has left")


def _target(text: str) -> int | str:
    if text in KINDS:
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a schema version nor sqlite or postgres")
    return int(text)


def run(args: argparse.Namespace) -> int:
    config = configured(args.config_dir)
    if args.online and args.to != "postgres":
        raise ConfigError("--online goes with --to postgres only")
    if args.cancel or args.to in KINDS:
        return _move(args, config)
    if config.STORE.database == "sqlite":
        return _migrate_sqlite(args, config)
    return asyncio.run(_migrate_postgres(args, config))


def _migrate_sqlite(args: argparse.Namespace, config: Config) -> int:
    path = setup.database_path(config)
    expect_database(args.config_dir, path)
    with held(path.parent):
        refused = _refused(args, migrate.migrate(path, to=args.to, dry_run=True), str(path))
        if refused is not None:
            return refused
        migrate.migrate(path, to=args.to)
        setup.give_to_owner(path.parent, setup.DATA_FILES)
        if args.to == 0:
            (args.config_dir / MADE_MARK).unlink(missing_ok=True)
    print(f"{path}: done")
    return 0


async def _migrate_postgres(args: argparse.Namespace, config: Config) -> int:
    need_driver()
    from store import postgres_migrate
    from store.tables_postgres import check_no_daemon, connected

    async with connected(postgres_url(config.STORE)) as db:
        steps = await postgres_migrate.migrate(db, to=args.to, dry_run=True)
        refused = _refused(args, steps, "PostgreSQL")
        if refused is not None:
            return refused
        await check_no_daemon(db)
        await postgres_migrate.migrate(db, to=args.to)
        if args.to == 0:
            (args.config_dir / MADE_MARK).unlink(missing_ok=True)
    print("PostgreSQL: done")
    return 0


def _refused(args: argparse.Namespace, steps: Sequence[Migration], place: str) -> int | None:
    """Tells the steps; an exit code if they are not to be done."""
    if not steps:
        print(f"{place}: nothing to do")
        return 0
    for step in steps:
        print(step)
    if args.dry_run:
        return 0
    goes_down = args.to is not None and any(step.is_down for step in steps)
    if goes_down and not (args.yes or confirmed("A downgrade may lose data. Go on?")):
        return 1
    return None


def _move(args: argparse.Namespace, config: Config) -> int:
    need_driver()
    from ntf_server import moving

    if args.cancel:
        return asyncio.run(moving.cancel(config))
    if config.STORE.database == args.to:
        raise ConfigError(f"[STORE] database is {args.to} already")
    if args.dry_run:
        return asyncio.run(moving.look(args.config_dir, config))
    try:
        if args.to == "postgres":
            return asyncio.run(moving.to_postgres(args.config_dir, config, online=args.online))
        return asyncio.run(moving.to_sqlite(args.config_dir, config))
    except KeyboardInterrupt:
        print("Interrupted. Run it again to go on, or with --cancel to remove what there is.")
        raise
