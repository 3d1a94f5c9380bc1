"""APNs through aioapns, whose connection and pool are extended so that every send ends.

aioapns 4.0 matches answers by a header that not every answer has, reads error texts frame by frame, keeps
finished requests for ever, fails when a flow-control window is used up and forgets resets, silence and
GOAWAY. The subclasses here keep one exchange per stream instead, with a queue for what has to wait.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from aioapns.connection import APNsBaseConnectionPool, APNsTLSClientProtocol
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

from ntf_server.push.http2 import (
    CONNECT_TIMEOUT,
    MAX_BODY,
    MAX_IN_FLIGHT,
    MIN_CONNECTION_AGE,
    NoAnswer,
    Origin,
    OriginLimits,
    Response,
    closed_error,
)

MAX_ATTEMPTS: Final = 5  # on other connections, for requests that the peer did not process
MAX_STREAMS: Final = 250  # per connection: h2 looks at all open streams whenever one is opened
MAX_CONNECTIONS: Final = 4
IDLE_TIME: Final = 120.0  # seconds without a request after which a connection is closed
FIRST_STREAM: Final = 1
LAST_STREAM: Final = 2**31 - 1


class NotProcessedError(Exception):
    """The peer has provably not processed the request: it may be sent again."""


class _H2(H2Connection):
    """Goes on receiving after GOAWAY: streams up to its last one are still answered."""

    MAX_CLOSED_STREAMS = 1024  # remembered to tell late frames from wrong ones; h2 keeps 65536

    def _receive_goaway_frame(self, frame: Any) -> tuple[list[Any], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class _Exchange:
    """A request together with what came back so far."""

    def __init__(self, origin: Origin, path: str, headers: Sequence[str], body: bytes) -> None:
        pairs = (line.partition(": ") for line in headers)
        self.headers = [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", origin.host),
            (":path", path),
            *((name, value) for name, _, value in pairs),
        ]
        self.body = body
        self.connection: ApnsConnection | None = None
        self.begin()

    def begin(self) -> None:
        """Prepare for a connection."""
        self.done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.unsent = memoryview(self.body)
        self.answer = bytearray()
        self.status = 0
        self.retry_after: float | None = None
        self.stream_id: int | None = None
        self.started = time.monotonic()

    def fail(self, error: Exception) -> None:
        """End without an answer."""
        if not self.done.done():
            self.done.set_exception(error)


class ApnsConnection(APNsTLSClientProtocol):
    """One HTTP/2 connection with APNs."""

    INACTIVITY_TIME = int(IDLE_TIME)

    def __init__(self, pool: ApnsPool) -> None:
        super().__init__("", asyncio.get_running_loop())
        self.conn = _H2()
        self.created = self.heard = time.monotonic()
        self._pool = pool
        self._used = self.created
        self._open: dict[int, _Exchange] = {}
        self._blocked: dict[int, _Exchange] = {}
        self._waiting: deque[_Exchange] = deque()
        self._next_stream = FIRST_STREAM
        self._max_streams = 0  # until the peer's SETTINGS come
        self.ready = asyncio.Event()
        self._retired = False

    async def send(self, exchange: _Exchange) -> Response:
        """The answer to a request; NotProcessedError if it may be sent on another connection."""
        exchange.begin()
        exchange.connection = self
        if self._retired:
            raise NotProcessedError
        self._waiting.append(exchange)
        self._pump()
        try:
            return await exchange.done
        finally:
            self._forget(exchange)

    @property
    def is_busy(self) -> bool:
        """Whether another connection would serve a new request sooner."""
        return len(self._open) + len(self._waiting) >= self._max_streams

    @property
    def load(self) -> int:
        """Requests under way or waiting."""
        return len(self._open) + len(self._waiting)

    def retire(self) -> None:
        """Take no more requests; close when those under way have ended."""
        if not self._retired:
            self._retired = True
            self._pool.discard_connection(self)
            while self._waiting:
                self._waiting.popleft().fail(NotProcessedError())
        if not self._open:
            self.close()

    def data_received(self, data: bytes) -> None:
        """Take what the peer sent."""
        try:
            for event in self.conn.receive_data(data):
                self._on_event(event)
        except ProtocolError:
            self._drop("the service broke the HTTP/2 protocol")
            return
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was sent, give back what was not."""
        if self.inactivity_timer:
            self.inactivity_timer.cancel()
        self._fail_open(NoAnswer("the connection was lost", whole_origin=True))
        self.retire()
        self.ready.set()

    def refresh_inactivity_timer(self) -> None:
        """Called with every write: notes the time, for one timer that stays."""
        self._used = time.monotonic()
        if self.inactivity_timer is None:
            self.inactivity_timer = self.loop.call_later(IDLE_TIME, self._check_idle)

    def _check_idle(self) -> None:
        self.inactivity_timer = None
        left = self._used + IDLE_TIME - time.monotonic()
        if self._open or left > 0:
            self.inactivity_timer = self.loop.call_later(max(left, 1.0), self._check_idle)
        else:
            self.retire()

    def _on_event(self, event: Event) -> None:
        match event:
            case ResponseReceived(stream_id=stream_id, headers=headers) if stream_id in self._open:
                self._on_head(self._open[stream_id], dict(headers))
            case DataReceived(stream_id=stream_id, data=data, flow_controlled_length=length):
                self.conn.acknowledge_received_data(length, stream_id)
                self._on_data(stream_id, data)
            case StreamEnded(stream_id=stream_id) if stream_id in self._open:
                self._on_answer(self._open[stream_id])
            case StreamReset(stream_id=stream_id, error_code=code) if stream_id in self._open:
                self._on_reset(self._open[stream_id], code)
            case ConnectionTerminated(last_stream_id=last_stream_id):
                self._on_goaway(last_stream_id or 0)
            case RemoteSettingsChanged():
                self._max_streams = min(MAX_STREAMS, self.conn.remote_settings.max_concurrent_streams)
                self.ready.set()
            case WindowUpdated() | _:
                pass  # _pump looks at the windows after each batch of events

    def _on_head(self, exchange: _Exchange, headers: dict[bytes, bytes]) -> None:
        exchange.status = int(headers[b":status"])
        wish = headers.get(b"retry-after", b"")
        exchange.retry_after = float(wish) if wish.isdigit() and len(wish) < 10 else None

    def _on_data(self, stream_id: int, data: bytes) -> None:
        exchange = self._open.get(stream_id)
        if exchange is None:
            return
        exchange.answer += data
        if len(exchange.answer) > MAX_BODY:
            exchange.fail(NoAnswer("the answer is too long", whole_origin=False))

    def _on_answer(self, exchange: _Exchange) -> None:
        self.heard = time.monotonic()
        if not exchange.done.done():
            response = Response(exchange.status, bytes(exchange.answer), exchange.retry_after)
            exchange.done.set_result(response)
        if exchange.status >= 500 and self.heard - self.created > MIN_CONNECTION_AGE:
            self.retire()

    def _on_reset(self, exchange: _Exchange, code: int | None) -> None:
        if code == ErrorCodes.REFUSED_STREAM:
            exchange.fail(NotProcessedError())
        elif exchange.status == 0:
            exchange.fail(NoAnswer(f"the stream was reset with code {code}", whole_origin=False))
        else:
            self._on_answer(exchange)

    def _on_goaway(self, last_stream_id: int) -> None:
        for stream_id, exchange in self._open.items():
            if stream_id > last_stream_id:
                exchange.fail(NotProcessedError())
        self.retire()

    def _pump(self) -> None:
        """Send what streams and windows allow, with one write."""
        for exchange in list(self._blocked.values()):
            self._send_body(exchange)
        while self._waiting and len(self._open) < self._max_streams:
            exchange = self._waiting.popleft()
            if not exchange.done.done():
                self._start(exchange)
        if self.transport is not None and not self.transport.is_closing():
            self.flush()

    def _start(self, exchange: _Exchange) -> None:
        stream_id = self._next_stream
        if stream_id > LAST_STREAM:
            exchange.fail(NotProcessedError())
            self.retire()
            return
        self._next_stream += 2
        exchange.stream_id = stream_id
        self._open[stream_id] = exchange
        self.conn.send_headers(stream_id, exchange.headers)
        self._send_body(exchange)

    def _send_body(self, exchange: _Exchange) -> None:
        stream_id, unsent = exchange.stream_id, exchange.unsent
        assert stream_id is not None
        while unsent:
            room = min(self.conn.local_flow_control_window(stream_id), self.conn.max_outbound_frame_size)
            if room <= 0:
                self._blocked[stream_id] = exchange
                break
            self.conn.send_data(stream_id, unsent[:room].tobytes(), end_stream=room >= len(unsent))
            unsent = unsent[room:]
        else:
            self._blocked.pop(stream_id, None)
        exchange.unsent = unsent

    def _forget(self, exchange: _Exchange) -> None:
        """The end of an exchange: answered, failed or given up."""
        if exchange.stream_id is None:
            return
        if self._open.pop(exchange.stream_id, None) is None:
            return
        self._blocked.pop(exchange.stream_id, None)
        self._reset(exchange.stream_id)
        self._pump()
        if self._retired:
            self.retire()

    def _reset(self, stream_id: int) -> None:
        """Tell the peer about a stream that was given up; one that has ended needs nothing."""
        try:
            self.conn.reset_stream(stream_id, ErrorCodes.CANCEL)
        except ProtocolError:
            return

    def _drop(self, reason: str) -> None:
        self._fail_open(NoAnswer(reason, whole_origin=True))
        self.retire()
        if self.transport is not None:
            self.transport.abort()

    def _fail_open(self, error: Exception) -> None:
        for exchange in self._open.values():
            exchange.fail(error)


class _Attempt:
    """An attempt to connect that several requests wait for; without error it succeeded or was given up."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.error: NoAnswer | None = None


class ApnsPool(APNsBaseConnectionPool):
    """The connections with one origin."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(topic="", max_connections=MAX_CONNECTIONS)
        self._origin = origin
        self._live: list[ApnsConnection] = []
        self._attempt: _Attempt | None = None
        self.ssl_context = ssl.create_default_context(cafile=origin.ca_file)
        self.ssl_context.set_alpn_protocols(["h2"])

    async def create_connection(self) -> ApnsConnection:
        """A new connection with a verified peer."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await self.loop.create_connection(
                    lambda: ApnsConnection(self), self._origin.host, self._origin.port, ssl=self.ssl_context
                )
                await connection.ready.wait()
        except ssl.SSLCertVerificationError as error:
            reason = f"certificate refused: {error.verify_message}"
            raise NoAnswer(reason, whole_origin=True) from None
        except (OSError, TimeoutError) as error:
            reason = f"cannot connect: {type(error).__name__}"
            raise NoAnswer(reason, whole_origin=True) from None
        return connection

    def discard_connection(self, connection: Any) -> None:
        """Hand the connection out no more."""
        if connection in self._live:
            self._live.remove(connection)

    async def acquire(self) -> ApnsConnection:
        """A connection with a free stream, or the least loaded one if all are in use."""
        while True:
            free = next((connection for connection in self._live if not connection.is_busy), None)
            if free is not None:
                return free
            if len(self._live) >= self.max_connections:
                return min(self._live, key=lambda connection: connection.load)
            if self._attempt is None:
                return await self._connect()
            attempt = self._attempt
            await attempt.ended.wait()
            if attempt.error is not None:
                raise NoAnswer(attempt.error.reason, whole_origin=True)

    async def _connect(self) -> ApnsConnection:
        """Connect on behalf of all who wait for a connection now."""
        attempt = self._attempt = _Attempt()
        try:
            connection = await self.create_connection()
            self._live.append(connection)
            return connection
        except NoAnswer as error:
            attempt.error = error
            raise
        finally:
            self._attempt = None
            attempt.ended.set()

    async def send(self, exchange: _Exchange) -> Response:
        """The answer; requests that a connection did not process are sent on another one."""
        for _ in range(MAX_ATTEMPTS):
            connection = await self.acquire()
            try:
                return await connection.send(exchange)
            except NotProcessedError:
                continue
        raise NoAnswer("the service refused the stream again and again", whole_origin=True)

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        for connection in list(self._live):
            connection._drop("the client was closed")


class AioapnsClient:
    """An Http2Client for APNs that uses aioapns."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._limits = OriginLimits(max_in_flight)
        self._pools: dict[Origin, ApnsPool] = {}
        self._closed = False

    async def post(
        self, origin: Origin, path: str, headers: Sequence[str], body: bytes, timeout: float
    ) -> Response:
        """See Http2Client."""
        deadline = asyncio.get_running_loop().time() + timeout
        if not self._limits.take(origin):
            await self._limits.wait(origin, deadline)
        try:
            if self._closed:
                raise closed_error()
            pool = self._pools.get(origin)
            if pool is None:
                pool = self._pools[origin] = ApnsPool(origin)
            return await self._exchange(pool, _Exchange(origin, path, headers, body), deadline)
        finally:
            self._limits.release(origin)

    async def _exchange(self, pool: ApnsPool, exchange: _Exchange, deadline: float) -> Response:
        try:
            async with asyncio.timeout_at(deadline):
                return await pool.send(exchange)
        except TimeoutError:
            raise self._silence(exchange) from None

    async def close(self) -> None:
        """See Http2Client."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()

    def _silence(self, exchange: _Exchange) -> NoAnswer:
        connection = exchange.connection
        whole_origin = connection is None or connection.heard < exchange.started
        if whole_origin and connection is not None:
            connection.retire()  # a retry must not meet the same dead connection
        return NoAnswer("no answer in time", whole_origin=whole_origin)
