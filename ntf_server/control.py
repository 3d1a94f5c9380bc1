"""The control port: a line-based talk with an operator on the same machine."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from dataclasses import asdict
from enum import IntEnum

from ntf_server.config import LOCALHOST, AuthConfig
from ntf_server.subscriber import RouterSubscriber
from store.interface import ControlStore, StoreError
from store.leases import RESUBSCRIBE, SOLE_OWNER, Notice, Ownership

MAX_LINE = 4096
IDLE_TIMEOUT = 600.0
STRANGER_TIMEOUT = 10.0
"For who has not logged in: silent talks must not keep the operator out for long."
FAILED_LOGIN_PAUSE = 1.0
"A guess a second, over all connections, is no way to find a password."
MAX_TALKS = 16

HELP = """\
auth PASSWORD        log in as user or admin
stats                what is in the store
server-info          versions and routers in short
subs [SERVER]        state of the routers, or of one (address or host)
daemons              who shares the store, and what each owns
resubscribe SERVER   connect anew to a router, whichever daemon owns it (admin)
help, quit"""


class Role(IntEnum):
    NONE = 0
    USER = 1
    ADMIN = 2


NEEDED = {
    "stats": Role.USER,
    "server-info": Role.USER,
    "subs": Role.USER,
    "daemons": Role.USER,
    "resubscribe": Role.ADMIN,
}
KNOWN = {*NEEDED, "auth", "help"}


class ControlPort:
    """Listens on localhost only. An empty password lets nobody in."""

    def __init__(
        self,
        store: ControlStore,
        subscriber: RouterSubscriber,
        config: AuthConfig,
        ownership: Ownership = SOLE_OWNER,
    ) -> None:
        self._store = store
        self._subscriber = subscriber
        self._ownership = ownership
        self._passwords = {
            Role.ADMIN: config.control_port_admin_password,
            Role.USER: config.control_port_user_password,
        }
        self._guessing = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> None:
        self._server = await asyncio.start_server(self._handle, LOCALHOST, port, limit=MAX_LINE)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            if len(self._talks) <= MAX_TALKS:
                await self._talk(reader, writer)
        except (OSError, TimeoutError, ValueError):
            pass  # gone, silent, or a line without end
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        role = Role.NONE
        writer.write(b"ntf-server control port; 'help' for help\n")
        while True:
            async with asyncio.timeout(IDLE_TIMEOUT if role else STRANGER_TIMEOUT):
                line = await reader.readline()
            command, _, argument = line.decode("utf-8", "replace").strip().partition(" ")
            if not line or command == "quit":
                return
            if command == "auth":
                async with self._guessing:
                    role = self._log_in(argument)
                    if role is Role.NONE:
                        await asyncio.sleep(FAILED_LOGIN_PAUSE)
                answer = f"role: {role.name.lower()}" if role else "AUTH"
            else:
                answer = await self._answer(role, command, argument.strip())
            writer.write(answer.encode() + b"\n")
            async with asyncio.timeout(STRANGER_TIMEOUT):
                await writer.drain()
            if command not in KNOWN:
                return  # a browser that was led here must not get to the body of its request

    def _log_in(self, password: str) -> Role:
        for role in (Role.ADMIN, Role.USER):
            expected = self._passwords[role]
            if expected and hmac.compare_digest(expected.encode(), password.encode()):
                return role
        return Role.NONE

    async def _answer(self, role: Role, command: str, argument: str) -> str:
        if command == "help":
            return HELP
        if command not in NEEDED:
            return f"unknown command {command!r}; 'help' for help"
        if role < NEEDED[command]:
            return "AUTH"
        try:
            return await self._run(command, argument)
        except StoreError as error:
            return f"error: {error}"

    async def _run(self, command: str, argument: str) -> str:
        if command == "stats":
            return json.dumps(asdict(await self._store.counts()))
        if command == "daemons":
            daemons = await self._ownership.daemons()
            return "\n".join(json.dumps(one._asdict()) for one in daemons) or "this one alone"
        if command == "resubscribe":
            return await self._resubscribe(argument)
        statuses = self._subscriber.status()
        if command == "server-info":
            connected = sum(status.connected for status in statuses)
            return json.dumps(
                {"python": sys.version.split()[0], "routers": len(statuses), "connected": connected}
            )
        wanted = [status for status in statuses if argument in status.server]
        return "\n".join(json.dumps(asdict(status)) for status in wanted) or "no such router"

    async def _resubscribe(self, server: str) -> str:
        if self._subscriber.resubscribe(server):
            return "ok"
        if not self._ownership.is_shared:
            return "no such router"
        await self._ownership.say(Notice(RESUBSCRIBE, tuple(server.split())))
        return "not of this daemon: the others were told"
