"""A SOCKS proxy before all servers of one agent: it counts TLS records, delays them, or cuts after one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from protocol.versions import SMP_BLOCK_SIZE
from smp_client.dialer import NetworkConfig
from transport.cancellation import TaskGroup

HEADER_SIZE = 5
"Of a TLS record: kind, version, length."
IPV4, NAME = 1, 3
"How SOCKS tells where to go."
LOCALHOST = "127.0.0.1"


class Tunnel:
    """Use `tunnel()`. The record after which it cuts still arrives, whichever way it goes."""

    def __init__(self) -> None:
        self.records = 0
        "That have passed, both ways, on all connections."
        self.blocks = 0
        "Of commands to routers."
        self.delay = 0.0
        "Seconds, each way."
        self.cut_after: int | None = None
        "Records."
        self.is_cut = False
        self.on_cut: Callable[[], None] = lambda: None
        self._port = 0
        self._clients: set[asyncio.StreamWriter] = set()

    @property
    def network(self) -> NetworkConfig:
        """For an agent that is to go through here."""
        return NetworkConfig(socks_proxy=f"socks5://{LOCALHOST}:{self._port}", proxy_all=True)

    def cut(self) -> None:
        """Nothing passes any more, either way."""
        self.is_cut = True
        for client in self._clients:
            client.transport.abort()
        self.on_cut()

    def mend(self) -> None:
        self.is_cut, self.cut_after = False, None

    async def listen(self, tasks: TaskGroup) -> asyncio.Server:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.create_task(self._serve(reader, writer), name="tunnel")

        server = await asyncio.start_server(accept, LOCALHOST, 0)
        self._port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            host, port = await _asked_for(reader, writer)
            if not self.is_cut:
                there, back = await asyncio.open_connection(host, port)
                await self._relay((reader, writer), (there, back))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._clients.discard(writer)
            writer.transport.abort()

    async def _relay(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(self._forward(client[0], server[1], is_command=True), name="to the server")
                tasks.create_task(self._forward(server[0], client[1], is_command=False), name="to the client")
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            server[1].close()  # after what was written to it

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_command: bool
    ) -> None:
        delayed: deque[bytes] = deque()
        loop = asyncio.get_running_loop()
        while True:
            header = await reader.readexactly(HEADER_SIZE)
            record = header + await reader.readexactly(int.from_bytes(header[3:], "big"))
            if self.is_cut:
                raise ConnectionResetError
            self.records += 1
            self.blocks += is_command and len(record) > SMP_BLOCK_SIZE
            if self.delay:
                delayed.append(record)
                loop.call_later(self.delay, lambda: writer.write(delayed.popleft()))
                continue
            writer.write(record)
            if self.records == self.cut_after:
                self.cut()
            await writer.drain()


async def _asked_for(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int]:
    """Where the client wants to be connected to; it is told that it is."""
    _, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    writer.write(b"\x05\x00")
    kind = (await reader.readexactly(4))[3]
    if kind == IPV4:
        host = ".".join(str(byte) for byte in await reader.readexactly(4))
    else:
        assert kind == NAME
        (size,) = await reader.readexactly(1)
        host = (await reader.readexactly(size)).decode()
    port = int.from_bytes(await reader.readexactly(2), "big")
    writer.write(b"\x05\x00\x00\x01" + bytes(6))
    return host, port


@asynccontextmanager
async def tunnel() -> AsyncIterator[Tunnel]:
    made = Tunnel()
    async with TaskGroup() as tasks, await made.listen(tasks):
        yield made
        made.cut()
