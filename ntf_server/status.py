"""`ntf-server status`: what an operator wants to know before looking at metrics."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from cryptography import x509

from ntf_server import setup
from ntf_server.clock import SystemClock
from ntf_server.config import LOCALHOST, Config
from ntf_server.data_folder import expect_database
from ntf_server.statements.summary import summary
from ntf_server.stores import make_store
from protocol.addresses import NtfServer
from protocol.encoding import NO_ENTITY
from protocol.ntf_commands import Ping
from smp_client.dialer import Dialer
from smp_client.errors import ClientError
from smp_client.requests import SessionConfig
from smp_client.session import connect_ntf
from store.interface import ReportStore, StoreError
from store.leases import PUSH_PARTS, TOPIC_PARTS
from transport.certificates import CA_KEY, load_server_files

PROBE = SessionConfig(connect=5.0, answer=5.0)


async def print_status(config_dir: Path, config: Config) -> int:
    """0 if the server answers, 1 otherwise."""
    address = setup.address(config_dir, config)
    leaf = x509.load_der_x509_certificate(load_server_files(config_dir).chain[0])
    print(f"address      {address}")
    print(f"certificate  valid until {leaf.not_valid_after_utc:%Y-%m-%d}")
    if (config_dir / CA_KEY).exists():
        print(f"             {CA_KEY} is here: keep it offline")
    await _print_store(config_dir, config)
    problem = await probe(address, config)
    print(f"server       {'answers' if problem is None else f'does not answer: {problem}'}")
    return 0 if problem is None else 1


async def _print_store(config_dir: Path, config: Config) -> None:
    file = setup.database_path(config) if config.STORE.database == "sqlite" else None
    try:
        if file is not None:
            expect_database(config_dir, file)
            if not file.exists():
                print(f"store        {file} does not exist yet")
                return
        store = make_store(config_dir, config, read_only=True)
        try:
            await store.open()
            counts = await store.counts()
            daemons = await store.ownership.daemons()
            gateway = await _gateway(store, config)
        finally:
            await store.close()
    except StoreError as error:
        print(f"store        {error}")
        return
    print(f"store        {file or 'PostgreSQL'}")
    print(f"tokens       {counts.tokens}, {counts.active_tokens} active")
    print(
        f"queues       {counts.subscriptions} on {counts.servers} routers, "
        f"{counts.active_subscriptions} active, {counts.associated_subscriptions} by service"
    )
    print(f"unsent       {counts.unsent_notifications}")
    for label, line in zip_longest(("statements",), gateway, fillvalue="") if gateway else ():
        print(f"{label:<13}{line}")
    for one in daemons:
        chores = ", housekeeping" if one.chores else ""
        statements = ", pushes of statements" if one.statements else ""
        topics = f", {one.topics}/{TOPIC_PARTS} of the statement topics" if one.topics else ""
        print(
            f"daemon       {one.name}: {one.routers} routers, {one.pushes}/{PUSH_PARTS} of the pushes"
            f"{topics}{statements}{chores}"
        )


async def _gateway(store: ReportStore, config: Config) -> list[str]:
    return await summary(store, config.STATEMENTS, SystemClock().now()) if config.STATEMENTS.enabled else []


async def probe(address: NtfServer, config: Config) -> str | None:
    """Connect as a client would and shake hands; what went wrong, or None."""
    here = NtfServer((config.TRANSPORT.listen or LOCALHOST,), str(config.TRANSPORT.port), address.key_hash)
    try:
        async with await connect_ntf(here, Dialer(), config=PROBE) as session:
            await session.request(NO_ENTITY, Ping())
    except ClientError as error:
        return str(error) or type(error).__name__
    return None
