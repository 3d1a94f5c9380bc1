"""Certificate chains of any length, sound or broken, and a server that shows them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from transport.certificates import Credentials, KeyAlgorithm, PrivateKey
from transport.server import Server, ServerConfig, serve
from transport.streams import TlsStream, connect
from transport.tls import client_context, server_context

NOW = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)
ALPN = [b"smp/1"]


def clock() -> datetime:
    """The time of all tests."""
    return NOW


def make_certificate(
    name: str,
    key: PrivateKey,
    issuer: str,
    issuer_key: PrivateKey,
    start: datetime = NOW - timedelta(days=1),
    end: datetime = NOW + timedelta(days=1),
) -> bytes:
    """A bare certificate (DER) without extensions."""
    builder = x509.CertificateBuilder(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        key.public_key(),
        x509.random_serial_number(),
        start,
        end,
    )
    return builder.sign(issuer_key, None).public_bytes(Encoding.DER)


def make_chain(
    length: int,
    algorithm: KeyAlgorithm = KeyAlgorithm.ED25519,
    *,
    forged: int | None = None,
    **dates: datetime,
) -> Credentials:
    """A chain; certificate number `forged` is signed by a stranger, `dates` are those of the last one."""
    keys = [algorithm.generate() for _ in range(length)]
    chain = []
    for index, key in enumerate(keys):
        issuer = min(index + 1, length - 1)
        signer = algorithm.generate() if index == forged else keys[issuer]
        limits: dict[str, Any] = dates if index == length - 1 else {}
        chain.append(make_certificate(f"number {index}", key, f"number {issuer}", signer, **limits))
    return Credentials(tuple(chain), keys[0])


async def echo(stream: TlsStream) -> None:
    """Send everything back."""
    while data := await stream.receive():
        stream.write(data)
        await stream.drain()


@asynccontextmanager
async def running(
    credentials: Credentials,
    handler: Callable[[TlsStream], Awaitable[None]] = echo,
    *,
    ask_client_certificate: bool = False,
    alpn: list[bytes] = ALPN,
    **options: Any,
) -> AsyncIterator[Server]:
    """A server on a free port of the loopback interface."""
    context = server_context(credentials, alpn, ask_client_certificate=ask_client_certificate)
    server = await serve(handler, "127.0.0.1", 0, context=context, config=ServerConfig(**options))
    try:
        yield server
    finally:
        server.close()
        await server.wait_closed(timeout=5)


async def reach(
    server: Server,
    identity: bytes | None,
    *,
    alpn: list[bytes] = ALPN,
    service: Credentials | None = None,
    sock: socket.socket | None = None,
) -> TlsStream:
    """A client's stream to the server."""
    context = client_context(alpn, service)
    return await connect(
        "127.0.0.1", server.port, context=context, identity=identity, now=clock, sock=sock, timeout=10
    )


async def receive_exactly(stream: TlsStream, size: int) -> bytes:
    """The next `size` bytes, and no others."""
    parts = bytearray()
    while len(parts) < size:
        data = await stream.receive()
        assert data, "the peer closed early"
        parts += data
    assert len(parts) == size
    return bytes(parts)
