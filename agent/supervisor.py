"""Notification subscriptions of all queues: commands in, two stages of workers, every step stored first.

    command -> rows by router -> SMP workers: NKEY, NDEL -> NTF workers: SNEW, SCHK -> checked now and then

One worker per server takes whatever is due there in one batch. A server that is down holds up only its own
rows; they stay as they are until it answers. A killed agent finds its rows again and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random as chance
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

from agent import rows
from agent.errors import AgentError, Refused, Temporary, Unreachable, failure_of
from agent.records import Mode, ReceiveQueue, SubAction, Subscription, Token
from agent.rows import Change
from agent.sessions import Sessions
from agent.store import AgentStore
from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import NO_ENTITY
from protocol.errors import AUTH, DecodeError
from protocol.ntf_commands import IdSub, NtfCommand, Schk, Snew, Sub
from protocol.smp_messages import Ndel, Nid, Nkey, NotifierKeys, SmpCommand
from protocol.statuses import SUBSCRIBABLE, TokenStatus
from smp_client.backoff import Backoff
from smp_client.requests import Request
from transport.cancellation import TaskGroup

logger = logging.getLogger(__name__)

KEY_SIZE = 32
COMMAND_QUEUE = 100
BATCH = 90
"Rows that go to a server together."
UNUSABLE = "an answer that makes no sense"


class Command(Enum):
    CREATE = "notifications are wanted"
    SMP_DELETE = "notifications are not wanted: the router is to forget the notifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """Seconds."""

    first_check: float = 600.0
    "From SNEW to the first SCHK."
    check_interval: float = 86_400.0
    recreate_delay: float = 600.0
    "After the server refused a new subscription, before it is tried with a new notifier."
    first_retry: float = 1.0
    longest_retry: float = 60.0


Server = SmpServer | NtfServer
Step = Callable[[], Awaitable[bool]]
"Does what is due; whether there was anything."


class Supervisor:
    """`run` does the work; `submit` says what is wanted."""

    def __init__(
        self,
        store: AgentStore,
        sessions: Sessions,
        *,
        now: Callable[[], float],
        random: Callable[[int], bytes],
        config: SupervisorConfig,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._now = now
        self._random = random
        self._config = config
        self._commands: asyncio.Queue[tuple[Command, Sequence[int]]] = asyncio.Queue(COMMAND_QUEUE)
        self._wakes: dict[Server, asyncio.Event] = {}
        self._tasks: TaskGroup | None = None
        self._progress = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled, beginning with what an earlier run left."""
        async with TaskGroup() as tasks:
            self._tasks = tasks
            for left in await self._store.subscriptions():
                self._wake(left.smp_server)
                self._wake(left.ntf_server)
            while True:
                command, connection_ids = await self._commands.get()
                try:
                    await self._process(command, connection_ids)
                finally:
                    self._commands.task_done()

    async def submit(self, command: Command, connection_ids: Sequence[int]) -> None:
        """Waits if too many commands wait."""
        await self._commands.put((command, connection_ids))

    def flush(self) -> None:
        """Forget commands that were not begun: something else is wanted now."""
        while not self._commands.empty():
            self._commands.get_nowait()
            self._commands.task_done()

    async def settled(self) -> None:
        """Wait until every command was carried out and nothing is due anywhere."""
        while True:
            progress = self._progress
            await self._commands.join()
            now = self._now()
            waiting = [row for row in await self._store.subscriptions() if row.action and row.due <= now]
            if not waiting:
                return
            await progress.wait()

    # Commands

    async def _process(self, command: Command, connection_ids: Sequence[int]) -> None:
        token = await self._store.token()
        known = {row.connection_id: row for row in await self._store.subscriptions()}
        changes: list[Change] = []
        servers: set[Server] = set()
        for connection_id in connection_ids:
            before = known.get(connection_id)
            if before is not None:
                servers |= {before.smp_server, before.ntf_server}
            if command is Command.SMP_DELETE:
                after = (
                    None if before is None else replace(before, action=SubAction.SMP_DELETE, due=self._now())
                )
            else:
                after = await self._wanted(connection_id, token, before)
            if after is None:
                continue
            changes.append(rows.put_subscription(after))
            servers |= {after.smp_server, after.ntf_server}
        await self._commit(changes, servers)

    async def _wanted(
        self, connection_id: int, token: Token | None, before: Subscription | None
    ) -> Subscription | None:
        """A row for a queue that should have a subscription and has none."""
        if token is None or token.token_id is None:
            return None
        if token.status is not TokenStatus.ACTIVE or token.mode is not Mode.INSTANT:
            return None
        queue = await self._store.receive_queue(connection_id)
        if queue is None or queue.recipient_id is None:
            return None
        if (
            before is not None
            and (before.token_id, before.ntf_server) == (token.token_id, token.server)
            and before.action not in (None, SubAction.SMP_DELETE)
        ):
            return None  # it has one, or is about to
        return self._new_row(queue, token)

    def _new_row(self, queue: ReceiveQueue, token: Token) -> Subscription:
        assert token.token_id is not None
        return Subscription(
            connection_id=queue.connection_id,
            smp_server=queue.server,
            ntf_server=token.server,
            token_id=token.token_id,
            action=SubAction.SMP_KEY,
            due=self._now(),
            notifier_key=Ed25519PrivateKey(self._random(KEY_SIZE)),
            dh_key=X25519PrivateKey(self._random(KEY_SIZE)),
        )

    def _recreated(self, row: Subscription, delay: float = 0.0) -> Subscription:
        """From the beginning, with a new notifier."""
        return replace(
            row,
            action=SubAction.SMP_KEY,
            due=self._now() + delay,
            notifier_key=Ed25519PrivateKey(self._random(KEY_SIZE)),
            dh_key=X25519PrivateKey(self._random(KEY_SIZE)),
            notifier_id=None,
            dh_secret=None,
            subscription_id=None,
        )

    async def _commit(self, changes: Sequence[Change], servers: set[Server]) -> None:
        if changes:
            await self._store.write(changes)
        for server in servers:
            self._wake(server)
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()

    # Workers

    def _wake(self, server: Server) -> None:
        wake = self._wakes.get(server)
        if wake is not None:
            wake.set()
            return
        assert self._tasks is not None
        wake = self._wakes[server] = asyncio.Event()
        self._tasks.create_task(self._work(server, wake), name=f"notifications at {server.hosts[0]}")

    async def _work(self, server: Server, wake: asyncio.Event) -> None:
        config = self._config
        backoff = Backoff(config.first_retry, config.longest_retry, chance.random)
        while True:
            wake.clear()
            try:
                if isinstance(server, SmpServer):
                    busy = await self._smp_step(server)
                else:
                    busy = await self._ntf_step(server)
                backoff.reset()
            except Temporary as error:
                logger.info("%s: %s", server.hosts[0], error)
                await asyncio.sleep(backoff.next())
                continue
            except Unreachable as error:
                logger.warning("%s: %s", server.hosts[0], error)
                await asyncio.sleep(config.longest_retry)
                continue
            if not busy:
                await self._wait(server, wake)

    async def _wait(self, server: Server, wake: asyncio.Event) -> None:
        """Until something new is to be done, or what was planned is due."""
        due = await self._store.next_due(server)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - self._now())):
                await wake.wait()

    # Stage 1: routers

    async def _smp_step(self, server: SmpServer) -> bool:
        due = await self._store.smp_actions(server, self._now(), BATCH)
        requests: list[Request[SmpCommand]] = []
        for row in due:
            queue = await self._store.receive_queue(row.connection_id)
            assert queue is not None  # the row would have gone with it
            assert queue.recipient_id is not None
            keys = NotifierKeys(row.notifier_key.public, row.dh_key.public)
            command = Nkey(keys) if row.action is SubAction.SMP_KEY else Ndel()
            requests.append(Request(queue.recipient_id, command, queue.recipient_key))
        if not due:
            return False
        await self._take(due, await self._sessions.smp.ask_many(server, requests), self._after_smp)
        return True

    def _after_smp(self, row: Subscription, answer: object, refused: Refused | None) -> Subscription | None:
        if row.action is SubAction.SMP_DELETE:
            is_done = refused is None or refused.error == AUTH  # AUTH: the queue is gone
            return None if is_done else _given_up(row, _words(refused))
        if not isinstance(answer, Nid):
            return _given_up(row, _words(refused))
        try:
            secret = row.dh_key.exchange(answer.ids.dh_key)
        except DecodeError:
            return _given_up(row, UNUSABLE)
        return replace(
            row,
            action=SubAction.NTF_CREATE,
            due=self._now(),
            notifier_id=answer.ids.notifier_id,
            dh_secret=secret,
        )

    # Stage 2: the notification server

    async def _ntf_step(self, server: NtfServer) -> bool:
        due = await self._store.ntf_actions(server, self._now(), BATCH)
        token = await self._store.token()
        mine = [row for row in due if token is not None and token.token_id == row.token_id]
        others = [row for row in due if row not in mine]
        if others:  # of a token that is given up; the next active token makes them anew
            await self._commit(
                [rows.advance_subscription(row, _given_up(row, "no token")) for row in others], set()
            )
        if mine:
            assert token is not None
            requests = [_ntf_request(row, token) for row in mine]
            await self._take(mine, await self._sessions.ntf.ask_many(server, requests), self._after_ntf)
        return bool(due)

    def _after_ntf(self, row: Subscription, answer: object, refused: Refused | None) -> Subscription | None:
        if row.action is SubAction.NTF_CREATE:
            if isinstance(answer, IdSub):
                return replace(
                    row,
                    action=SubAction.NTF_CHECK,
                    due=self._now() + self._config.first_check,
                    subscription_id=answer.subscription_id,
                    status="NEW",
                )
            if refused is not None and refused.error == AUTH:
                return self._recreated(row, self._config.recreate_delay)
            return _given_up(row, _words(refused))
        if isinstance(answer, Sub):
            checked = replace(row, status=answer.status.text)
            if answer.status.state in SUBSCRIBABLE:
                return replace(checked, due=self._now() + self._config.check_interval)
            return self._recreated(checked)
        if refused is not None and refused.error == AUTH:
            return self._recreated(row)
        return _given_up(row, _words(refused))

    async def _take(
        self,
        due: Sequence[Subscription],
        answers: Sequence[object],
        after: Callable[[Subscription, object, Refused | None], Subscription | None],
    ) -> None:
        """Store the results of a batch together; then raise if some of it has to be tried again."""
        changes: list[Change] = []
        servers: set[Server] = set()
        again: AgentError | None = None
        for row, answer in zip(due, answers, strict=True):
            failure = failure_of(answer)
            if failure is not None and not isinstance(failure, Refused):
                again = failure
                continue
            result = after(row, answer, failure)
            if result is None:
                changes.append(rows.drop_subscription(row))
            else:
                changes.append(rows.advance_subscription(row, result))
            servers |= {row.smp_server, row.ntf_server}
        await self._commit(changes, servers)
        if again is not None:
            raise again


def _ntf_request(row: Subscription, token: Token) -> Request[NtfCommand]:
    if row.action is SubAction.NTF_CREATE:
        assert row.notifier_id is not None
        queue = SmpQueueNtf(row.smp_server, row.notifier_id)
        return Request(NO_ENTITY, Snew(row.token_id, queue, row.notifier_key), token.auth_key)
    assert row.subscription_id is not None
    return Request(row.subscription_id, Schk(), token.auth_key)


def _words(refused: Refused | None) -> str:
    return UNUSABLE if refused is None else str(refused.error)


def _given_up(row: Subscription, why: str) -> Subscription:
    """Nothing more is tried until somebody asks for it."""
    return replace(row, action=None, status=f"given up: {why}")
