"""Connecting to a server: TLS, its identity, the handshake of its protocol; then requests.

    async with await connect_smp(server, Dialer(), on_events=handle) as session:
        ids = await session.request(NO_ENTITY, New(recipient_key=..., dh_key=...), recipient_private_key)

See `smp_client.requests` for requests, events, deadlines and the end of a session. `session.params` has the
version and, in a service session, the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from OpenSSL import SSL

from protocol import ntf_commands, smp_messages
from protocol.addresses import NtfServer, ServerAddress, SmpServer
from protocol.connection import Connection, Received
from protocol.crypto import KEY_SIZE, Ed25519PrivateKey, X25519PrivateKey
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, NtfCommand, NtfResponse
from protocol.ntf_handshake import NtfClientHandshake
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import ServiceLogin, ServiceRole, SmpClientHandshake
from protocol.smp_messages import New, Nsub, Nsubs, SmpCommand, SmpMessage, Sub, Subs
from protocol.versions import NTF_ALPN, NTF_VERSIONS, SMP_ALPN, SMP_VERSIONS, VersionRange
from smp_client.dialer import Dialer
from smp_client.errors import ConnectFailed
from smp_client.requests import SESSION_DEFAULTS, Nonsense, RequestSession, SessionConfig
from transport.certificates import Credentials
from transport.streams import TlsStream
from transport.tls import client_context

S = TypeVar("S", bound=RequestSession[Any, Any])
SmpEvents = Callable[[list[Received[SmpMessage]]], Awaitable[None]]

OVERLAP = 20.0
"Seconds for a router to send the last of what it has for a session that lost its queues; END takes up to 15."


@dataclass(frozen=True, slots=True)
class Service:
    """As what a client logs in: a certificate with its key, and a role."""

    credentials: Credentials
    role: ServiceRole = ServiceRole.NOTIFIER


class SmpSession(RequestSession[SmpMessage, SmpCommand]):
    """Requests and events of one connection to a router."""

    associating = (Nsub, Sub, New)

    async def subscribe_service(self, command: Subs | Nsubs) -> SmpMessage:
        """All queues associated with the session's service at once; raises `ClientError`."""
        service = self.params.service
        assert service is not None
        return await self.request(service.service_id, command, service.private_key)


class FormerSession:
    """A session that this side gave up, read on until another one has its queues.

    A router sends a notification once, to whoever subscribed last. If it does not answer a request, another
    session is tried; but until that one is subscribed, what the router sends still comes to the old one. And
    what it sent before it heard of the new one is on the way for as long as the network takes.

    Owns the session, and a task that ends it: some time after `succeeded`, or at `close`.
    """

    def __init__(self, session: SmpSession, name: str) -> None:
        self._session = session
        self._succeeded = asyncio.Event()
        session.when_closed(self._succeeded.set)
        self._task = asyncio.get_running_loop().create_task(self._read_on(), name=f"former session {name}")

    @property
    def is_storing(self) -> bool:
        return self._session.is_consuming

    def succeeded(self) -> None:
        """Another session has the queues."""
        self._succeeded.set()

    async def close(self) -> None:
        """Deal with what has come, and end the session now."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _read_on(self) -> None:
        async with self._session as session:
            try:
                await self._succeeded.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OVERLAP):
                        await session.wait_closed()
            finally:
                await session.finish()


class NtfSession(RequestSession[NtfResponse, NtfCommand]):
    """Requests over one connection to a notification server."""


async def connect_smp(
    server: SmpServer,
    dialer: Dialer,
    *,
    service: Service | None = None,
    on_events: SmpEvents | None = None,
    on_nonsense: Callable[[Nonsense, int], None] | None = None,
    config: SessionConfig = SESSION_DEFAULTS,
    random: Callable[[int], bytes] = os.urandom,
    versions: VersionRange = SMP_VERSIONS,
    proxy: bool = False,
) -> SmpSession:
    """Connect and agree on a session. Raises `ClientError`; nothing stays open then.

    `proxy`: the session is one in which others' commands are forwarded.
    """

    def make(stream: TlsStream) -> SmpSession:
        handshake = _smp_handshake(stream, server, service, random, versions, proxy)
        return SmpSession(
            stream,
            Connection(handshake, SMP_MESSAGES, SMP_COMMANDS, checks_credentials=False),
            ping=smp_messages.Ping(),
            on_events=on_events,
            on_nonsense=on_nonsense,
            config=config,
            random=random,
        )

    context = client_context([SMP_ALPN], None if service is None else service.credentials)
    return await _connect(server, dialer, context, config.connect, make)


async def connect_ntf(
    server: NtfServer,
    dialer: Dialer,
    *,
    config: SessionConfig = SESSION_DEFAULTS,
    random: Callable[[int], bytes] = os.urandom,
    versions: VersionRange = NTF_VERSIONS,
) -> NtfSession:
    """As `connect_smp`."""

    def make(stream: TlsStream) -> NtfSession:
        handshake = NtfClientHandshake(stream.session_id, server.key_hash, stream.peer_chain[0], versions)
        return NtfSession(
            stream,
            Connection(handshake, NTF_RESPONSES, NTF_COMMANDS, checks_credentials=False),
            ping=ntf_commands.Ping(),
            config=config,
            random=random,
        )

    return await _connect(server, dialer, client_context([NTF_ALPN]), config.connect, make)


async def _connect(
    server: ServerAddress,
    dialer: Dialer,
    context: SSL.Context,
    timeout: float,
    make: Callable[[TlsStream], S],
) -> S:
    deadline = asyncio.get_running_loop().time() + timeout
    stream = await dialer.dial(server, context, timeout)
    try:
        session = make(stream)
        async with asyncio.timeout_at(deadline):
            await session.start()
    except TimeoutError:
        stream.abort()
        raise ConnectFailed("the server did not finish the handshake in time") from None
    except BaseException:
        stream.abort()
        raise
    return session


def _smp_handshake(
    stream: TlsStream,
    server: SmpServer,
    service: Service | None,
    random: Callable[[int], bytes],
    versions: VersionRange,
    proxy: bool,
) -> SmpClientHandshake:
    login = None
    if service is not None and stream.certificate_sent:
        login = ServiceLogin(
            service.role,
            service.credentials.chain,
            service.credentials.signing_key,
            Ed25519PrivateKey(random(KEY_SIZE)),
        )
    return SmpClientHandshake(
        stream.session_id,
        server.key_hash,
        stream.peer_chain,
        X25519PrivateKey(random(KEY_SIZE)),
        login,
        versions,
        proxy=proxy,
    )
