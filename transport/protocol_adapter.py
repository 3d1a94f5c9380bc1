"""An asyncio protocol, as libraries write them, on a `TlsStream`."""

from __future__ import annotations

import asyncio

from transport.budget import CpuBudget
from transport.cancellation import TaskGroup
from transport.errors import ConnectionClosed
from transport.streams import TlsStream


async def run_protocol(stream: TlsStream, protocol: asyncio.Protocol, budget: CpuBudget, source: str) -> None:
    """Until either side closes the connection. What the protocol does with received bytes is charged to
    `source`."""
    async with TaskGroup() as tasks:
        transport = StreamTransport(stream, protocol, tasks)
        protocol.connection_made(transport)
        error: Exception | None = None
        try:
            await transport.feed(budget, source)
        except ConnectionClosed as closed:
            error = ConnectionResetError(str(closed))
        finally:
            transport.stop()
            protocol.connection_lost(error)


class StreamTransport(asyncio.Transport):
    """What the protocol sees of its connection."""

    def __init__(self, stream: TlsStream, protocol: asyncio.Protocol, tasks: TaskGroup) -> None:
        super().__init__({"peername": stream.peer, "sockname": (stream.local_address, 0)})
        self._stream = stream
        self._protocol = protocol
        self._tasks = tasks
        self._draining: asyncio.Task[None] | None = None
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def feed(self, budget: CpuBudget, source: str) -> None:
        """Hand over what the peer sends. Raises `ConnectionClosed`."""
        while True:
            await self._may_read.wait()
            data = await self._stream.receive()
            if not data:
                return
            await self._may_read.wait()  # it may have paused while this was received
            with await budget.take(source):
                if self._stream.is_closing:
                    return
                self._protocol.data_received(data)

    def stop(self) -> None:
        """The connection is over: nobody waits for the peer to read."""
        if self._draining is not None:
            self._draining.cancel()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """As `asyncio.WriteTransport` promises: what is written to a closed connection is dropped."""
        if self._stream.is_closing:
            return
        self._stream.write(bytes(data))
        if self._stream.is_full and self._draining is None:
            self._protocol.pause_writing()
            self._draining = self._tasks.create_task(self._drain(), name="gateway drain")

    async def _drain(self) -> None:
        try:
            await self._stream.drain()
        except ConnectionClosed:
            return  # `connection_lost` follows
        self._draining = None
        self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._stream.write_buffer_size

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_closing(self) -> bool:
        return self._stream.is_closing

    def close(self) -> None:
        self._stream.close()
        self._may_read.set()

    def abort(self) -> None:
        self._stream.abort()
        self._may_read.set()
