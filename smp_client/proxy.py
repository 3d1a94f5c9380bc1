"""Sending to a router that must not learn the sender's address: through another router, a proxy.

    sender = Sender(sessions, ProxyConfig(policy=ProxyPolicy.UNKNOWN, proxies=(mine,), known=(mine,)))
    answer = await sender.request(server, sender_id, Send(True, body), key)

`sessions` connects to a router or returns the session there is; the sender owns none of them. The proxy sees
neither the command nor which queue it is for; the destination does not see who sent it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum

from protocol.addresses import SmpServer
from protocol.blocks import pack_batches, split_batch
from protocol.connection import Outgoing, Rejected, read_item, write_item
from protocol.crypto import KEY_SIZE, AuthPrivateKey, X25519PrivateKey, X25519PublicKey
from protocol.encoding import NO_CORR, NO_ENTITY, CorrId, EntityId
from protocol.errors import PROXY_NO_SESSION, DecodeError, HandshakeError, TooLarge, proxy_broker_error
from protocol.proxy import ClientLayer
from protocol.session_params import smp_params
from protocol.signed_key import open_signed_key
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_messages import (
    Err,
    Lget,
    Lkey,
    Pfwd,
    Pkey,
    Pres,
    Prxy,
    Rslv,
    Send,
    Skey,
    SmpCommand,
    SmpMessage,
)
from protocol.versions import SMP_BLOCK_SIZE, SMP_PROXY, SMP_VERSIONS, VersionRange
from smp_client.errors import BadAnswer, CannotSend, WrongIdentity
from smp_client.requests import CORR_ID_SIZE
from smp_client.session import SmpSession
from transport.errors import TransportError
from transport.identity import check_chain
from transport.shared_attempts import SharedAttempts

SenderCommand = Send | Skey | Lkey | Lget | Rslv
"What a proxy forwards."
Command = Outgoing[SmpCommand]
"Of a sender, about a queue or a link; its correlation id is also the nonce of its encryption."
Sessions = Callable[[SmpServer], Awaitable[SmpSession]]

UNREACHABLE = (proxy_broker_error(b"HOST"), proxy_broker_error(b"TRANSPORT VERSION"))
"The proxy cannot serve this router, now or later. Other failures pass, or the command may have been done."


class ProxyPolicy(Enum):
    ALWAYS = "always"
    UNKNOWN = "unknown"
    "For routers that are not the user's own."
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    policy: ProxyPolicy = ProxyPolicy.UNKNOWN
    fall_back: bool = False
    "Send directly if no proxy can reach a router at all, which shows one's address to it."
    proxies: tuple[SmpServer, ...] = ()
    known: tuple[SmpServer, ...] = ()
    "The user's own routers."
    passwords: Mapping[SmpServer, bytes] = field(default_factory=dict, repr=False)
    "Of the proxies that want one."

    def wants_proxy(self, server: SmpServer) -> bool:
        if self.policy is ProxyPolicy.UNKNOWN:
            return server not in self.known
        return self.policy is ProxyPolicy.ALWAYS

    def proxy_for(self, server: SmpServer) -> SmpServer | None:
        """A router is no proxy for itself if there is another one."""
        others = [proxy for proxy in self.proxies if proxy != server]
        return next(iter(others or self.proxies), None)


class Route:
    """A way to one router through one proxy, open until either session ends."""

    def __init__(self, proxy: SmpSession, session: Pkey, key: X25519PublicKey, version: int) -> None:
        self._proxy = proxy
        self._session_id = EntityId(session.session_id)
        self._params = smp_params(version, session.session_id, peer_session_key=key)
        self._relay_key = key

    @property
    def is_open(self) -> bool:
        return not self._proxy.is_closed

    async def request(self, command: Command) -> SmpMessage:
        """The destination's answer, or the proxy's `Err` if there is none. Raises `ClientError`."""
        own = X25519PrivateKey(os.urandom(KEY_SIZE))
        try:
            layer = ClientLayer.agree(own, self._relay_key, command.corr_id)
            (packed,) = pack_batches([write_item(self._params, command, SMP_COMMANDS)], SMP_BLOCK_SIZE)
            sealed = layer.seal_command(packed)
        except (TooLarge, HandshakeError, DecodeError) as error:
            raise CannotSend(str(error)) from None
        forward = Pfwd(self._params.version, own.public, sealed)
        answer = await self._proxy.request(self._session_id, forward, corr_id=command.corr_id)
        if isinstance(answer, Err):
            return answer
        if not isinstance(answer, Pres):
            raise BadAnswer("the proxy answered something else")
        return self._opened(layer, answer, command.corr_id)

    def _opened(self, layer: ClientLayer, answer: Pres, corr_id: CorrId) -> SmpMessage:
        try:
            (transmission,) = split_batch(layer.open_answer(answer.body))
        except (DecodeError, ValueError):
            raise BadAnswer("the forwarded answer does not open") from None
        item = read_item(self._params, transmission, SMP_MESSAGES, checks_credentials=False)
        if isinstance(item, Rejected) or item.corr_id not in (corr_id, NO_CORR):
            raise BadAnswer("the forwarded answer could not be read")
        return item.message


async def open_route(
    proxy: SmpSession, server: SmpServer, password: bytes | None, now: Callable[[], datetime]
) -> Route | Err:
    """Ask a proxy for a session with a router, and check that it is that router's. Raises `ClientError`."""
    answer = await proxy.request(NO_ENTITY, Prxy(server, password))
    if isinstance(answer, Err):
        return answer
    if not isinstance(answer, Pkey):
        raise BadAnswer("the proxy answered something else")
    version = VersionRange(SMP_PROXY, SMP_VERSIONS.max).common(answer.versions)
    if version is None:
        return Err(UNREACHABLE[1])
    try:
        check_chain(answer.chain, server.key_hash, now())
        key = open_signed_key(answer.chain[0], answer.signed_key, X25519PublicKey)
    except (TransportError, DecodeError):
        raise WrongIdentity("the proxy is not connected to the router that was asked for") from None
    return Route(proxy, answer, key, version)


class Sender:
    """Sends commands of senders, directly or through a proxy, as the configuration says."""

    def __init__(
        self,
        sessions: Sessions,
        config: ProxyConfig,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._sessions = sessions
        self._config = config
        self._now = now
        self._routes: dict[tuple[SmpServer, SmpServer], Route] = {}
        self._opening = SharedAttempts[tuple[SmpServer, SmpServer], Route | Err]("a route")

    async def request(
        self,
        server: SmpServer,
        entity_id: EntityId,
        command: SenderCommand,
        key: AuthPrivateKey | None = None,
        *,
        corr_id: CorrId | None = None,
    ) -> SmpMessage:
        """The answer; raises `ClientError`. `Err` with a PROXY error is the proxy's, others the router's.

        Whoever got none may ask again with the same `corr_id` (24 random bytes): a message that had arrived
        is not delivered twice.
        """
        sent = Command(corr_id or CorrId(os.urandom(CORR_ID_SIZE)), entity_id, command, key)
        if not self._config.wants_proxy(server):
            return await self._directly(server, sent)
        proxy = self._config.proxy_for(server)
        answer: SmpMessage = Err(UNREACHABLE[0])
        if proxy is not None:
            answer = await self._through(proxy, server, sent)
        if isinstance(answer, Err) and answer.error in UNREACHABLE and self._config.fall_back:
            return await self._directly(server, sent)
        return answer

    async def _directly(self, server: SmpServer, command: Command) -> SmpMessage:
        session = await self._sessions(server)
        return await session.request(command.entity_id, command.message, command.key, corr_id=command.corr_id)

    async def _through(self, proxy: SmpServer, server: SmpServer, command: Command) -> SmpMessage:
        """A proxy that lost its session before the command left is asked for another one, once."""
        answer: SmpMessage = Err(PROXY_NO_SESSION)
        for _ in range(2):
            route = await self._route(proxy, server)
            if isinstance(route, Err):
                return route
            answer = await route.request(command)
            if isinstance(answer, Err) and answer.error.text.startswith(b"PROXY "):
                self._forget(proxy, server, route)
            if answer != Err(PROXY_NO_SESSION):
                break
        return answer

    async def _route(self, proxy: SmpServer, server: SmpServer) -> Route | Err:
        known = self._routes.get((proxy, server))
        if known is not None and known.is_open:
            return known
        return await self._opening.share((proxy, server), lambda: self._open(proxy, server))

    async def _open(self, proxy: SmpServer, server: SmpServer) -> Route | Err:
        route = await open_route(
            await self._sessions(proxy), server, self._config.passwords.get(proxy), self._now
        )
        if isinstance(route, Route):
            self._routes[proxy, server] = route
        return route

    def _forget(self, proxy: SmpServer, server: SmpServer, route: Route) -> None:
        """Unless another command has replaced it already."""
        if self._routes.get((proxy, server)) is route:
            del self._routes[proxy, server]
