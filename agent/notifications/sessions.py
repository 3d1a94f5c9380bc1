"""One open session per notification server, made when first needed and again when it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agent.duplex.replies import answer_to
from protocol.addresses import NtfServer
from protocol.ntf_commands import NtfCommand, NtfResponse
from smp_client.errors import ClientError
from smp_client.requests import Request
from smp_client.session import NtfSession


class NtfSessions:
    def __init__(self, connect: Callable[[NtfServer], Awaitable[NtfSession]]) -> None:
        self._connect = connect
        self._sessions: dict[NtfServer, NtfSession] = {}
        self._locks: dict[NtfServer, asyncio.Lock] = {}

    async def ask(self, server: NtfServer, request: Request[NtfCommand]) -> NtfResponse:
        """The answer to one command; raises RouterFailure for none and for `ERR`."""
        return await answer_to(self._request(server, request))

    async def _request(self, server: NtfServer, request: Request[NtfCommand]) -> NtfResponse:
        session = await self._session(server)
        return await session.request(*request)

    async def ask_many(
        self, server: NtfServer, requests: Sequence[Request[NtfCommand]]
    ) -> list[NtfResponse | ClientError]:
        """An answer, or the error in its place, per command."""
        try:
            session = await self._session(server)
        except ClientError as error:
            return [error] * len(requests)
        return await session.request_many(requests)

    async def _session(self, server: NtfServer) -> NtfSession:
        async with self._locks.setdefault(server, asyncio.Lock()):
            session = self._sessions.get(server)
            if session is None or session.is_closed:
                await self._drop(server)
                session = self._sessions[server] = await self._connect(server)
            return session

    async def _drop(self, server: NtfServer) -> None:
        session = self._sessions.pop(server, None)
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """End all sessions; requests under way fail."""
        for server in list(self._sessions):
            await self._drop(server)
