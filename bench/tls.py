"""What TLS costs per block: CPU time for both sides together.

Three ways move the same blocks: stdlib `ssl` and pyOpenSSL over memory BIOs in a plain loop, and our streams
inside asyncio over real sockets on the loopback interface. The last one includes the event loop and the
system calls, whose price is shown too.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
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
from transport.server import serve
from transport.streams import RECEIVE_SIZE, TlsStream, connect
from transport.tls import client_context, server_context

NTF_BLOCK, SMP_BLOCK = 512, 16384
BLOCKS = {NTF_BLOCK: 8_000, SMP_BLOCK: 4_000}
RECORD_OVERHEAD = 22
SHARES = {NTF_BLOCK: 0.66, SMP_BLOCK: 0.77}
"Of the bare loop's speed: 1.5 and 1.3 times its cost."


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


def openssl_loop(credentials: Credentials, size: int, rounds: int) -> float:
    """PyOpenSSL, no sockets."""
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
    block = bytes(size)

    def run(count: int) -> None:
        for _ in range(count):
            client.send(block)
            server.bio_write(client.bio_read(size + RECORD_OVERHEAD))
            if len(server.recv(size)) != size:
                raise RuntimeError("a block was cut")

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


def bare_sockets(size: int, rounds: int) -> float:
    """The system calls alone: TCP over the loopback interface without TLS and without an event loop."""
    block, buffer = bytes(size + RECORD_OVERHEAD), bytearray(RECEIVE_SIZE)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as server,
    ):

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
        stdlib = stdlib_loop(size, rounds)
        bare = openssl_loop(credentials, size, rounds)
        ours, in_step = (our_streams(credentials, size, rounds, in_step=wait) for wait in (False, True))
        peer = beside("pyOpenSSL in memory", bare, at_least=SHARES[size])
        rows += [
            figure(f"{size} B, streaming", "us CPU", ours, peer=peer),
            figure(f"{size} B, each waited for", "us CPU", in_step, peer=beside("pyOpenSSL in memory", bare)),
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
    " one record a block; beside them the same pyOpenSSL in a plain loop over memory, without"
    " sockets or an event loop. Each waited for: every block pays for waking the event loop. The"
    " aim for 16 kB is 1.3 times the bare loop, for 512 B 1.5 times.",
    bound="the cipher, and a fifth of the cost of large blocks is system calls, which the bare loop"
    " does not make.",
)
