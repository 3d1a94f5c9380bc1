"""A TCP proxy that loses answers: the server did what it was asked, and the client never hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from protocol.addresses import ServerAddress

Address = TypeVar("Address", bound=ServerAddress)

APPLICATION_DATA = 23
HEADER_SIZE = 5
SMALLEST_BLOCK = 512
"TLS messages are smaller: a longer record from the client holds a block."
CHUNK = 65536


class LossyProxy:
    """`lose(n)`: answer n commands, lose the answer of the next, then behave."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._left: int | None = None
        self.port = 0
        self.lost = 0
        self.commands = 0
        "Blocks of commands that went through."
        self.refusing = False
        self.on_loss: Callable[[], None] = lambda: None
        "Called when an answer is being lost."
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """From now on nobody gets through."""
        self.refusing = True
        for writer in self._open:
            writer.transport.abort()

    def lose(self, after: int = 0) -> None:
        self._left = after

    def in_front_of(self, address: Address) -> Address:
        return replace(address, port=str(self.port))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        losing = asyncio.Event()
        self._open.add(writer)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward_commands(reader, server_writer, losing))
                tasks.create_task(self._forward_answers(server_reader, writer, losing))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()
            server_writer.transport.abort()

    async def _forward_commands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        blocks = 0
        while True:
            header = await reader.readexactly(HEADER_SIZE)
            size = int.from_bytes(header[3:5], "big")
            record = header + await reader.readexactly(size)
            if header[0] == APPLICATION_DATA and size >= SMALLEST_BLOCK:
                blocks += 1
                self.commands += blocks > 1  # the first is the handshake
                if blocks > 1 and self._is_next():
                    losing.set()
            writer.write(record)
            await writer.drain()

    def _is_next(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        self._left = None
        return True

    async def _forward_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK):
            if losing.is_set():
                self.lost += 1
                self.on_loss()
                break
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@asynccontextmanager
async def lossy_proxy(address: ServerAddress) -> AsyncIterator[LossyProxy]:
    proxy = LossyProxy(address.hosts[0], int(address.port))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(proxy.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks, return_exceptions=True)
