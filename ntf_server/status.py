"""`ntf-server status`: what an operator wants to know before looking at metrics."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography import x509

from ntf_server import setup
from ntf_server.clock import SystemClock, as_datetime
from ntf_server.config import Config
from protocol.addresses import NtfServer
from protocol.connection import Connection, HandshakeDone
from protocol.errors import HandshakeError
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, NtfCommand, NtfResponse
from protocol.ntf_handshake import NtfClientHandshake
from protocol.versions import NTF_ALPN
from store.interface import StoreError
from store.sqlite import SqliteStore
from transport.certificates import load_server_files
from transport.errors import TransportError
from transport.streams import connect
from transport.tls import client_context

PROBE_TIMEOUT = 5.0


async def print_status(config_dir: Path, config: Config) -> int:
    """0 if the server answers, 1 otherwise."""
    address = setup.address(config_dir, config)
    leaf = x509.load_der_x509_certificate(load_server_files(config_dir).chain[0])
    print(f"address      {address}")
    print(f"certificate  valid until {leaf.not_valid_after_utc:%Y-%m-%d}")
    if (config_dir / "ca.key").exists():
        print("             ca.key is here: keep it offline")
    await _print_store(config)
    problem = await _probe(address, config)
    print(f"server       {'answers' if problem is None else f'does not answer: {problem}'}")
    return 0 if problem is None else 1


async def _print_store(config: Config) -> None:
    path = setup.database_path(config)
    if not path.exists():
        print(f"store        {path} does not exist yet")
        return
    store = SqliteStore(path, auto_migrate=False)
    try:
        await store.open()
        counts = await store.counts()
    except StoreError as error:
        print(f"store        {error}")
        return
    finally:
        await store.close()
    size = os.path.getsize(path) / 1e6
    print(f"store        {path}, {size:.1f} MB")
    print(f"tokens       {counts.tokens}, {counts.active_tokens} active")
    print(
        f"queues       {counts.subscriptions} on {counts.servers} routers, "
        f"{counts.active_subscriptions} active, {counts.associated_subscriptions} by service"
    )
    print(f"unsent       {counts.unsent_notifications}")


async def _probe(address: NtfServer, config: Config) -> str | None:
    """Connect as a client would and shake hands; what went wrong, or None."""
    clock = SystemClock()
    host = config.TRANSPORT.listen or "127.0.0.1"
    try:
        stream = await connect(
            host,
            config.TRANSPORT.port,
            context=client_context([NTF_ALPN]),
            identity=address.key_hash,
            now=lambda: as_datetime(clock.now()),
            timeout=PROBE_TIMEOUT,
        )
    except (OSError, TransportError) as error:
        return str(error) or type(error).__name__
    handshake = NtfClientHandshake(stream.session_id, address.key_hash, stream.peer_chain[0])
    connection: Connection[NtfResponse, NtfCommand] = Connection(
        handshake, NTF_RESPONSES, NTF_COMMANDS, checks_credentials=False
    )
    try:
        events = connection.receive_data(await stream.receive())
    except (TransportError, HandshakeError) as error:
        return str(error)
    finally:
        stream.close()
    return None if events and isinstance(events[0], HandshakeDone) else "the handshake failed"
