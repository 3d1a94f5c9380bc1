"""What an application does about notifications, and a worker per server that carries it out.

phone = agent.notifications
await phone.register(device_token, Mode.INSTANT, ntf_server)
await phone.on_push(payload)  # for every push: verifies the token, or reads what the push is about
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from agent.duplex.defects import survived
from agent.duplex.records import ReceiveQueue
from agent.duplex.replies import HostFailure, RouterFailure, TemporaryFailure
from agent.duplex.store import DuplexStore, Transact, Tx
from agent.duplex.tables import connection, receive_queue, set_connection
from agent.duplex.workers import Wait, WorkerTasks
from agent.notifications import rows
from agent.notifications.pushes import (
    CheckPush,
    MessagePush,
    NotificationInfo,
    PushPayload,
    VerificationPush,
    announced,
    parse_push,
)
from agent.notifications.records import MIN_PERIOD, Mode, Subscription, Token
from agent.notifications.sessions import NtfSessions
from agent.notifications.subscribing import (
    Answer,
    NotificationConfig,
    after_router,
    after_server,
    router_command,
    server_request,
    take,
    take_deletions,
)
from agent.notifications.tokens import Superseded, Tokens, delete_token, registered
from protocol.addresses import NtfServer, SmpServer, parse_ntf_server, parse_smp_server
from protocol.device_token import DeviceToken
from protocol.smp_messages import SmpCommand, SmpMessage
from protocol.statuses import TokenStatus
from smp_client.errors import ClientError
from smp_client.requests import Request
from transport.cancellation import TaskGroup

logger = logging.getLogger(__name__)

AskRouter = Callable[[SmpServer, Sequence[Request[SmpCommand]]], Awaitable[list[SmpMessage | ClientError]]]
"An answer, or the error in its place, per command."
PAUSE_AFTER_DEFECT = 60.0
"Seconds."
BATCH = 90
"Rows that go to a server together."


class Notifications:
    """Made by the agent, as `agent.notifications`."""

    def __init__(
        self,
        tasks: TaskGroup,
        store: DuplexStore,
        transact: Transact,
        ask_router: AskRouter,
        sessions: NtfSessions,
        fetch: Callable[[list[int]], None] | None,
        now: Callable[[], float],
        config: NotificationConfig,
    ) -> None:
        """`fetch` reads queues; without it they are subscribed, and messages come by themselves."""
        self._store = store
        self._transact = transact
        self._ask_router = ask_router
        self._sessions = sessions
        self._fetch = fetch
        self._now = now
        self._after_server = partial(after_server, config)
        self._tokens = Tokens(transact, sessions)
        self._tasks = tasks
        self._workers: WorkerTasks[str] = WorkerTasks(
            "notifications at", tasks, self._step, rest_is_idle=True
        )
        self._replanned = asyncio.Event()
        self.idle = self._workers.idle

    async def start(self) -> None:
        """Go on with what an earlier run left."""
        await self._transact(rows.follow_wishes)
        self.wake(await self._busy())
        self._tasks.create_task(self._watch(), name="checks of notifications")

    def wake(self, servers: set[str]) -> None:
        for server in servers:
            self._workers.wake(server)
        if servers:
            self._replanned.set()

    async def _busy(self) -> set[str]:
        return await self._store.read(lambda db: rows.busy_servers(db, int(self._now())))

    async def _watch(self) -> None:
        """What was planned for later is begun when it is due."""
        while True:
            if not await survived(self._next_check(), "checks of notifications"):
                await asyncio.sleep(PAUSE_AFTER_DEFECT)

    async def _next_check(self) -> None:
        """Wait until something is due, and begin it; return also if there may be something earlier."""
        self._replanned.clear()
        due = await self._store.read(lambda db: rows.next_due(db, int(self._now())))
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - self._now())):
                await self._replanned.wait()
                return
        for server in await self._busy():
            self._workers.wake(server)

    # The token

    async def register(
        self, device_token: DeviceToken, mode: Mode, server: NtfServer, period: int = MIN_PERIOD
    ) -> TokenStatus:
        """Make a notification server know this device. With another mode, device or server: change it.

        `period` is in minutes, for the periodic mode. If the network fails, it is done in the background.
        """
        return await self._kept(self._tokens.register(device_token, mode, server, period))

    async def verify(self, nonce: bytes, boxed_code: bytes) -> TokenStatus:
        """Answer the verification push."""
        return await self._kept(self._tokens.verify(nonce, boxed_code))

    async def check(self) -> TokenStatus:
        """What the server thinks of the token."""
        return await self._kept(self._tokens.check())

    async def _kept(self, call: Awaitable[TokenStatus]) -> TokenStatus:
        """A call whose intent is stored: what is left of it is finished in the background."""
        try:
            return await call
        except Superseded:
            token = await self.token()
            return TokenStatus.NEW if token is None else token.status
        finally:
            self.wake(await self._busy())

    async def delete(self) -> None:
        """No more notifications on this device."""
        await self._transact(delete_token)

    async def token(self) -> Token | None:
        return await self._store.read(rows.token_of)

    # Connections

    async def set_wanted(self, connection_id: int, wanted: bool) -> None:
        """Switch notifications of one connection on or off."""

        def change(tx: Tx) -> None:
            connection(tx.db, connection_id)
            set_connection(tx, connection_id, wants_notifications=wanted)
            rows.follow_wishes(tx)

        await self._transact(change)

    async def subscriptions(self) -> list[Subscription]:
        return await self._store.read(rows.subscriptions)

    # Pushes

    async def announced(self, payload: PushPayload) -> list[NotificationInfo]:
        """What a message push is about."""
        push = parse_push(payload)
        if not isinstance(push, MessagePush):
            return []
        return await self._store.read(lambda db: announced(db, registered(db), push))

    async def on_push(self, payload: PushPayload) -> list[int]:
        """Do what a push asks for.

        Returns the connections that are being read; `Fetched` is the event after the last of their messages.
        An agent that is subscribed reads nothing here: messages come by themselves.
        """
        push = parse_push(payload)
        if isinstance(push, VerificationPush):
            await self.verify(push.nonce, push.boxed_code)
            return []
        if isinstance(push, CheckPush):
            return self._read(await self._store.read(_all_queues))
        infos = await self.announced(payload)
        return self._read(await self._store.read(lambda db: _queues_of(db, infos)))

    def _read(self, queues: list[tuple[int, int]]) -> list[int]:
        if self._fetch is None:
            return []
        self._fetch([queue_id for queue_id, _ in queues])
        return list(dict.fromkeys(connection_id for _, connection_id in queues))

    # The worker of a server

    async def _step(self, name: str, wait: Wait) -> bool:
        try:
            busy = await self._work_at(name)
        except (TemporaryFailure, HostFailure) as failure:
            level = logging.INFO if isinstance(failure, TemporaryFailure) else logging.WARNING
            logger.log(level, "notifications: %s", failure)
            await wait.after_failure()
            return True
        wait.succeeded()
        return busy

    async def _work_at(self, name: str) -> bool:
        if name.startswith(rows.DELETIONS):
            return await self._delete_at(parse_ntf_server(name.removeprefix(rows.DELETIONS)))
        return await (self._at_router(name) if name.startswith("smp") else self._at_server(name))

    async def _at_router(self, name: str) -> bool:
        server = parse_smp_server(name)

        def look(db: sqlite3.Connection) -> list[tuple[Subscription, ReceiveQueue]]:
            due = rows.due_at_router(db, server, int(self._now()), BATCH)
            return [(row, queue) for row in due if (queue := receive_queue(db, row.queue_id)) is not None]

        due = await self._store.read(look)
        if not due:
            return False
        requests: list[Request[SmpCommand]] = [queue.request(router_command(row)) for row, queue in due]
        answers: list[Answer] = [*await self._ask_router(server, requests)]
        _raise(await self._transact(lambda tx: take(tx, [row for row, _ in due], answers, after_router)))
        return True

    async def _at_server(self, name: str) -> bool:
        server = parse_ntf_server(name)
        token = await self.token()
        if token is None or token.server != server:
            return False
        if token.is_unfinished:
            await self._tokens.resume(token)
            return True
        due = await self._store.read(lambda db: rows.due_at_server(db, server, int(self._now()), BATCH))
        if not due:
            return False
        requests = [server_request(row, token) for row in due]
        answers: list[Answer] = [*await self._sessions.ask_many(server, requests)]
        _raise(await self._transact(lambda tx: take(tx, due, answers, self._after_server)))
        return True

    async def _delete_at(self, server: NtfServer) -> bool:
        """Subscriptions first: what has a token that cannot be deleted must not wake the device either."""
        due = await self._store.read(lambda db: rows.deleted_subscriptions(db, server, BATCH))
        if due:
            answers = await self._sessions.ask_many(server, [row.request for row in due])
            _raise(await self._transact(lambda tx: take_deletions(tx, due, answers)))
        tokens = await self._store.read(lambda db: rows.deleted_tokens(db, server))
        for token in tokens:
            await self._tokens.delete(token)
        return bool(due or tokens)


def _all_queues(db: sqlite3.Connection) -> list[tuple[int, int]]:
    sql = "SELECT queue_id, connection_id FROM receive_queues WHERE NOT deleting ORDER BY queue_id"
    return [(queue_id, connection_id) for queue_id, connection_id in db.execute(sql)]


def _queues_of(db: sqlite3.Connection, infos: list[NotificationInfo]) -> list[tuple[int, int]]:
    """Those that a push names. While one replaces another both are read: what moves them sends no push."""
    sql = "SELECT queue_id FROM receive_queues WHERE connection_id = ? AND NOT deleting"
    named = [(info.queue_id, info.connection_id) for info in infos]
    companions = [(queue_id, c) for _, c in named for (queue_id,) in db.execute(sql, (c,))]
    return list(dict.fromkeys(named + companions))


def _raise(failure: RouterFailure | None) -> None:
    if failure is not None:
        raise failure
