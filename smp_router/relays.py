"""Sessions with other routers, in which this one forwards commands of its clients.

All clients share one session per router, so that the router cannot tell them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.addresses import SmpServer
from protocol.connection import Received
from protocol.encoding import NO_ENTITY, CorrId, short
from protocol.errors import (
    PROXY_NO_SESSION,
    PROXY_TIMEOUT,
    TE_LARGE_MSG,
    TE_VERSION,
    DecodeError,
    ErrorType,
    ProtocolError,
    proxy_broker_error,
    proxy_protocol_error,
)
from protocol.hiding import hides_bytes
from protocol.proxy import Forwarded, ForwardedAnswer, open_forwarded_answer, seal_forwarded
from protocol.session_params import RouterProof
from protocol.smp_messages import Err, Pfwd, Pkey, Pres, Rfwd, Rres, SmpMessage
from protocol.versions import SMP_PROXY, SMP_VERSIONS, VersionRange
from smp_client.dialer import Dialer
from smp_client.errors import (
    BadAnswer,
    CannotSend,
    ClientError,
    HandshakeFailed,
    RequestTimeout,
)
from smp_client.requests import Nonsense, SessionConfig
from smp_client.session import SmpSession, connect_smp
from smp_router.config import RouterConfig
from smp_router.storage import Creator, share
from transport.address_guard import AddressGuard
from transport.shared_attempts import SharedAttempts

NETWORK = proxy_broker_error(b"NETWORK")
RELAY_VERSIONS = VersionRange(SMP_PROXY, SMP_VERSIONS.max)

MAX_CONNECTING = 200
"Attempts under way at a time, of all clients: addresses that never answer must not use up everything."


@hides_bytes
@dataclass(slots=True)
class _Relay:
    """A session with one router."""

    session: SmpSession
    proof: RouterProof
    secret: bytes
    "Shared with the router: seals what is forwarded."
    used_at: float
    creator: Creator | None = field(repr=False)
    "Whose share of the sessions it counts for."
    waiting: int = 0

    @property
    def session_id(self) -> bytes:
        return self.session.params.session_id

    @property
    def key(self) -> Pkey:
        versions = VersionRange(SMP_PROXY, self.proof.versions.max)
        return Pkey(self.session_id, versions, self.proof.chain, self.proof.signed_key)


class Relays:
    """`connect` for PRXY, `forward` for PFWD; both raise ProtocolError with what the client is told."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._guard = AddressGuard(allow_private=config.private_relays)
        self._dialer = Dialer(guard=self._guard)
        self._connecting = SharedAttempts[SmpServer, _Relay]("relay")
        self._relays: dict[SmpServer, _Relay] = {}
        self._by_session: dict[bytes, _Relay] = {}
        self._clock = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return len(self._relays)

    @property
    def waiting(self) -> int:
        return sum(relay.waiting for relay in self._relays.values())

    async def connect(self, server: SmpServer, creator: Creator | None, may_dial: Callable[[], bool]) -> Pkey:
        """`may_dial` is asked if there is no session with the router yet; a new one counts for `creator`."""
        server = server.canonical  # one session, however its name is written
        relay = self._usable(server)
        if relay is None:
            if server not in self._connecting and (len(self._connecting) >= MAX_CONNECTING or not may_dial()):
                raise ProtocolError(PROXY_TIMEOUT)
            relay = await self._connecting.share(server, lambda: self._connect(server, creator))
        return relay.key

    async def forward(self, session_id: bytes, corr_id: CorrId, command: Pfwd) -> Pres:
        relay = self._by_session.get(session_id)
        if relay is None or relay.session.is_closed:
            raise ProtocolError(PROXY_NO_SESSION)
        if relay.waiting >= self._config.max_forwarded_per_relay:
            raise ProtocolError(PROXY_TIMEOUT)
        relay.used_at = self._clock()
        relay.waiting += 1
        try:
            return await self._forward(relay, corr_id, command)
        except ClientError as error:
            raise ProtocolError(_broker_error(error)) from None
        finally:
            relay.waiting -= 1

    async def _forward(self, relay: _Relay, corr_id: CorrId, command: Pfwd) -> Pres:
        own_corr_id = relay.session.new_corr_id()
        forwarded = Forwarded(corr_id, command.version, command.key, command.body)
        body = seal_forwarded(relay.secret, own_corr_id, forwarded)
        answer = await relay.session.request(NO_ENTITY, Rfwd(body), corr_id=own_corr_id)
        if isinstance(answer, Err):
            raise ProtocolError(proxy_protocol_error(answer.error))
        if not isinstance(answer, Rres):
            raise ProtocolError(_broker("UNEXPECTED", type(answer).__name__.upper()))
        return Pres(_opened(relay.secret, own_corr_id, corr_id, answer).body)

    async def close(self) -> None:
        await self._connecting.close()
        for relay in list(self._relays.values()):
            await self._close(relay)
        self._relays.clear()
        self._guard.close()

    async def close_idle(self) -> None:
        """End sessions that nobody used for a while."""
        before = self._clock() - self._config.relay_idle
        for server, relay in list(self._relays.items()):
            if relay.session.is_closed or (not relay.waiting and relay.used_at < before):
                del self._relays[server]
                await self._close(relay)

    async def _close(self, relay: _Relay) -> None:
        self._by_session.pop(relay.session_id, None)
        await relay.session.close()

    def _usable(self, server: SmpServer) -> _Relay | None:
        relay = self._relays.get(server)
        if relay is None or relay.session.is_closed:
            return None
        relay.used_at = self._clock()
        return relay

    def _in_the_way(self, server: SmpServer, creator: Creator | None) -> _Relay | None:
        """The session that a new one replaces; at a limit, the one that was not used longest.

        An address that has its share loses one of its own: it cannot take the sessions of others.
        """
        if server in self._relays:
            return self._relays.pop(server)
        limit = self._config.max_relays
        most = share(limit, self._config.address_share_percent)
        own = [
            other for other, relay in self._relays.items() if creator is not None and relay.creator == creator
        ]
        if len(own) < most and len(self._relays) < limit:
            return None
        candidates = own if len(own) >= most else self._relays
        idle = [other for other in candidates if not self._relays[other].waiting]
        if not idle:
            raise ProtocolError(PROXY_TIMEOUT)
        return self._relays.pop(min(idle, key=lambda other: self._relays[other].used_at))

    async def _connect(self, server: SmpServer, creator: Creator | None) -> _Relay:
        """Attempts that fail cost nobody a session."""
        try:
            relay = await self._new_relay(server, creator)
        except ClientError as error:
            raise ProtocolError(_broker_error(error)) from None
        try:
            old = self._in_the_way(server, creator)
        except ProtocolError:
            await relay.session.close()
            raise
        self._relays[server] = relay
        self._by_session[relay.session_id] = relay
        if old is not None:
            await self._close(old)
        return relay

    async def _new_relay(self, server: SmpServer, creator: Creator | None) -> _Relay:
        async def unasked(events: list[Received[SmpMessage]]) -> None:
            """A proxy subscribes to nothing; who sends it events all the same must not go on for ever."""
            session.blame(Nonsense.UNKNOWN, len(events))

        session = await connect_smp(
            server,
            self._dialer,
            on_events=unasked,
            config=SessionConfig(connect=self._config.relay_timeout, answer=self._config.relay_timeout),
            versions=RELAY_VERSIONS,
            proxy=True,
        )
        params = session.params
        assert params.proof is not None
        assert params.shared_secret is not None
        return _Relay(session, params.proof, params.shared_secret, self._clock(), creator)


def _opened(secret: bytes, own_corr_id: CorrId, corr_id: CorrId, answer: Rres) -> ForwardedAnswer:
    try:
        opened = open_forwarded_answer(secret, own_corr_id, answer.body)
    except DecodeError:
        raise ProtocolError(_broker("RESPONSE", "does not open")) from None
    if opened.corr_id != corr_id:
        raise ProtocolError(_broker("RESPONSE", "to something else"))
    return opened


def _broker(word: str, detail: str) -> ErrorType:
    return proxy_broker_error(f"{word} ".encode() + short(detail.encode()))


def _broker_error(error: ClientError) -> ErrorType:
    """What a client is told; nothing about the proxy's own network."""
    if isinstance(error, RequestTimeout):
        return PROXY_TIMEOUT
    if isinstance(error, HandshakeFailed) and error.error == TE_VERSION:
        return proxy_broker_error(b"TRANSPORT " + TE_VERSION.text)
    if isinstance(error, CannotSend):
        return proxy_broker_error(b"TRANSPORT " + TE_LARGE_MSG.text)
    if isinstance(error, BadAnswer):
        return _broker("RESPONSE", "not understood")
    return NETWORK
