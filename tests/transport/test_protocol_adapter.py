"""A library's protocol on a TlsStream: what asyncio promises it, holds."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from ntf_demo.fake_push.certificates import make_certificates
from tests.transport.key_updates import UpdatingClient
from tests.waiting import until
from transport.budget import CpuBudget, Slice
from transport.errors import CertificateFileError
from transport.protocol_adapter import run_protocol
from transport.server import ServerConfig, serve
from transport.streams import TlsStream
from transport.tls import web_context

LARGE = 8 * 1024 * 1024
"Bytes: more than the system buffers."


class Recorder(asyncio.Protocol):
    """What happens to it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.received = b""
        self.events: list[str] = []
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.received += data

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.events.append("lost")


class Serving:
    def __init__(self, port: int, ca_file: Path, made: list[Recorder], streams: list[TlsStream]) -> None:
        self.port = port
        self.made = made
        self.streams = streams
        self.context = ssl.create_default_context(cafile=ca_file)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Recorder]:
        count = len(self.made)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context, limit=1024)
        await until(lambda: len(self.made) > count)
        return reader, writer, self.made[-1]


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    ca_file, server_file = make_certificates(tmp_path / "tls")
    made: list[Recorder] = []
    streams: list[TlsStream] = []

    async def handle(stream: TlsStream) -> None:
        streams.append(stream)
        made.append(Recorder())
        await run_protocol(stream, made[-1], CpuBudget(), "source")

    context = web_context(server_file, server_file)
    server = await serve(handle, "127.0.0.1", 0, context=context, config=ServerConfig(read_limit=4096))
    yield Serving(server.port, ca_file, made, streams)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_of_tls(serving: Serving, version: ssl.TLSVersion) -> None:
    serving.context.minimum_version = serving.context.maximum_version = version
    serving.context.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer, protocol = await serving.connect()
    agreed = writer.get_extra_info("ssl_object")
    assert agreed.version() == version.name.replace("_", ".")
    assert agreed.selected_alpn_protocol() == "http/1.1"
    writer.write(b"question" * 10_000)
    await until(lambda: len(protocol.received) == 80_000)
    protocol.transport.write(b"answer" * 10_000)
    assert await reader.readexactly(60_000) == b"answer" * 10_000
    assert protocol.transport.get_extra_info("peername")[0] == "127.0.0.1"
    assert protocol.transport.get_extra_info("sockname")[0] == "127.0.0.1"
    writer.close()
    await until(lambda: protocol.events == ["made", "lost"])
    assert protocol.error is None


async def test_older_versions_of_tls_are_refused(serving: Serving) -> None:
    serving.context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="deprecated"):
        serving.context.maximum_version = ssl.TLSVersion.TLSv1_1
    serving.context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", serving.port, ssl=serving.context)


async def test_a_protocol_hears_of_a_peer_that_does_not_read(serving: Serving) -> None:
    reader, writer, protocol = await serving.connect()
    protocol.transport.write(bytes(LARGE))
    assert protocol.events == ["made", "pause"]
    assert protocol.transport.get_write_buffer_size() > 0
    protocol.transport.write(b"more")
    assert protocol.events == ["made", "pause"]
    await reader.readexactly(LARGE + 4)
    await until(lambda: protocol.events == ["made", "pause", "resume"])
    writer.close()


async def test_a_peer_that_does_not_read_and_goes_leaves_nothing_behind(serving: Serving) -> None:
    _, writer, protocol = await serving.connect()
    protocol.transport.write(bytes(LARGE))
    writer.transport.abort()
    await until(lambda: protocol.events[-1] == "lost")
    protocol.transport.write(b"to nobody")
    assert protocol.transport.is_closing()


async def test_a_protocol_that_pauses_receives_no_more(serving: Serving) -> None:
    _, writer, protocol = await serving.connect()
    protocol.transport.pause_reading()
    writer.write(bytes(LARGE))
    await until(lambda: serving.streams[-1]._reading_paused)
    assert protocol.received == b""
    protocol.transport.resume_reading()
    await until(lambda: len(protocol.received) == LARGE)
    writer.close()


async def test_a_protocol_that_pauses_hears_of_the_end(serving: Serving) -> None:
    _, writer, protocol = await serving.connect()
    writer.write(b"hello")
    await until(lambda: protocol.received == b"hello")
    protocol.transport.pause_reading()
    writer.close()
    await until(lambda: protocol.events == ["made", "lost"])


async def test_nothing_is_handed_over_after_the_end(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what was received before and waited for its turn."""
    _, writer, protocol = await serving.connect()
    waiting, turn, take = asyncio.Event(), asyncio.Event(), CpuBudget.take

    async def take_later(self: CpuBudget, source: str) -> Slice:
        waiting.set()
        await turn.wait()
        return await take(self, source)

    monkeypatch.setattr(CpuBudget, "take", take_later)
    writer.write(b"too late")
    await waiting.wait()
    protocol.transport.close()
    turn.set()
    await until(lambda: protocol.events[-1] == "lost")
    assert protocol.received == b""
    writer.close()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_a_protocol_ends_its_connection(serving: Serving, end: str, paused: bool) -> None:
    reader, writer, protocol = await serving.connect()
    if paused:
        protocol.transport.pause_reading()
    protocol.transport.write(b"bye")
    getattr(protocol.transport, end)()
    await until(lambda: protocol.events[-1] == "lost")
    if end == "close":
        assert await reader.read() == b"bye"
    writer.close()


async def test_key_updates_without_end_close_the_connection(serving: Serving) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    client = UpdatingClient()
    writer.write(client.shake_hands())
    while not client.is_connected:
        writer.write(client.shake_hands(await reader.read(1 << 16)))
    writer.write(b"".join(client.update() for _ in range(100)))
    await until(lambda: bool(serving.made) and serving.made[-1].events[-1] == "lost")
    writer.close()


def test_files_that_are_no_certificate_with_its_key(tmp_path: Path) -> None:
    _, server_file = make_certificates(tmp_path / "tls")
    _, other_file = make_certificates(tmp_path / "other")
    text = server_file.read_bytes()
    key = serialization.load_pem_private_key(text, None)
    encrypted, empty = tmp_path / "encrypted", tmp_path / "empty"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    empty.touch()
    for key_file in (other_file, encrypted, empty, tmp_path / "missing"):
        with pytest.raises(CertificateFileError, match="no certificate with its key"):
            web_context(server_file, key_file)
    with pytest.raises(CertificateFileError):
        web_context(empty, server_file)
