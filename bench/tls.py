"""What TLS costs per block: CPU time for both sides together.

Our streams move blocks inside asyncio over real sockets on the loopback interface. Plain loops beside them
move the same blocks: pyOpenSSL over the same kind of sockets, pyOpenSSL and stdlib `ssl` in memory alone, and
TCP without TLS.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from OpenSSL import SSL

from bench.measure import Row, beside, figure
from bench.part import Part
from transport.certificates import (
    SERVER_CERTIFICATE,
    SERVER_KEY,
    Credentials,
    KeyAlgorithm,
    make_ca,
    make_online,
    write_server_files,
)
from transport.engine import RECEIVE_SIZE
from transport.server import serve
from transport.streams import TlsStream, connect
from transport.tls import client_context, server_context

NTF_BLOCK, SMP_BLOCK = 512, 16384
BLOCKS = {NTF_BLOCK: 8_000, SMP_BLOCK: 4_000}
RECORD_OVERHEAD = 22
SHARES = {NTF_BLOCK: 0.66, SMP_BLOCK: 0.77}
"Of the bare loop's speed: 1.5 and 1.3 times its cost."
OVER_SOCKETS, IN_MEMORY = "pyOpenSSL over sockets", "pyOpenSSL in memory"


def now() -> datetime:
    """The time at which the certificates are checked."""
    return datetime.now(UTC)


def per_block(run: Callable[[int], None], size: int, rounds: int) -> float:
    """Microseconds of CPU time per block: the best of a few rounds, as other processes only add to it."""
    count = BLOCKS[size]
    run(count // 10)
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        run(count)
        best = min(best, time.process_time() - start)
    return best / count * 1e6


def stdlib_loop(size: int, rounds: int) -> float:
    """Stdlib `ssl`, no sockets; with AES-GCM, since it cannot be told to prefer ChaCha20."""
    with tempfile.TemporaryDirectory() as directory:
        ca_cert, ca_key = make_ca(KeyAlgorithm.ED25519, "CA", now())
        online = make_online(ca_cert, ca_key, KeyAlgorithm.ED25519, "localhost", now())
        write_server_files(Path(directory), ca_cert, ca_key, online)
        accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        accepting.load_cert_chain(Path(directory, SERVER_CERTIFICATE), Path(directory, SERVER_KEY))
    connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    connecting.check_hostname = False
    connecting.verify_mode = ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = connecting.wrap_bio(down, up)
    server = accepting.wrap_bio(up, down, server_side=True)
    for side in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    with suppress(ssl.SSLWantReadError):
        client.read(1)
    block = bytes(size)

    def run(count: int) -> None:
        for _ in range(count):
            client.write(block)
            if len(server.read(size)) != size:
                raise RuntimeError("a block was cut")

    return per_block(run, size, rounds)


def openssl_pair(credentials: Credentials) -> tuple[SSL.Connection, SSL.Connection]:
    """PyOpenSSL's client and server after their handshake."""
    server = SSL.Connection(server_context(credentials, []))
    server.set_accept_state()
    client = SSL.Connection(client_context([]))
    client.set_connect_state()
    for side, other in ((client, server), (server, client), (client, server), (server, client)):
        with suppress(SSL.WantReadError):
            side.do_handshake()
        other.bio_write(side.bio_read(1 << 16))
    with suppress(SSL.WantReadError):
        client.recv(1)
    return client, server


def openssl_loop(credentials: Credentials, size: int, rounds: int) -> float:
    """PyOpenSSL, no sockets."""
    client, server = openssl_pair(credentials)
    block = bytes(size)

    def run(count: int) -> None:
        for _ in range(count):
            client.send(block)
            server.bio_write(client.bio_read(size + RECORD_OVERHEAD))
            if len(server.recv(size)) != size:
                raise RuntimeError("a block was cut")

    return per_block(run, size, rounds)


def openssl_sockets(credentials: Credentials, size: int, rounds: int) -> float:
    """PyOpenSSL in a plain loop over TCP: the writer runs ahead until the socket is full, as ours does."""
    client, server = openssl_pair(credentials)
    block, record = bytes(size), size + RECORD_OVERHEAD
    buffer = memoryview(bytearray(RECEIVE_SIZE))
    with socket_pair() as (sending, receiving):
        sending.setblocking(False)

        def send(unsent: bytes, left: int) -> tuple[bytes, int]:
            with suppress(BlockingIOError):
                while unsent or left:
                    if not unsent:
                        client.send(block)
                        unsent, left = client.bio_read(record), left - 1
                    unsent = unsent[sending.send(unsent) :]
            return unsent, left

        def decrypt(end: int) -> int:
            """The length of the record's part that is left in the buffer."""
            for at in range(0, end - record + 1, record):
                server.bio_write(buffer[at : at + record])
                if len(server.recv(size)) != size:
                    raise RuntimeError("a block was cut")
            rest = end % record
            buffer[:rest] = buffer[end - rest : end]
            return rest

        def run(count: int) -> None:
            unsent, left, rest, missing = b"", count, 0, count * record
            while missing:
                unsent, left = send(unsent, left)
                received = receiving.recv_into(buffer[rest:])
                missing -= received
                rest = decrypt(rest + received)

        return per_block(run, size, rounds)


def our_streams(credentials: Credentials, size: int, rounds: int, *, in_step: bool) -> float:
    """Our streams: both ends in one event loop, over TCP, one record per block.

    `in_step` waits for each block to arrive before the next is sent, so each pays for waking the event loop;
    otherwise the writer runs ahead until it has to wait.
    """
    block = bytes(size)

    async def send(count: int) -> None:
        for _ in range(count):
            client.write(block)
            await client.drain()

    async def take(missing: int) -> None:
        while missing:
            missing -= len(await server.receive())

    async def move(count: int) -> None:
        if in_step:
            for _ in range(count):
                await send(1)
                await take(size)
        else:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send(count))
                tasks.create_task(take(count * size))

    with asyncio.Runner() as runner:
        accepted: asyncio.Queue[TlsStream] = asyncio.Queue(1)
        done = asyncio.Event()

        async def handle(stream: TlsStream) -> None:
            await accepted.put(stream)
            await done.wait()

        async def open_pair() -> tuple[TlsStream, TlsStream]:
            server = await serve(handle, "127.0.0.1", 0, context=server_context(credentials, []))
            context = client_context([])
            client = await connect(
                "127.0.0.1", server.port, context=context, identity=credentials.identity, now=now, timeout=10
            )
            return client, await accepted.get()

        client, server = runner.run(open_pair())
        result = per_block(lambda count: runner.run(move(count)), size, rounds)
        done.set()
        client.abort()
        runner.run(server.wait_closed())
    return result


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection over the loopback interface, as asyncio sets them up."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as server,
    ):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client, server


def bare_sockets(size: int, rounds: int) -> float:
    """The system calls alone: TCP without TLS and without an event loop, one block at a time."""
    block, buffer = bytes(size + RECORD_OVERHEAD), bytearray(RECEIVE_SIZE)
    with socket_pair() as (client, server):

        def run(count: int) -> None:
            for _ in range(count):
                client.sendall(block)
                missing = len(block)
                while missing:
                    missing -= server.recv_into(buffer)

        return per_block(run, size, rounds)


def measure(_: Path, *, rounds: int = 3) -> list[Row]:
    ca_cert, ca_key = make_ca(KeyAlgorithm.ED25519, "CA", now())
    credentials = make_online(ca_cert, ca_key, KeyAlgorithm.ED25519, "localhost", now())
    rows = []
    for size in BLOCKS:
        stdlib, memory = stdlib_loop(size, rounds), openssl_loop(credentials, size, rounds)
        sockets = beside(OVER_SOCKETS, openssl_sockets(credentials, size, rounds), at_least=SHARES[size])
        ours, in_step = (our_streams(credentials, size, rounds, in_step=wait) for wait in (False, True))
        rows += [
            figure(f"{size} B, streaming", "us CPU", ours, peer=sockets),
            figure(f"{size} B, streaming, to memory alone", "us CPU", ours, peer=beside(IN_MEMORY, memory)),
            figure(f"{size} B, each waited for", "us CPU", in_step, peer=beside(IN_MEMORY, memory)),
            figure(f"{size} B, stdlib ssl in memory", "us CPU", stdlib),
            figure(f"{size} B, TCP alone", "us CPU", bare_sockets(size, rounds)),
        ]
    return rows


TLS = Part(
    name="tls",
    title="TLS",
    measure=measure,
    quick={"rounds": 1},
    quick_repeats=2,
    seconds=20,
    quick_seconds=6,
    why="Every block in and out is a TLS record.",
    how="CPU for a block, both sides together. Ours stream over real loopback sockets inside asyncio,"
    " one record a block; beside them the same pyOpenSSL in a plain loop without an event loop: over"
    " such sockets, with a writer that runs ahead just so, and in memory, without any system call."
    " Each waited for: every block pays for waking the event loop. The aim for 16 kB is 1.3 times the"
    " loop over sockets, for 512 B 1.5 times.",
    bound="the cipher (14 us for 16 kB, both ways), then moving bytes: a writer that runs ahead fills the"
    " sockets' buffers, megabytes that are in no near cache when they are read. The plain loop over"
    " sockets pays for that as we do, the one in memory does not. Our streams call OpenSSL with"
    " buffers that they keep; pyOpenSSL makes one for each call, which for small blocks costs more"
    " than asyncio does.",
)
