"""A session is given up because its requests are swallowed; what its router still sends must not be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from protocol.addresses import SmpServer
from protocol.statuses import SubState
from smp_client import session as smp_session
from smp_router.router import Router
from tests.ntf_server.subscriber.conftest import QUICK, Daemon
from tests.waiting import until
from transport.cancellation import TaskGroup

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATIENT = replace(QUICK, command_timeout=0.2, ping_interval=30.0)
CHUNK = 65536


class Passage:
    """One connection through the proxy. What it does is true of what comes from then on."""

    def __init__(self) -> None:
        self.swallows_requests = False
        self.answers_pass = asyncio.Event()
        self.answers_pass.set()

    async def serve(self, client: Streams, router: Streams) -> None:
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(self._requests(client[0], router[1]))
                tasks.create_task(self._answers(router[0], client[1]))
        finally:
            for _, writer in (client, router):
                writer.transport.abort()

    async def _requests(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK):
                if not self.swallows_requests:
                    target.write(data)
        if not self.swallows_requests:
            target.close()

    async def _answers(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK):
                await self.answers_pass.wait()
                target.write(data)
        target.close()


class Proxy:
    def __init__(self, router: Router) -> None:
        self._router = router
        self.passages: list[Passage] = []
        self.admits = asyncio.Event()
        self.admits.set()
        self._port = 0

    @property
    def address(self) -> SmpServer:
        return replace(self._router.address, port=str(self._port))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with TaskGroup() as tasks:
            serving: list[asyncio.Task[None]] = []

            def accept(*client: *Streams) -> None:
                serving.append(tasks.create_task(self._serve(client)))

            async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
                self._port = int(server.sockets[0].getsockname()[1])
                yield
                for task in serving:  # as of Python 3.12, the server waits for their connections
                    task.cancel()

    async def _serve(self, client: Streams) -> None:
        await self.admits.wait()
        passage = Passage()
        self.passages.append(passage)
        await passage.serve(client, await asyncio.open_connection("127.0.0.1", self._router.port))


@pytest.mark.parametrize("as_service", [False, True])
async def test_what_a_session_brings_after_it_was_given_up_is_stored(
    daemon: Daemon, as_service: bool
) -> None:
    daemon.configure(replace(PATIENT, use_service_credentials=as_service))
    async with Router.start() as router:
        proxy = Proxy(router)
        async with proxy.running(), daemon.running():
            queues = router.load.create_queues(3)
            await daemon.add(proxy.address, queues)
            await until(lambda: daemon.count(SubState.ACTIVE) == 3)
            first = proxy.passages[-1]
            first.swallows_requests = True
            proxy.admits.clear()
            await daemon.add(proxy.address, router.load.create_queues(1))
            await until(lambda: not daemon.status().connected)
            assert daemon.status().last_error == "the router does not answer NSUB"
            await router.load.emit(queues[:1], 1)  # nobody else is there yet
            await until(lambda: daemon.unsent() == 1)
            first.answers_pass.clear()
            await router.load.emit(queues[1:2], 1)  # it arrives when its queue is another session's, and END
            proxy.admits.set()
            await until(lambda: daemon.count(SubState.ACTIVE) == 4)
            first.answers_pass.set()
            await until(lambda: daemon.unsent() == 2)
            await router.load.emit(queues[2:], 1)
            await until(lambda: daemon.unsent() == 3)
    assert daemon.count(SubState.ACTIVE) == 4


async def test_a_former_session_ends_soon_after_it_was_replaced(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smp_session, "OVERLAP", 0.1)
    async with Router.start() as router, daemon.running():
        await daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        daemon.subscriber.resubscribe(router.address.hosts[0])
        await until(lambda: router.counts["connections"] == 2)
        await until(lambda: daemon.count(SubState.ACTIVE) == 1 and router.connections == 1)


async def test_a_queue_that_comes_while_the_last_session_ends_is_subscribed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, was_added = smp_session.FormerSession.close, asyncio.Event()

    async def close_meanwhile(former: smp_session.FormerSession) -> None:
        await daemon.add(router.address, router.load.create_queues(1))
        await close(former)
        was_added.set()

    async with Router.start() as router, daemon.running():
        (queue,) = router.load.create_queues(1)
        await daemon.add(router.address, [queue])
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
        monkeypatch.setattr(smp_session.FormerSession, "close", close_meanwhile)
        await daemon.delete(queue)
        await was_added.wait()
        monkeypatch.undo()
        await until(lambda: daemon.count(SubState.ACTIVE) == 1)
