"""Requests and answers over one established connection, for both protocols.

    session = RequestSession(stream, connection, ping=Ping(), on_events=handle)
    await session.start()                       # the handshake; `session.params` is set from here on
    answer = await session.request(entity_id, Get(), key)
    answers = await session.request_many([Request(entity_id, Nsub(), key), ...])
    reason = await session.wait_closed()        # a ClientError, when the connection has ended
    await session.close()

`request_many` sends everything, packed into as few blocks as possible, and returns one answer or
`ClientError` per request, in order; it does not raise for a single one. `request` raises. `ERR` is an answer.

What comes without a correlation id is an event. The events of the blocks that were read at once go to
`on_events` together: after the answers in their own block, before those in later ones. Nothing more is read
until it returns, so that a slow consumer slows the peer down and memory stays flat. Time spent there is not
counted against the peer.

After `ping_after` seconds without a byte a PING is sent; without a byte for `ping_limit` more the connection
is dropped. So it is when the peer sends too much that nobody asked for (`NonsenseBudget`). With `noise`
there are PINGs at random times, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from protocol.connection import Block, Connection, Failed, HandshakeDone, Outgoing, Received, Rejected
from protocol.crypto import AuthPrivateKey
from protocol.encoding import NO_ENTITY, NONCE_SIZE, CorrId, EntityId, new_tuple
from protocol.errors import DecodeError, HandshakeError, TooLarge
from protocol.hiding import hides_bytes
from protocol.session_params import SessionParams
from smp_client.errors import (
    BadAnswer,
    CannotSend,
    ClientError,
    HandshakeFailed,
    PeerMisbehaves,
    RequestTimeout,
    SessionClosed,
)
from transport.errors import TransportError
from transport.streams import TlsStream

In = TypeVar("In")
Out = TypeVar("Out")

CORR_ID_SIZE = NONCE_SIZE  # authenticators use the correlation id as their nonce
SIGNED_AT_ONCE = 87  # a full SMP block of NSUBs with service signatures; a few ms without a chance for others
MOST_NONSENSE = 10_000
"Transmissions without sense at once: several batches of answers that come too late."
NONSENSE_PER_SECOND = 100.0
"And so many in the long run; for every one that makes sense, another one."


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Deadlines of a session, in seconds."""

    connect: float = 45.0
    "Connecting and all handshakes together."
    answer: float = 30.0
    "A request without an answer for this long fails."
    ping_after: float = 60.0
    ping_limit: float = 15.0
    noise: float | None = None
    "PINGs are sent at random times, so far apart on average: others cannot tell silence from talk."
    finish_limit: float = 1.0
    "For a peer to notice that it is asked for nothing more."


SESSION_DEFAULTS = SessionConfig()


@hides_bytes
class Request(NamedTuple, Generic[Out]):
    """A command, whom it is about, and the key that authorises it."""

    entity_id: EntityId
    message: Out
    key: AuthPrivateKey | None = None


class Batch(Generic[In]):
    """The answers to requests that were sent together; `answers` fills as they come."""

    __slots__ = ("answers", "done", "waiting")

    def __init__(self, size: int, done: asyncio.Future[None]) -> None:
        self.answers: list[In | ClientError | None] = [None] * size
        self.waiting = size
        self.done = done

    def settle(self, index: int, answer: In | ClientError) -> None:
        self.answers[index] = answer
        self.waiting -= 1
        if not self.waiting:
            self.done.set_result(None)


class Nonsense(StrEnum):
    UNREADABLE = "unreadable"
    "Not a message of the protocol."
    UNASKED = "unasked"
    "An answer to nothing, or too late."
    UNKNOWN = "unknown"
    "An event of a queue that we do not have."


class NonsenseBudget:
    """How much of a peer's nonsense is put up with in one session, without input or output.

    Some is normal: an answer that comes too late, a notification of a queue that was given up a moment ago.
    A peer that sends little else wastes our time on purpose or is broken, and is left in peace for a while.
    """

    def __init__(self, now: float) -> None:
        self._left = float(MOST_NONSENSE)
        self._at = now

    def regain(self, count: int) -> None:
        self._left = min(MOST_NONSENSE, self._left + count)

    def lose(self, count: int, now: float) -> None:
        self._left = min(MOST_NONSENSE, self._left + (now - self._at) * NONSENSE_PER_SECOND) - count
        self._at = now

    def check(self) -> None:
        """Raise `PeerMisbehaves` if none is left."""
        if self._left < 0:
            raise PeerMisbehaves


class RequestSession(Generic[In, Out]):
    """One connection to a server. It owns the task that reads; `close` ends both."""

    associating: tuple[type, ...] = ()
    "Commands that in a service session bind their queue to the service, with a second signature."

    def __init__(
        self,
        stream: TlsStream,
        connection: Connection[In, Out],
        *,
        ping: Out,
        on_events: Callable[[list[Received[In]]], Awaitable[None]] | None = None,
        on_nonsense: Callable[[Nonsense, int], None] | None = None,
        config: SessionConfig = SESSION_DEFAULTS,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._stream = stream
        self._connection = connection
        self._ping = ping
        self._on_events = on_events
        self._on_nonsense = on_nonsense
        self._nonsense_budget = NonsenseBudget(asyncio.get_running_loop().time())
        self._config = config
        self._random = random
        self._loop = asyncio.get_running_loop()
        self._pending: dict[CorrId, tuple[Batch[In], int]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._noise: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[ClientError] = self._loop.create_future()
        self._consumed = 0.0
        self._consuming_since: float | None = None
        self._is_finishing = False

    @property
    def params(self) -> SessionParams:
        """What the handshake agreed on."""
        assert self._connection.params is not None
        return self._connection.params

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    @property
    def is_consuming(self) -> bool:
        """Whether events that were read are being dealt with."""
        return self._consuming_since is not None

    def check_open(self) -> None:
        """Raise why the session has ended, if it has."""
        if self._closed.done():
            raise self._closed.result()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call back once the session has ended."""
        self._closed.add_done_callback(lambda _: callback())

    async def start(self) -> None:
        """Shake hands and start to read. The caller sets the deadline; nothing stays open on failure."""
        try:
            early = await self._shake_hands()
        except BaseException as error:
            self._stream.abort()
            if isinstance(error, TransportError):
                raise SessionClosed(str(error)) from error
            raise
        self._reader = self._loop.create_task(self._read(early), name=f"session {self._stream.peer[0]}")
        if self._config.noise is not None:
            self._noise = self._loop.create_task(self._make_noise(self._config.noise), name="noise")

    async def _make_noise(self, mean: float) -> None:
        """All blocks have one size, so an answered PING looks like any command."""
        while not self.is_closed:
            chance = (int.from_bytes(self._random(7), "big") + 1) / 2**56
            await asyncio.sleep(-mean * math.log(chance))
            with contextlib.suppress(ClientError):
                await self.request(NO_ENTITY, self._ping)

    async def _shake_hands(self) -> list[Block[In] | Failed]:
        while True:
            data = await self._stream.receive()
            if not data:
                raise SessionClosed("the peer closed the connection during the handshake")
            events = self._connection.receive_data(data)
            if reply := self._connection.data_to_send():
                self._stream.write(reply)
            for index, event in enumerate(events):
                if isinstance(event, Failed):
                    raise HandshakeFailed(event.error)
                if isinstance(event, HandshakeDone):
                    return [later for later in events[index + 1 :] if not isinstance(later, HandshakeDone)]

    async def request(
        self,
        entity_id: EntityId,
        message: Out,
        key: AuthPrivateKey | None = None,
        *,
        corr_id: CorrId | None = None,
    ) -> In:
        """The answer to one command; raises `ClientError` if there is none.

        A `corr_id` of the caller's is for commands that contain something made from it.
        """
        corr_ids = None if corr_id is None else [corr_id]
        (answer,) = await self.send(self.new_batch(1), [Request(entity_id, message, key)], corr_ids)
        if isinstance(answer, ClientError):
            raise answer
        return answer

    async def request_many(self, requests: Sequence[Request[Out]]) -> list[In | ClientError]:
        """One answer, or the error that took its place, per request."""
        return await self.send(self.new_batch(len(requests)), requests)

    def new_batch(self, size: int) -> Batch[In]:
        """For `send`: lets the caller look at the answers while they arrive."""
        return Batch(size, self._loop.create_future())

    def new_corr_id(self) -> CorrId:
        return self._corr_ids(1)[0]

    async def send(
        self,
        batch: Batch[In],
        requests: Sequence[Request[Out]],
        corr_ids: Sequence[CorrId] | None = None,
    ) -> list[In | ClientError]:
        """Send the requests of a new batch and wait for all answers."""
        corr_ids = corr_ids or self._corr_ids(len(requests))
        try:
            for start in range(0, len(requests), SIGNED_AT_ONCE):
                part = range(start, min(start + SIGNED_AT_ONCE, len(requests)))
                self._write(batch, [(index, corr_ids[index], requests[index]) for index in part])
                await self._drain()
            await self._answered(batch)
        except TransportError as error:
            self._fail_rest(batch, SessionClosed(str(error)))
        finally:
            for corr_id in corr_ids:
                self._pending.pop(corr_id, None)
        return [answer if answer is not None else RequestTimeout() for answer in batch.answers]

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._config.answer):
                await self._stream.drain()
        except TimeoutError:
            self._stream.abort()
            raise TransportError("the peer does not read") from None

    def _corr_ids(self, count: int) -> list[CorrId]:
        data = self._random(CORR_ID_SIZE * count)
        return [CorrId(data[i : i + CORR_ID_SIZE]) for i in range(0, len(data), CORR_ID_SIZE)]

    def _write(self, batch: Batch[In], part: list[tuple[int, CorrId, Request[Out]]]) -> None:
        associating = self.associating if self.params.service is not None else ()
        try:
            # Encoding and writing without a pause between: the blocks' keys depend on their order.
            blocks = self._connection.send(
                new_tuple(Outgoing, (corr_id, *request, isinstance(request.message, associating)))
                for _, corr_id, request in part
            )
        except (HandshakeError, TooLarge, DecodeError) as error:
            if len(part) == 1:
                batch.settle(part[0][0], CannotSend(str(error)))
                return
            for item in part:
                self._write(batch, [item])
            return
        if self._closed.done():
            raise TransportError(str(self._closed.result()))
        for index, corr_id, _ in part:
            self._pending[corr_id] = (batch, index)
        self._stream.write(blocks)

    async def _answered(self, batch: Batch[In]) -> None:
        """Wait for the answers as long as the peer has time for them."""
        since = self._loop.time() - self._time_consumed()
        while batch.waiting:
            deadline = since + self._config.answer + self._time_consumed()
            if deadline <= self._loop.time():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await asyncio.shield(batch.done)

    def _time_consumed(self) -> float:
        """Seconds in which nothing was read because the consumer of events was busy."""
        if self._consuming_since is None:
            return self._consumed
        return self._consumed + self._loop.time() - self._consuming_since

    def _fail_rest(self, batch: Batch[In], error: ClientError) -> None:
        for index, answer in enumerate(batch.answers):
            if answer is None:
                batch.settle(index, error)

    async def _read(self, early: list[Block[In] | Failed]) -> None:
        error: ClientError = SessionClosed("the session was closed")
        try:
            await self._process(early)
            while not self._is_finishing:
                data = await self._receive()
                if not data:
                    error = SessionClosed("the peer closed the connection")
                    return
                await self._process(self._connection.receive_data(data))
        except TransportError as problem:
            error = SessionClosed(str(problem))
        except ClientError as problem:
            error = problem
        finally:
            self._stream.abort()
            self._end(error)

    async def _receive(self) -> bytes:
        try:
            async with asyncio.timeout(self._config.ping_after):
                return await self._stream.receive()
        except TimeoutError:
            pass
        ping = Outgoing(self._corr_ids(1)[0], NO_ENTITY, self._ping)
        self._stream.write(self._connection.send([ping]))
        try:
            async with asyncio.timeout(self._config.ping_limit):
                return await self._stream.receive()
        except TimeoutError:
            raise SessionClosed("the peer does not answer PING") from None

    async def _process(self, blocks: Sequence[HandshakeDone | Block[In] | Failed]) -> None:
        events: list[Received[In]] = []
        for block in blocks:
            if isinstance(block, Failed):
                await self._consume(events)
                raise SessionClosed(f"the peer broke the protocol: {block.error}")
            assert isinstance(block, Block)  # the handshake is over
            new = [item for item in block.items if not item.corr_id and isinstance(item, Received)]
            if len(new) < len(block.items):
                await self._consume(events)  # what came before an answer
                events = []
                for item in block.items:
                    if item.corr_id or not isinstance(item, Received):
                        self._answer(item)
            events += new
            if not block.items:
                self.blame(Nonsense.UNREADABLE, 1)
        await self._consume(events)
        self._nonsense_budget.check()

    async def _consume(self, events: list[Received[In]]) -> None:
        if events and self._on_events is not None:
            self._consuming_since = self._loop.time()
            await self._on_events(events)
            self._consumed, self._consuming_since = self._time_consumed(), None

    def _answer(self, item: Received[In] | Rejected) -> None:
        batch, index = self._pending.pop(item.corr_id, (None, 0))
        if isinstance(item, Rejected):
            self.blame(Nonsense.UNREADABLE, 1)
            if batch is not None:
                batch.settle(index, BadAnswer("the answer could not be read"))
        elif batch is not None:
            batch.settle(index, item.message)
        else:
            self.blame(Nonsense.UNASKED, 1)

    def blame(self, kind: Nonsense, count: int) -> None:
        """The peer sent something of no use; more than can be put up with ends the session."""
        self._nonsense_budget.lose(count, self._loop.time())
        if self._on_nonsense is not None:
            self._on_nonsense(kind, count)

    def praise(self, count: int) -> None:
        """The peer sent something of use."""
        self._nonsense_budget.regain(count)

    def _end(self, error: ClientError) -> None:
        self._closed.set_result(error)
        if self._noise is not None:
            self._noise.cancel()
        pending, self._pending = self._pending, {}
        for batch, index in pending.values():
            batch.settle(index, error)

    async def wait_closed(self) -> ClientError:
        """Wait for the end of the connection; why it ended."""
        return await asyncio.shield(self._closed)

    async def finish(self) -> None:
        """Ask for nothing more, and deal with what the peer had sent by then; then `close`.

        Events are sent once. Those on the way are read to the end, as long as the peer does not need more
        than `finish_limit` to notice.
        """
        assert self._reader is not None
        if self._reader.done():
            return
        self._stream.end_writing()
        await asyncio.wait([self._reader], timeout=self._config.finish_limit)
        self._is_finishing = True
        if self.is_consuming:
            await asyncio.wait([self._reader])

    async def close(self) -> None:
        """End the connection and the reading task; every open request fails."""
        assert self._reader is not None
        self._stream.close()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        if not self._closed.done():  # cancelled before its first step
            self._end(SessionClosed("the session was closed"))
        if self._noise is not None:
            await asyncio.wait([self._noise])
        if not self._reader.cancelled() and (failure := self._reader.exception()) is not None:
            raise failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
