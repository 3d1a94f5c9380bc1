"""Bytes through the stream: whole, in order, bounded, and every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.transport.chains import ALPN, clock, echo, make_chain, reach, receive_exactly, running
from tests.waiting import until
from transport.engine import MAX_PLAINTEXT, SLIGHT_RECORD
from transport.errors import ConnectionClosed
from transport.streams import READ_LIMIT, TlsStream, connect
from transport.tls import client_context

CREDENTIALS = make_chain(2)
BLOCK = 16384


class Pair:
    """Both ends of one connection; the server's handler waits for `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.accepted: asyncio.Future[TlsStream] = asyncio.get_running_loop().create_future()
        self.client: TlsStream
        self.server: TlsStream

    async def handle(self, stream: TlsStream) -> None:
        self.accepted.set_result(stream)
        await self.release.wait()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    both = Pair()
    async with running(CREDENTIALS, both.handle) as listening:
        both.client = await reach(listening, CREDENTIALS.identity)
        both.server = await asyncio.wait_for(both.accepted, 5)
        yield both
        both.release.set()
        both.client.abort()
        await both.client.wait_closed()


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize(
    "size", [1, 512, MAX_PLAINTEXT - 1, MAX_PLAINTEXT, MAX_PLAINTEXT + 1, 5 * 1024 * 1024]
)
async def test_both_ways_at_once(size: int) -> None:
    data = noise(size)
    async with running(CREDENTIALS, echo) as server, asyncio.timeout(60):
        stream = await reach(server, CREDENTIALS.identity)

        async def send() -> None:
            for start in range(0, size, 10 * BLOCK):
                stream.write(data[start : start + 10 * BLOCK])
                await stream.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            received = tasks.create_task(receive_exactly(stream, size))
        assert received.result() == data
        stream.close()
        assert await stream.receive() == b""
        await stream.wait_closed()


async def test_order_of_small_writes(pair: Pair) -> None:
    for number in range(1000):
        pair.client.write(struct.pack(">I", number).ljust(SLIGHT_RECORD))
    pair.client.write(b"")
    data = await receive_exactly(pair.server, 1000 * SLIGHT_RECORD)
    numbers = [data[start : start + 4] for start in range(0, len(data), SLIGHT_RECORD)]
    assert [int.from_bytes(number, "big") for number in numbers] == list(range(1000))
    assert pair.server.last_received >= pair.client.last_received


async def test_small_blocks_do_not_wait_for_acknowledgements(pair: Pair) -> None:
    for stream in (pair.client, pair.server):
        assert stream._transport is not None
        sock = stream._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_slow_reader_holds_the_writer(pair: Pair) -> None:
    block = noise(BLOCK)
    written = 0
    with pytest.raises(TimeoutError):
        while written < 64 * 1024 * 1024:  # far more than the buffers of the operating system hold
            pair.client.write(block)
            written += BLOCK
            await asyncio.wait_for(pair.client.drain(), 0.2)
    await until(lambda: pair.server._received_size >= READ_LIMIT)
    assert pair.server._received_size < READ_LIMIT + MAX_PLAINTEXT
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        received = tasks.create_task(receive_exactly(pair.server, written))
        await pair.client.drain()
    assert received.result() == block * (written // BLOCK)


async def test_all_data_arrives_when_the_writer_closes_before_the_reader_starts(pair: Pair) -> None:
    data = noise(3 * READ_LIMIT)
    pair.client.write(data)
    pair.client.close()
    async with asyncio.timeout(60):
        assert await receive_exactly(pair.server, len(data)) == data
        assert await pair.server.receive() == b""
        assert await pair.server.receive() == b""


async def test_records_beyond_the_limit_reach_a_reader_that_waited(pair: Pair) -> None:
    pair.server.read_limit = MAX_PLAINTEXT
    encrypt = pair.client._engine.encrypt
    records = encrypt(b"a" * 16000) + b"".join(encrypt(b"b" * 5000) for _ in range(3))
    received = asyncio.ensure_future(receive_exactly(pair.server, 31000))
    assert pair.client._transport is not None
    pair.client._transport.write(records[:16000])
    await until(lambda: pair.server._engine.has_waiting)
    pair.client._transport.write(records[16000:])  # one read takes it all, and nothing follows
    assert await asyncio.wait_for(received, 5) == b"a" * 16000 + b"b" * 15000


async def test_goodbye(pair: Pair) -> None:
    waiting = asyncio.ensure_future(pair.server.receive())
    await asyncio.sleep(0)
    pair.client.close()
    pair.client.close()
    assert await asyncio.wait_for(waiting, 5) == b""
    await asyncio.wait_for(pair.client.wait_closed(), 5)
    await pair.client.wait_closed()
    with pytest.raises(ConnectionClosed):
        pair.client.write(b"late")
    with pytest.raises(ConnectionClosed):
        await pair.client.drain()


async def test_end_without_goodbye(pair: Pair) -> None:
    tcp_socket(pair.client).shutdown(socket.SHUT_WR)
    assert await asyncio.wait_for(pair.server.receive(), 5) == b""


def tcp_socket(stream: TlsStream) -> socket.socket:
    """The socket under the stream, to do there what the stream itself never does."""
    assert stream._transport is not None
    wrapped: socket.socket = stream._transport.get_extra_info("socket")
    return wrapped


async def test_reset(pair: Pair) -> None:
    waiting = asyncio.ensure_future(pair.server.receive())
    await asyncio.sleep(0)
    tcp_socket(pair.client).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pair.client.abort()
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(ConnectionClosed):
        pair.server.write(b"late")


async def test_reset_wakes_a_waiting_writer(pair: Pair) -> None:
    while pair.server.write_buffer_size < READ_LIMIT:
        pair.server.write(bytes(BLOCK * 16))
    waiting = [asyncio.ensure_future(pair.server.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    pair.client.abort()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(result) for result in results] == [ConnectionClosed, ConnectionClosed]


@pytest.mark.parametrize(
    "junk", [b"\x17\x03\x03\x00\x20" + bytes(32), b"junk that is no record", b"\x17\x03\x03\xff\xff"]
)
async def test_junk_in_an_open_connection(pair: Pair, junk: bytes) -> None:
    assert pair.client._transport is not None
    pair.client._transport.write(junk)
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(pair.server.receive(), 5)
    await asyncio.wait_for(pair.server.wait_closed(), 5)


async def test_a_stream_without_a_connection() -> None:
    stream = TlsStream(client_context(ALPN), lambda *_: None, client_side=True)
    assert stream.is_closing
    assert (stream.local_address, stream.write_buffer_size) == ("", 0)
    with pytest.raises(ConnectionClosed):
        stream.write(b"to nobody")
    stream.end_writing()
    stream.close()
    stream.abort()


@pytest.mark.parametrize("by", ["close", "abort", "the system", "the peer"])
async def test_nothing_is_sent_after_the_end(pair: Pair, by: str) -> None:
    server = pair.server
    if by == "the peer":
        pair.client.close()
        assert await server.receive() == b""
    elif by == "the system":
        assert server._transport is not None
        server._transport.abort()
    else:
        getattr(server, by)()
    assert server.is_closing
    if by != "the peer":
        with pytest.raises(ConnectionClosed):
            server.write(b"late")
    pair.client.abort()
    await server.wait_closed()
    server.end_writing()
    server.close()
    assert server._timer is None


async def test_a_reader_that_was_woken_is_not_woken_again(pair: Pair) -> None:
    """Two reasons may come in one turn of the event loop."""
    receiving = asyncio.ensure_future(pair.server.receive())
    await until(lambda: pair.server._reader is not None)
    pair.server.eof_received()
    pair.server.abort()
    assert await receiving == b""


async def test_a_server_chooses_how_much_may_be_unsent() -> None:
    both = Pair()
    async with running(CREDENTIALS, both.handle, write_limit=0) as listening:
        client = await reach(listening, CREDENTIALS.identity)
        stream = await both.accepted
        assert stream._transport is not None
        assert stream._transport.get_write_buffer_limits() == (0, 0)
        both.release.set()
        client.abort()


async def test_one_reader_only(pair: Pair) -> None:
    waiting = asyncio.ensure_future(pair.client.receive())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        await pair.client.receive()
    pair.server.write(b"x")
    assert await asyncio.wait_for(waiting, 5) == b"x"


async def test_cancelled_reader_loses_nothing(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pair.client.receive()
    pair.server.write(b"x")
    assert await asyncio.wait_for(pair.client.receive(), 5) == b"x"


async def test_failing_handler(caplog: pytest.LogCaptureFixture) -> None:
    error = KeyError("a secret token")

    async def fail(stream: TlsStream) -> None:
        raise error

    async with running(CREDENTIALS, fail) as server:
        stream = await reach(server, None)
        await asyncio.wait_for(stream.wait_closed(), 5)
        await until(lambda: bool(caplog.messages))
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text


async def test_server_cancels_its_handlers() -> None:
    ended: list[str] = []

    async def wait(stream: TlsStream) -> None:
        try:
            await stream.receive()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            ended.append(task.get_name() if task else "")
            raise

    async with running(CREDENTIALS, wait) as server:
        streams = [await reach(server, None) for _ in range(3)]
        silent_reader, silent_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: server.connections == 3)
    assert len(ended) == 3
    assert all(name.startswith("tls 127.0.0.1 ") for name in ended)
    for stream in streams:
        assert await asyncio.wait_for(stream.receive(), 5) == b""
        stream.abort()
    assert await asyncio.wait_for(silent_reader.read(), 5) == b""
    silent_writer.close()
    await silent_writer.wait_closed()


async def test_stubborn_handler_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    async def stay(stream: TlsStream) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with running(CREDENTIALS, stay) as server:
        stream = await reach(server, None)
        await until(lambda: server.connections == 1)
        server.close()
        await server.wait_closed(timeout=0.05)
        assert "connections that did not stop in time: 1" in caplog.text
        assert "127.0.0.1" not in caplog.text
        assert await asyncio.wait_for(stream.receive(), 5) == b""
        release.set()
        stream.abort()


async def test_nobody_listens(unused_port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        await open_stream(unused_port)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def open_stream(port: int, host: str = "127.0.0.1", timeout: float = 5) -> TlsStream:
    context = client_context(ALPN)
    return await connect(host, port, context=context, identity=None, now=clock, timeout=timeout)


@pytest.mark.parametrize("host", ["", "x" * 70, "no\0name", "name.invalid"])
async def test_bad_names(host: str, unused_port: int) -> None:
    with pytest.raises(OSError):
        await open_stream(unused_port, host)


async def test_given_socket() -> None:
    async with running(CREDENTIALS) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        stream = await connect(
            "unknown.invalid", 1, sock=sock, context=client_context(ALPN), identity=None, now=clock, timeout=5
        )
        stream.write(b"x")
        assert await receive_exactly(stream, 1) == b"x"
        stream.abort()
        await stream.wait_closed()
        assert sock.fileno() == -1


@pytest_asyncio.fixture
async def silent_port() -> AsyncIterator[int]:
    """A server that accepts and says nothing; it fails the test when a client's socket stays open."""
    ended = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait_for(ended.wait(), 5)
    gc.collect()


async def test_silent_server(silent_port: int) -> None:
    with pytest.raises(TimeoutError):
        await open_stream(silent_port, timeout=0.05)


async def test_cancelled_connect(silent_port: int) -> None:
    connecting = asyncio.ensure_future(open_stream(silent_port))
    await asyncio.sleep(0.05)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


async def test_connect_cancelled_at_every_step() -> None:
    async with running(CREDENTIALS) as server:
        for steps in range(1, 40):
            connecting = asyncio.ensure_future(open_stream(server.port))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not connecting.done():
                connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await connecting).abort()
        await until(lambda: not server._streams)
