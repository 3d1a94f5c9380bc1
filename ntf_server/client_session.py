"""One client's connection: bytes to commands, answers to bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ntf_server.authentication import Request
from ntf_server.clock import Clock
from ntf_server.commands import RUN_KINDS, Commands
from ntf_server.config import LimitsConfig
from ntf_server.limits import AddressLimits
from ntf_server.metrics import counter
from protocol.connection import Block, Connection, Failed, HandshakeDone, Outgoing, Received, Rejected
from protocol.crypto import SigningKey, X25519PrivateKey
from protocol.encoding import NO_CORR, NO_ENTITY, new_tuple
from protocol.errors import AUTH, BLOCK, QUOTA, TooLarge
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, Err, NtfCommand, NtfResponse, Pong, Tnew, Trpl
from protocol.ntf_handshake import NtfServerHandshake
from protocol.session_params import SessionParams
from protocol.versions import NTF_ALPN, NTF_BLOCK_SIZE, NTF_LEGACY, NTF_VERSIONS
from transport.budget import CpuBudget, Slice
from transport.limits import Bucket, Rate, source_of
from transport.streams import TlsStream

logger = logging.getLogger(__name__)

MAX_RUN = 128
"Commands authorised and written together; more than a block, less than a long pause for others."

REGISTRATIONS = (Tnew, Trpl)
DENIED = Err(AUTH)
UNAUTHORISED = (Err, Pong)
"Answers that no authorisation led to."

NONSENSE = Rate(per_second=5, burst=500)
"Transmissions that are no commands. A client of another version sends a few; two blocks of them are enough."

HANDSHAKE_FAILURES = counter("client_handshake_failures", "Client connections refused", ["reason"])
BROKEN_BLOCKS = counter("client_broken_blocks", "Connections ended because of a broken block")
OVER_LIMIT = counter("client_over_limit", "Commands answered QUOTA because of a rate limit", ["limit"])
DROPPED = counter("clients_dropped", "Connections ended because of what the client did", ["reason"])

Item = Received[NtfCommand] | Rejected
Answer = Outgoing[NtfResponse]


@dataclass(frozen=True, kw_only=True)
class ServerIdentity:
    """Who this server is in the NTF handshake."""

    key_hash: bytes
    signer: SigningKey


class Part(NamedTuple):
    """Some of the transmissions that a client sent."""

    items: list[Item]
    end: int
    "Where in the received bytes it ends."
    failed: bool = False
    "What follows cannot be read: the connection has to end."


class Dropped(Exception):
    """The client is not worth keeping; `reason` is a label of the metric."""

    def __init__(self, reason: str, text: str, *, answered: bool = False) -> None:
        """`answered`: the client may still take the answers it was given."""
        super().__init__(text)
        self.reason = reason
        self.answered = answered


class ClientSession:
    """Processes the commands of one connection in order; reads on only when the answers were taken."""

    __slots__ = (
        "_accepted",
        "_addresses",
        "_budget",
        "_busy",
        "_clock",
        "_commands",
        "_connection",
        "_limits",
        "_nonsense",
        "_rate",
        "_refused",
        "_source",
        "_stopping",
        "_stream",
        "_tokens",
    )

    def __init__(
        self,
        stream: TlsStream,
        commands: Commands,
        identity: ServerIdentity,
        limits: LimitsConfig,
        addresses: AddressLimits,
        budget: CpuBudget,
        clock: Clock,
        random: Callable[[int], bytes],
    ) -> None:
        self._stream = stream
        self._commands = commands
        self._limits = limits
        self._addresses = addresses
        self._budget = budget
        self._source = source_of(stream.peer[0])
        self._clock = clock
        self._rate = Rate(per_second=limits.commands_per_second, burst=limits.commands_burst)
        now = clock.monotonic()
        self._accepted, self._refused = Bucket(self._rate, now), Bucket(self._rate, now)
        self._nonsense = Bucket(NONSENSE, now)
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
        """Until the peer closes, breaks the protocol, is dropped, or the server shuts down."""
        self._stream.write(self._connection.data_to_send())
        try:
            goes_on = await self._serve(await self._shake_hands())
            while goes_on and not self._stopping:
                # In no variable, where it would stay until the next: most clients are silent for long.
                goes_on = await self._serve(await self._stream.receive())
        except Dropped as dropped:
            DROPPED.labels(dropped.reason).inc()
            logger.info("a client was disconnected: %s", dropped)
            if dropped.answered:
                self._stream.close()
            else:
                self._stream.abort()

    def stop(self) -> None:
        """End the connection, after commands in progress have been answered."""
        self._stopping = True
        if not self._busy:
            self._stream.close()

    async def _shake_hands(self) -> bytes:
        """What the client sent behind its part of the handshake; empty at the end of the connection."""
        received = b""
        try:
            async with asyncio.timeout(self._limits.handshake_timeout):
                while len(received) < NTF_BLOCK_SIZE:
                    if not (data := await self._stream.receive()):
                        return b""
                    received += data
        except TimeoutError:
            HANDSHAKE_FAILURES.labels("timeout").inc()
            return b""
        return received

    async def _serve(self, data: bytes) -> bool:
        """Answer what was received, a bounded part at a time; whether the connection goes on."""
        self._busy = True
        start = 0
        while start < len(data):
            with await self._budget.take(self._source) as work:
                part = self._read(data, start, work)
            if part.items:
                await self._respond(part.items)
            if part.failed:
                return False
            start = part.end
        self._busy = False
        return bool(data)

    def _read(self, data: bytes, start: int, work: Slice) -> Part:
        """The transmissions of the next blocks."""
        items: list[Item] = []
        for at in range(start, len(data), NTF_BLOCK_SIZE):
            for event in self._connection.receive_data(data[at : at + NTF_BLOCK_SIZE]):
                match event:
                    case Block():
                        items += event.items
                    case HandshakeDone():
                        pass
                    case Failed():
                        self._count_failure(event)
                        return Part(items, len(data), failed=True)
            if len(items) >= MAX_RUN or work.is_over:
                return Part(items, at + NTF_BLOCK_SIZE)
        return Part(items, len(data))

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
            answers = [
                new_tuple(Outgoing, (item.corr_id, item.entity_id, response, None, False))
                for item, response in zip(run, responses, strict=True)
            ]
            self._stream.write(self._encode(answers))
            self._count_authorisations(responses)
            if self._stream.is_full:  # seldom, and a timer for each answer costs more than sending it
                await self._drain()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._limits.send_timeout):
                await self._stream.drain()
        except TimeoutError:
            text = f"it took no answers for {self._limits.send_timeout:g} seconds"
            raise Dropped("unread", text) from None

    def _encode(self, answers: list[Answer]) -> bytes:
        try:
            return self._connection.send(answers)
        except TooLarge:
            return self._connection.send(map(self._fitting, answers))

    def _fitting(self, answer: Answer) -> Answer:
        """Ids may be so long that no answer has room beside them: then the transmission was none."""
        try:
            self._connection.send([answer])
        except TooLarge:
            return Outgoing(NO_CORR, NO_ENTITY, Err(BLOCK))
        return answer

    async def _run(self, params: SessionParams, run: Sequence[Item]) -> list[NtfResponse]:
        requests = [item for item in run if isinstance(item, Received)]
        limit = self._over_limit(run)
        if limit is not None:
            OVER_LIMIT.labels(limit).inc(len(run))
            self._count_refused(len(run))
        if not requests:
            self._count_nonsense(len(run))
            return [Err(item.error) for item in run if isinstance(item, Rejected)]
        if limit is not None:
            return [Err(QUOTA)] * len(requests)
        return await self._commands.run(params, requests, self._source)

    def _over_limit(self, run: Sequence[Item]) -> str | None:
        """The limit that forbids these commands, if one does. What is no command counts all the same."""
        now, amount = self._clock.monotonic(), len(run)
        if not self._accepted.take(self._rate, now, amount):
            return "connection"
        if not self._addresses.commands.allows(self._source, now, amount):
            return "address"
        first = run[0]
        if isinstance(first, Received) and isinstance(first.message, REGISTRATIONS):
            return self._over_registrations(first, now)
        return None

    def _over_registrations(self, request: Request, now: float) -> str | None:
        """TNEW and TRPL alike make a push to a device that never agreed to it."""
        self._tokens += 1
        if self._limits.tokens_per_connection and self._tokens > self._limits.tokens_per_connection:
            return "tokens"
        if not self._addresses.verifications.allows(self._source, now):
            return "verifications"
        if isinstance(request.message, Tnew) and not self._addresses.tokens.allows(self._source, now):
            return "address tokens"
        return None

    def _count_refused(self, amount: int) -> None:
        if not self._refused.take(self._rate, self._clock.monotonic(), amount):
            raise Dropped("flood", "it went on after thousands of commands were answered QUOTA")

    def _count_authorisations(self, responses: Sequence[NtfResponse]) -> None:
        failed = responses.count(DENIED)
        succeeded = sum(type(response) not in UNAUTHORISED for response in responses)
        if not self._budget.authorised(self._source, succeeded=succeeded, failed=failed):
            text = "its address sent hundreds of commands that were not authorised"
            raise Dropped("unauthorised", text, answered=True)

    def _count_nonsense(self, amount: int) -> None:
        if not self._nonsense.take(NONSENSE, self._clock.monotonic(), amount):
            raise Dropped("nonsense", "it sent hundreds of transmissions that are no commands")


def _runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Consecutive items that can be processed together, in order."""
    for kind, group in groupby(items, _run_kind):
        run, size = list(group), MAX_RUN if kind else 1
        for start in range(0, len(run), size):
            yield run[start : start + size]


def _run_kind(item: Item) -> object:
    return RUN_KINDS.get(type(item.message)) if isinstance(item, Received) else Rejected
