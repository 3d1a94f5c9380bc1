"""`ntf-server import`: everything of the deployed server, from its PostgreSQL and its folder of keys."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from ntf_server import setup
from ntf_server.clock import utc_now
from ntf_server.config import ConfigError, configured
from ntf_server.data_folder import held
from ntf_server.stores import check_postgres_url, need_driver, read_url
from transport.certificates import load_server_files

SCHEMA = "ntf_server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fills the store that is configured, which must be empty, with all tokens, subscriptions, service"
        " credentials and last notifications of the deployed server's PostgreSQL. That database is only read."
        " An import that was interrupted goes on when it is run again."
    )
    where, option = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    where.add_argument(
        "--url-file", type=Path, help="file with the address of the deployed server's database"
    )
    about = "the address itself: postgresql://…; others on this machine can see it, so no password"
    where.add_argument("--url", help=about)
    option("--schema", default=SCHEMA, help="of its tables (%(default)s)")
    about = "its folder of ca.crt, ca.key, server.crt, server.key and fingerprint, to be taken along"
    option("--identity", type=Path, metavar="FOLDER", help=about)
    option("--dry-run", action="store_true", help="only look, and report")
    option("--skip-unreadable", action="store_true", help="leave out the rows that the report names")


def run(args: argparse.Namespace) -> int:
    config = configured(args.config_dir)
    need_driver()
    from ntf_server.importing import import_all

    url = check_postgres_url(args.url or read_url(args.url_file, "--url-file"), "the address")
    if not re.fullmatch(r"\w+", args.schema):
        raise ConfigError(f"--schema: {args.schema!r} is no name of a schema")
    if args.identity is not None:
        load_server_files(args.identity, utc_now())
    folder = setup.data_folder(config)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with held(folder):
            return asyncio.run(import_all(args, config, url))
    except KeyboardInterrupt:
        print("Interrupted. Run it again to go on, or `ntf-server migrate --cancel` to remove what there is.")
        raise
