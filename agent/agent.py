"""The agent: a device's token, its connections and their notifications, in one object.

async with open_agent(AgentConfig(folder)) as agent:
    await agent.register(device_token, Mode.INSTANT, ntf_server)
    connection_id = await agent.create_connection(router)
    received = await agent.on_push(payload)          # a push came: verify, or fetch what it is about
"""

from __future__ import annotations

import asyncio
import logging
import os
import random as chance
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent import rows
from agent.errors import Misused, Refused, Temporary, Unreachable
from agent.queues import Queues
from agent.records import MIN_PERIOD, Connection, Message, Mode, Subscription, Token
from agent.sessions import Sessions
from agent.store import AgentStore
from agent.supervisor import Command, Supervisor, SupervisorConfig
from agent.tokens import Tokens
from agent.wake import (
    CheckPush,
    MessagePush,
    NotificationInfo,
    PushPayload,
    VerificationPush,
    notification_connections,
    parse_push,
)
from protocol.addresses import NtfServer, SmpServer
from protocol.device_token import DeviceToken
from protocol.statuses import TokenStatus
from smp_client.backoff import Backoff
from smp_client.dialer import Dialer, NetworkConfig
from smp_client.requests import SESSION_DEFAULTS, SessionConfig
from transport.cancellation import TaskGroup

logger = logging.getLogger(__name__)


def _wall_time() -> float:
    return datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How an agent works."""

    folder: Path
    "Where its state is kept."
    session: SessionConfig = SESSION_DEFAULTS
    network: NetworkConfig = field(default_factory=NetworkConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    now: Callable[[], float] = _wall_time
    random: Callable[[int], bytes] = os.urandom


class Agent:
    """Use `open_agent`."""

    def __init__(self, store: AgentStore, sessions: Sessions, config: AgentConfig) -> None:
        self.store = store
        self._config = config
        self._queues = Queues(store, sessions, config.random)
        self._supervisor = Supervisor(
            store, sessions, now=config.now, random=config.random, config=config.supervisor
        )
        self._tokens = Tokens(store, sessions, config.random, self._subscribe_as_mode_says)
        self._unfinished = asyncio.Event()
        self._finished = asyncio.Event()
        self._background: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work in the background, with what an earlier run left."""
        self._leave_unfinished()
        self._background = asyncio.get_running_loop().create_task(self._run(), name="agent")

    async def stop(self) -> None:
        """End the background work; raises what broke it."""
        task, self._background = self._background, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        _raise_failure(task)

    async def _run(self) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(self._supervisor.run(), name="notification supervisor")
            tasks.create_task(self._finish(), name="unfinished calls")

    async def _finish(self) -> None:
        """Carry out what was stored by calls that did not get through."""
        config = self._config.supervisor
        backoff = Backoff(config.first_retry, config.longest_retry, chance.random)
        while True:
            await self._unfinished.wait()
            self._unfinished.clear()
            for resume in (self._queues.resume, self._tokens.resume):  # tokens: they subscribe all queues
                try:
                    await resume()
                except Temporary as error:
                    logger.info("%s", error)
                    self._leave_unfinished()
                except (Refused, Unreachable) as error:
                    logger.warning("%s", error)
            if self._unfinished.is_set():
                await asyncio.sleep(backoff.next())
            else:
                backoff.reset()
                self._finished.set()

    def _leave_unfinished(self) -> None:
        self._finished.clear()
        self._unfinished.set()

    async def _kept(self, call: Coroutine[Any, Any, Any]) -> Any:
        """A call whose intent is stored: if the network fails, it is finished in the background."""
        try:
            return await call
        except Temporary:
            self._leave_unfinished()
            raise

    async def settled(self) -> None:
        """Wait until nothing is left to do in the background; raises what broke it."""
        if self._background is None:
            raise Misused("the agent is not started")
        waiting = asyncio.get_running_loop().create_task(self._settled(), name="waiting for the agent")
        await asyncio.wait([waiting, self._background], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        await asyncio.wait([waiting])
        _raise_failure(self._background)
        raise Misused("the agent was stopped")

    async def _settled(self) -> None:
        await self._finished.wait()
        await self._supervisor.settled()

    # The token

    async def register(
        self, device_token: DeviceToken, mode: Mode, server: NtfServer, period: int = MIN_PERIOD
    ) -> TokenStatus:
        """Make a notification server know this device. With another mode, device or server: change it.

        `period` is in minutes, for the periodic mode.
        """
        status: TokenStatus = await self._kept(self._tokens.register(device_token, mode, server, period))
        return status

    async def verify(self, nonce: bytes, boxed_code: bytes) -> TokenStatus:
        """Answer the verification push."""
        status: TokenStatus = await self._kept(self._tokens.verify(nonce, boxed_code))
        return status

    async def check(self) -> TokenStatus:
        """What the server thinks of the token."""
        return await self._tokens.check()

    async def delete_token(self) -> None:
        """No more notifications on this device."""
        subscribed = [row.connection_id for row in await self.store.subscriptions()]
        try:
            await self._kept(self._tokens.delete())
        finally:
            await self._unsubscribe(subscribed)

    async def token(self) -> Token | None:
        return await self.store.token()

    async def _subscribe_as_mode_says(self, token: Token) -> None:
        if token.mode is Mode.INSTANT:
            connections = await self.store.connections()
            wanted = [c.connection_id for c in connections if c.wants_notifications]
            unwanted = [c.connection_id for c in connections if not c.wants_notifications]
            await self._supervisor.submit(Command.CREATE, wanted)
            await self._supervisor.submit(Command.SMP_DELETE, unwanted)
        else:
            await self._unsubscribe([row.connection_id for row in await self.store.subscriptions()])

    async def _unsubscribe(self, connection_ids: Sequence[int]) -> None:
        self._supervisor.flush()
        await self._supervisor.submit(Command.SMP_DELETE, connection_ids)

    # Connections

    async def create_connection(self, router: SmpServer, *, wants_notifications: bool = True) -> int:
        """A connection that can receive; `link` tells how to join it."""
        call = self._queues.create(router, wants_notifications=wants_notifications)
        connection_id: int = await self._kept(call)
        if wants_notifications:
            await self._supervisor.submit(Command.CREATE, [connection_id])
        return connection_id

    async def link(self, connection_id: int) -> str:
        return await self._queues.link(connection_id)

    async def join(self, link: str, reply_at: SmpServer | None = None) -> int:
        """A connection that can send, and with `reply_at` also receive."""
        connection_id: int = await self._kept(self._queues.join(link, reply_at))
        if reply_at is not None:
            await self._supervisor.submit(Command.CREATE, [connection_id])
        return connection_id

    async def send(self, connection_id: int, body: bytes, *, notification: bool = True) -> None:
        """Send; after `Temporary` the message is kept and goes out by itself."""
        await self._kept(self._queues.send(connection_id, body, notification=notification))

    async def fetch(self, connection_id: int) -> list[Message]:
        """Read what waits in the connection's queue."""
        return await self._queues.fetch(connection_id)

    async def fetch_all(self) -> list[Message]:
        """Read all queues."""
        readable = [c.connection_id for c in await self.store.connections() if c.can_receive]
        return [message for connection_id in readable for message in await self.fetch(connection_id)]

    async def delete_connection(self, connection_id: int) -> None:
        await self._queues.delete(connection_id)

    async def connections(self) -> list[Connection]:
        return await self.store.connections()

    # Notifications

    async def set_notifications(self, connection_id: int, wanted: bool) -> None:
        """Switch notifications of one connection on or off."""
        if connection_id not in [c.connection_id for c in await self.store.connections()]:
            raise Misused(f"there is no connection {connection_id}")
        await self.store.write([rows.put_connection(connection_id, wanted)])
        await self._supervisor.submit(Command.CREATE if wanted else Command.SMP_DELETE, [connection_id])

    async def subscriptions(self) -> list[Subscription]:
        return await self.store.subscriptions()

    async def notification_connections(self, payload: PushPayload) -> list[NotificationInfo]:
        """What a message push is about: the connections to fetch from."""
        push = parse_push(payload)
        token = await self.store.token()
        if token is None:
            raise Misused("the device is not registered")
        if not isinstance(push, MessagePush):
            return []
        return await notification_connections(self.store, token, push)

    async def on_push(self, payload: PushPayload) -> list[Message]:
        """Do what a push asks for; the messages that it led to."""
        push = parse_push(payload)
        if isinstance(push, VerificationPush):
            await self.verify(push.nonce, push.boxed_code)
            return []
        if isinstance(push, CheckPush):
            return await self.fetch_all()
        infos = await self.notification_connections(payload)
        connection_ids = dict.fromkeys(info.connection_id for info in infos)
        return [message for connection_id in connection_ids for message in await self.fetch(connection_id)]


def _raise_failure(task: asyncio.Task[None]) -> None:
    """What ended a task, without the groups around it."""
    failure = None if task.cancelled() else task.exception()
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise failure


@asynccontextmanager
async def open_agent(config: AgentConfig, store: AgentStore | None = None) -> AsyncIterator[Agent]:
    """An agent at work, until the block ends. Raises `StoreFailed` if its state cannot be used."""
    if store is None:
        async with AgentStore.open(config.folder) as opened, open_agent(config, opened) as agent:
            yield agent
        return
    sessions = Sessions(Dialer(config.network), config=config.session, random=config.random)
    agent = Agent(store, sessions, config)
    agent.start()
    try:
        yield agent
    finally:
        try:
            await agent.stop()
        finally:
            await sessions.close()
