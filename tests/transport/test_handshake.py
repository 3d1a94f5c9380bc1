"""What is agreed in TLS, and which peers are refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import pytest
from cryptography import x509
from OpenSSL import SSL, crypto

from tests.transport.chains import ALPN, NOW, clock, make_chain, reach, running
from tests.waiting import until
from transport.certificates import Credentials, KeyAlgorithm, make_service
from transport.errors import ChainInvalid, ConnectionClosed, TlsFailed, TransportError
from transport.identity import check_chain
from transport.server import serve
from transport.streams import TlsStream, connect
from transport.tls import client_context, server_context

VERSION_3, VERSION_25 = b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x18"


class Sessions:
    """A handler that notes the streams it gets and waits for their end."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[TlsStream] = asyncio.Queue(100)

    async def __call__(self, stream: TlsStream) -> None:
        self.streams.put_nowait(stream)
        await stream.receive()

    async def next(self) -> TlsStream:
        """The server's side of the next connection."""
        return await asyncio.wait_for(self.streams.get(), 5)


@pytest.mark.parametrize("algorithm", list(KeyAlgorithm))
async def test_session_id_is_the_same_on_both_sides(algorithm: KeyAlgorithm) -> None:
    sessions = Sessions()
    async with running(make_chain(2, algorithm), sessions) as server:
        first, second = await reach(server, None), await reach(server, None)
        ids = {(await sessions.next()).session_id for _ in range(2)}
        assert ids == {first.session_id, second.session_id}
        assert [len(session_id) for session_id in ids] == [32, 32]
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [([b"smp/1"], b"smp/1"), ([b"other", b"smp/1"], b"smp/1"), ([], b""), ([b"other"], b"")],
)
async def test_alpn(offered: list[bytes], agreed: bytes) -> None:
    sessions = Sessions()
    async with running(make_chain(2), sessions) as server:
        stream = await reach(server, None, alpn=offered)
        assert (stream.alpn, (await sessions.next()).alpn) == (agreed, agreed)
        stream.close()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("service", [make_service(NOW), make_chain(2), None], ids=["one", "chain", "none"])
async def test_client_certificate(asked: bool, service: Credentials | None) -> None:
    sessions = Sessions()
    async with running(make_chain(2), sessions, ask_client_certificate=asked) as server:
        stream = await reach(server, None, service=service)
        seen = (await sessions.next()).peer_chain
        sent = asked and service is not None
        assert stream.certificate_sent is sent
        assert seen == (service.chain if sent and service else ())
        stream.close()


async def test_client_certificate_is_not_shown_to_an_impostor() -> None:
    failures: list[TransportError] = []
    async with running(
        make_chain(2), ask_client_certificate=True, on_handshake_error=failures.append
    ) as server:
        with pytest.raises(TlsFailed):
            await reach(server, bytes(32), service=make_service(NOW))
        await until(lambda: bool(failures))
    assert isinstance(failures[0], ConnectionClosed)


def stdlib_client(change: Callable[[ssl.SSLContext], None]) -> ssl.SSLContext:
    """A foreign client that verifies nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    change(context)
    return context


def only_tls12(context: ssl.SSLContext) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2


async def test_foreign_client() -> None:
    async with running(make_chain(2, KeyAlgorithm.ED448)) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=stdlib_client(lambda context: None)
        )
        assert writer.get_extra_info("cipher")[0] == "TLS_CHACHA20_POLY1305_SHA256"
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        await writer.wait_closed()


async def test_no_session_is_resumed() -> None:
    context = stdlib_client(lambda context: None)

    def session_of(port: int, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as sock,
            context.wrap_socket(sock, session=session) as tls,
        ):
            tls.sendall(b"x")
            tls.recv(1)
            return tls.session, tls.session_reused

    async with running(make_chain(2)) as server:
        session, _ = await asyncio.to_thread(session_of, server.port, None)
        _, reused = await asyncio.to_thread(session_of, server.port, session)
        assert reused is False


async def test_tls12_client_is_refused() -> None:
    failures: list[TransportError] = []
    async with running(make_chain(2), on_handshake_error=failures.append) as server:
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=stdlib_client(only_tls12))
        await until(lambda: bool(failures))
    assert isinstance(failures[0], TlsFailed)


def other_suite(context: SSL.Context) -> None:
    context.set_tls13_ciphersuites(b"TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256")


def other_group(context: SSL.Context) -> None:
    SSL._lib.SSL_CTX_set1_curves_list(context._context, b"P-256")  # type: ignore[attr-defined]


def other_signature(context: SSL.Context) -> None:
    SSL._lib.SSL_CTX_set1_sigalgs_list(context._context, b"ecdsa_secp256r1_sha256")  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [other_suite, other_group, other_signature])
async def test_other_algorithms_are_refused_by_the_server(change: Callable[[SSL.Context], None]) -> None:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    change(context)
    failures: list[TransportError] = []
    async with running(make_chain(2), on_handshake_error=failures.append) as server:
        with pytest.raises(TransportError):
            await connect("127.0.0.1", server.port, context=context, identity=None, now=clock, timeout=5)
        await until(lambda: bool(failures))
    assert type(failures[0]) is TlsFailed


def older_version(context: SSL.Context) -> None:
    context.set_max_proto_version(SSL.TLS1_2_VERSION)


@pytest.mark.parametrize("change", [older_version, other_suite, other_group])
async def test_other_algorithms_are_refused_by_the_client(change: Callable[[SSL.Context], None]) -> None:
    credentials = make_chain(2)
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.use_certificate(x509.load_der_x509_certificate(credentials.chain[0]))
    context.add_extra_chain_cert(x509.load_der_x509_certificate(credentials.chain[1]))
    context.use_privatekey(credentials.key)
    change(context)
    server = await serve(Sessions(), "127.0.0.1", 0, context=context)
    with pytest.raises(TlsFailed):
        await reach(server, None)
    server.close()
    await server.wait_closed(5)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(300),
        b"\x16\x03\x01\xff\xff" + bytes(20),
        b"\x16\x03\x03\x00\x05aaaaa",
    ],
)
async def test_garbage_from_a_client(garbage: bytes) -> None:
    failures: list[TransportError] = []
    async with running(make_chain(2), on_handshake_error=failures.append) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(garbage)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        await until(lambda: bool(failures))
    assert type(failures[0]) is TlsFailed


async def test_garbage_from_a_server() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com ESMTP\r\n")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(TlsFailed):
            await connect(
                "127.0.0.1", port, context=client_context(ALPN), identity=None, now=clock, timeout=5
            )


async def test_silent_client_is_dropped() -> None:
    failures: list[TransportError] = []
    async with running(make_chain(2), handshake_timeout=0.05, on_handshake_error=failures.append) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await writer.wait_closed()
    assert "in time" in str(failures[0])


async def test_client_that_leaves_during_the_handshake() -> None:
    failures: list[TransportError] = []
    async with running(make_chain(2), on_handshake_error=failures.append) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01")
        writer.close()
        await writer.wait_closed()
        await until(lambda: bool(failures))
    assert isinstance(failures[0], ConnectionClosed)


async def test_refused_address_never_gets_to_tls() -> None:
    asked: list[str] = []
    failures: list[TransportError] = []

    def nobody(address: str) -> bool:
        asked.append(address)
        return False

    async with running(make_chain(2), admit=nobody, on_handshake_error=failures.append) as server:
        with pytest.raises(ConnectionClosed):
            await reach(server, None)
    assert asked == ["127.0.0.1"]
    assert failures == []


async def test_context_is_asked_for_every_connection() -> None:
    old, new = make_chain(2), make_chain(2)
    contexts = iter([server_context(old, ALPN), server_context(new, ALPN)])
    server = await serve(Sessions(), "127.0.0.1", 0, context=lambda: next(contexts))
    for credentials in (old, new):
        (await reach(server, credentials.identity)).abort()
    server.close()
    await server.wait_closed(5)


def test_client_contexts_are_shared() -> None:
    service = make_service(NOW)
    assert client_context(ALPN) is client_context(tuple(ALPN))
    assert client_context(ALPN, service) is client_context(ALPN, service)
    assert client_context(ALPN, service) is not client_context(ALPN)


async def test_a_certificate_of_an_unknown_version_ends_the_handshake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OpenSSL takes it, the library that reads certificates does not, with an error of its own kind."""
    sound = make_chain(2)
    odd = sound.chain[1].replace(VERSION_3, VERSION_25, 1)
    context = server_context(sound, ALPN)
    with pytest.deprecated_call():  # the other way reads the certificate
        context.add_extra_chain_cert(crypto.load_certificate(crypto.FILETYPE_ASN1, odd))
    server = await serve(Sessions(), "127.0.0.1", 0, context=context)
    with pytest.raises(ChainInvalid):
        await reach(server, None)
    with pytest.raises(ChainInvalid):
        check_chain((sound.chain[0], odd), None, NOW)
    assert not caplog.records
    server.close()
    await server.wait_closed(5)
