"""One open session per server, made when first needed and again when it was lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from agent.errors import failure_of
from protocol.addresses import NtfServer, ServerAddress, SmpServer
from protocol.ntf_commands import NtfCommand, NtfResponse
from protocol.smp_messages import SmpCommand, SmpMessage
from smp_client.dialer import Dialer
from smp_client.errors import ClientError
from smp_client.requests import Request, RequestSession, SessionConfig
from smp_client.session import NtfSession, SmpSession, connect_ntf, connect_smp

In = TypeVar("In")
Out = TypeVar("Out")
Server = TypeVar("Server", bound=ServerAddress)


class SessionPool(Generic[Server, In, Out]):
    """Sessions of one protocol."""

    def __init__(self, connect: Callable[[Server], Awaitable[RequestSession[In, Out]]]) -> None:
        self._connect = connect
        self._sessions: dict[Server, RequestSession[In, Out]] = {}
        self._locks: dict[Server, asyncio.Lock] = {}

    async def ask(self, server: Server, request: Request[Out]) -> In:
        """The answer to one command; raises `AgentError` for none and for `ERR`."""
        (answer,) = await self.ask_many(server, [request])
        if (failure := failure_of(answer)) is not None:
            raise failure
        assert not isinstance(answer, ClientError)
        return answer

    async def ask_many(self, server: Server, requests: Sequence[Request[Out]]) -> list[In | ClientError]:
        """An answer, or the error in its place, per command."""
        try:
            session = await self._session(server)
        except ClientError as error:
            return [error] * len(requests)
        return await session.request_many(requests)

    async def _session(self, server: Server) -> RequestSession[In, Out]:
        async with self._locks.setdefault(server, asyncio.Lock()):
            session = self._sessions.get(server)
            if session is None or session.is_closed:
                await self._drop(server)
                session = self._sessions[server] = await self._connect(server)
            return session

    async def _drop(self, server: Server) -> None:
        session = self._sessions.pop(server, None)
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """End all sessions; requests under way fail."""
        for server in list(self._sessions):
            await self._drop(server)


class Sessions:
    """Everything the agent talks to."""

    def __init__(
        self,
        dialer: Dialer,
        *,
        config: SessionConfig,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        async def to_router(server: SmpServer) -> SmpSession:
            return await connect_smp(server, dialer, config=config, random=random)

        async def to_ntf(server: NtfServer) -> NtfSession:
            return await connect_ntf(server, dialer, config=config, random=random)

        self.smp: SessionPool[SmpServer, SmpMessage, SmpCommand] = SessionPool(to_router)
        self.ntf: SessionPool[NtfServer, NtfResponse, NtfCommand] = SessionPool(to_ntf)

    async def close(self) -> None:
        await self.smp.close()
        await self.ntf.close()
