"""One client's connection: bytes to commands, answers to bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ntf_server.authentication import Request
from ntf_server.clock import Clock
from ntf_server.commands import Commands, same_run
from ntf_server.limits import Bucket, Rate, RateLimiter
from ntf_server.metrics import counter
from protocol.connection import Block, Connection, Failed, HandshakeDone, Outgoing, Received, Rejected
from protocol.crypto import SigningKey, X25519PrivateKey
from protocol.errors import QUOTA
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, Err, NtfCommand, NtfResponse, Tnew
from protocol.ntf_handshake import NtfServerHandshake
from protocol.session_params import SessionParams
from protocol.versions import NTF_ALPN, NTF_LEGACY, NTF_VERSIONS
from transport.streams import TlsStream

logger = logging.getLogger(__name__)

MAX_RUN = 512
"Commands authorised and written together; more than a block, less than a long pause for others."

HANDSHAKE_FAILURES = counter("client_handshake_failures", "Client connections refused", ["reason"])
BROKEN_BLOCKS = counter("client_broken_blocks", "Connections ended because of a broken block")
OVER_LIMIT = counter("client_over_limit", "Commands answered QUOTA because of a rate limit", ["limit"])

DEFAULT_COMMAND_RATE = Rate(per_second=500, burst=5000)

Item = Received[NtfCommand] | Rejected


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Deadlines and rates of a connection."""

    handshake_timeout: float = 15.0
    send_timeout: float = 60.0
    commands: Rate = DEFAULT_COMMAND_RATE
    tokens_per_connection: int = 1000


@dataclass(frozen=True, kw_only=True)
class ServerIdentity:
    """Who this server is in the NTF handshake."""

    key_hash: bytes
    signer: SigningKey


class ClientSession:
    """Processes the commands of one connection in order; reads on only when the answers were taken."""

    def __init__(
        self,
        stream: TlsStream,
        commands: Commands,
        identity: ServerIdentity,
        limits: ClientLimits,
        address_rate: RateLimiter,
        clock: Clock,
        random: Callable[[int], bytes],
    ) -> None:
        self._stream = stream
        self._commands = commands
        self._limits = limits
        self._address_rate = address_rate
        self._clock = clock
        self._bucket = Bucket(limits.commands, clock.monotonic())
        self._tokens = 0
        self._busy = self._stopping = False
        handshake = NtfServerHandshake(
            stream.session_id,
            identity.key_hash,
            identity.signer,
            X25519PrivateKey(random(32)),
            NTF_VERSIONS if stream.alpn == NTF_ALPN else NTF_LEGACY,
        )
        self._connection: Connection[NtfCommand, NtfResponse] = Connection(
            handshake, NTF_COMMANDS, NTF_RESPONSES, checks_credentials=True
        )

    async def run(self) -> None:
        """Until the peer closes, breaks the protocol or the server shuts down."""
        self._stream.write(self._connection.data_to_send())
        items: list[Item] | None = []
        try:
            async with asyncio.timeout(self._limits.handshake_timeout):
                while self._connection.params is None and items is not None:
                    items = await self._receive()
        except TimeoutError:
            HANDSHAKE_FAILURES.labels("timeout").inc()
            return
        while items is not None and not self._stopping:
            self._busy = True
            if items:
                await self._respond(items)
            self._busy = False
            items = None if self._stopping else await self._receive()

    def stop(self) -> None:
        """End the connection, after commands in progress have been answered."""
        self._stopping = True
        if not self._busy:
            self._stream.close()

    async def _receive(self) -> list[Item] | None:
        """The transmissions of all blocks received so far; None at the end of the connection."""
        data = await self._stream.receive()
        if not data:
            return None
        items: list[Item] = []
        for event in self._connection.receive_data(data):
            match event:
                case Block():
                    items += event.items
                case HandshakeDone():
                    pass
                case Failed():
                    self._count_failure(event)
                    if items:
                        await self._respond(items)
                    return None
        return items

    def _count_failure(self, failed: Failed) -> None:
        if self._connection.params is None:
            HANDSHAKE_FAILURES.labels(str(failed.error)).inc()
        else:
            BROKEN_BLOCKS.inc()

    async def _respond(self, items: Sequence[Item]) -> None:
        params = self._connection.params
        assert params is not None
        for run in _runs(items):
            responses = await self._run(params, run)
            data = self._connection.send(
                Outgoing(item.corr_id, item.entity_id, response)
                for item, response in zip(run, responses, strict=True)
            )
            self._stream.write(data)
            async with asyncio.timeout(self._limits.send_timeout):
                await self._stream.drain()

    async def _run(self, params: SessionParams, run: Sequence[Item]) -> list[NtfResponse]:
        if isinstance(run[0], Rejected):
            return [Err(item.error) for item in run if isinstance(item, Rejected)]
        requests = [item for item in run if isinstance(item, Received)]
        limit = self._over_limit(requests)
        if limit is not None:
            OVER_LIMIT.labels(limit).inc(len(requests))
            return [Err(QUOTA)] * len(requests)
        return await self._commands.run(params, requests)

    def _over_limit(self, requests: Sequence[Request]) -> str | None:
        now, amount = self._clock.monotonic(), len(requests)
        if self._limits.commands.per_second and not self._bucket.take(self._limits.commands, now, amount):
            return "connection"
        if not self._address_rate.allows(self._stream.peer[0], now, amount):
            return "address"
        if isinstance(requests[0].message, Tnew):
            self._tokens += 1
            if self._limits.tokens_per_connection and self._tokens > self._limits.tokens_per_connection:
                return "tokens"
        return None


def _runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Consecutive items that can be processed together, in order."""
    run: list[Item] = []
    for item in items:
        if run and not (len(run) < MAX_RUN and _together(run[0], item)):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _together(first: Item, other: Item) -> bool:
    if isinstance(first, Received) and isinstance(other, Received):
        return same_run(first, other)
    return isinstance(first, Rejected) and isinstance(other, Rejected)
