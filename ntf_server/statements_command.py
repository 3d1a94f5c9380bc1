"""`ntf-server statements records`: which statements led to which pushes, and what became of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from pathlib import Path
from typing import NoReturn

from ntf_server.clock import as_datetime
from ntf_server.config import Config, ConfigError, configured
from ntf_server.data_folder import expect_database
from ntf_server.setup import database_path
from ntf_server.stores import make_store
from store.statement_records import PushRecord

KEY_DIGITS = 64
LIMIT = 1000
COLUMNS = ("accepted_at", "sent_at", "outcome", "subscription_id", "sender", "topic", "statement_hash")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Questions about the statement gateway. They only read, also beside a running server."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser)
    records = commands.add_parser("records", help="list statements that met a rule, and their outcomes")
    whose, option = records.add_mutually_exclusive_group(required=True), records.add_argument
    whose.add_argument("--subscription", type=_subscription, metavar="ID", help="of this subscription (UUID)")
    whose.add_argument("--sender", type=_sender, metavar="KEY", help="from this sender (public key in hex)")
    option("--limit", type=_limit, default=LIMIT, help="list at most this many, the newest (%(default)s)")
    about = "folder of the configuration and the identity"
    option("--config-dir", type=Path, default=argparse.SUPPRESS, help=about)
    option("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    found = asyncio.run(_records(args, configured(args.config_dir)))
    if args.json:
        for record in found:
            print(json.dumps(_shown(record)))
        return 0
    for record in found:
        print("  ".join(value or "-" for value in _shown(record).values()))
    if not found:
        print("no records: no statement met a rule, or the records have expired")
    return 0


async def _records(args: argparse.Namespace, config: Config) -> list[PushRecord]:
    if config.STORE.database == "sqlite" and not database_path(config).exists():
        expect_database(args.config_dir, database_path(config))
        raise ConfigError(f"{database_path(config)} does not exist yet: start the server first")
    store = make_store(args.config_dir, config, read_only=True)
    try:
        await store.open()
        if args.subscription is not None:
            return await store.push_records(args.subscription, args.limit)
        return await store.push_records_of_sender(args.sender, args.limit)
    finally:
        await store.close()


def _shown(record: PushRecord) -> dict[str, str | None]:
    sent_at = None if record.sent_at is None else _time(record.sent_at)
    values = (
        _time(record.accepted_at),
        sent_at,
        record.outcome.value,
        str(uuid.UUID(bytes=record.subscription_id)),
        record.sender.hex(),
        record.topic.hex(),
        record.statement_hash.hex(),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _time(seconds: int) -> str:
    return f"{as_datetime(seconds):%Y-%m-%dT%H:%M:%SZ}"


def _subscription(text: str) -> bytes:
    try:
        return uuid.UUID(text).bytes
    except ValueError:
        _wrong("the id of a subscription is a UUID, as in the answer to its registration")


def _sender(text: str) -> bytes:
    digits = text.removeprefix("0x")
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(digits) != KEY_DIGITS or not key:
        _wrong(f"the public key of a sender has {KEY_DIGITS} hex digits")
    return key


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        _wrong("the limit is a number of records, 1 or more")
    return int(text)


def _wrong(what: str) -> NoReturn:
    raise argparse.ArgumentTypeError(what)
