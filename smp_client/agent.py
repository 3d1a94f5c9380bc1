"""One router, connected to for ever: connect, let the owner work, and when it ends wait and connect again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from protocol.addresses import SmpServer
from protocol.connection import Received
from protocol.smp_messages import SmpMessage
from smp_client.backoff import Backoff
from smp_client.dialer import Dialer
from smp_client.errors import ClientError, WrongIdentity
from smp_client.requests import SessionTiming
from smp_client.session import CONNECT_TIMEOUT, Service, SmpSession, connect_smp
from transport.cancellation import TaskGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Deadlines and delays, in seconds."""

    connect_timeout: float = CONNECT_TIMEOUT
    timing: SessionTiming = field(default_factory=SessionTiming)
    first_delay: float = 1.0
    longest_delay: float = 10.0
    identity_delay: float = 60.0
    "Between attempts while somebody else answers at the router's address: rare, but it may have moved."


class Duties(Protocol):
    """What the owner of an agent does. Calls never overlap, except that `events` comes while `serve` runs."""

    async def prepare(self) -> bool:
        """Before each attempt to connect; False ends the agent: the router is not needed any more."""

    @property
    def service(self) -> Service | None:
        """As what to log in, once prepared."""

    async def serve(self, session: SmpSession) -> float | None:
        """Work until cancelled, which happens when the session ends; or return to have it ended.

        A returned number is the delay before the next attempt; None leaves it to the agent.
        """

    async def events(self, events: list[Received[SmpMessage]]) -> None:
        """Events of the current session; nothing more is read until this returns."""

    async def failed(self, error: ClientError) -> float | None:
        """An attempt to connect failed. As for `serve`, a number is the delay before the next one."""

    async def disconnected(self, reason: ClientError) -> None:
        """The session that was served has ended."""


class RouterAgent:
    """Run `run()` in a task of its own; it ends when `Duties.prepare` says so, or by cancellation."""

    def __init__(
        self,
        server: SmpServer,
        duties: Duties,
        dialer: Dialer,
        config: AgentConfig,
        *,
        chance: Callable[[], float] = random.random,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._server = server
        self._duties = duties
        self._dialer = dialer
        self._config = config
        self._random_bytes = random_bytes
        self._backoff = Backoff(config.first_delay, config.longest_delay, chance)
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """End the current wait between attempts."""
        self._hurry.set()

    async def run(self) -> None:
        while await self._duties.prepare():
            delay = await self._attempt()
            if delay is None:
                delay = self._backoff.next()
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._hurry.wait()

    async def _attempt(self) -> float | None:
        """One session, or one failure to get one; the delay that the owner wants afterwards."""
        loop = asyncio.get_running_loop()
        try:
            session = await connect_smp(
                self._server,
                self._dialer,
                service=self._duties.service,
                on_events=self._duties.events,
                timing=self._config.timing,
                timeout=self._config.connect_timeout,
                random=self._random_bytes,
            )
        except ClientError as error:
            delay = await self._duties.failed(error)
            if delay is None and isinstance(error, WrongIdentity):
                return self._config.identity_delay
            return delay
        started = loop.time()
        delay = await self._use(session)
        if loop.time() - started >= self._config.longest_delay:
            self._backoff.reset()  # a router that drops every connection at once is left in peace
        return delay

    async def _use(self, session: SmpSession) -> float | None:
        delay: float | None = None
        async with session, TaskGroup() as tasks:
            name = f"router {self._server.hosts[0]}"
            work = tasks.create_task(self._duties.serve(session), name=f"{name} subscriptions")
            end = tasks.create_task(session.wait_closed(), name=f"{name} end of session")
            await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not work.cancelled() and work.exception() is None:
                delay = work.result()
            work.cancel()
            end.cancel()
        await self._duties.disconnected(await session.wait_closed())
        return delay
