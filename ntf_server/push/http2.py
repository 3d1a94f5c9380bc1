"""HTTP/2 over TLS through libcurl's multi interface, in one thread of its own.

One thread drives the connections to all push services. Requests reach it through a queue, answers go back
into the asyncio loop in batches, so that TLS and HTTP/2 framing cost the loop nothing and waking either
side is paid once for many pushes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import pycurl

from protocol.hiding import hides_bytes

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 1000  # requests per origin
# Whenever a connection can be read, libcurl looks at every open stream of it; a push by itself was measured
# to cost 2 to 3 us more for each. So a connection has few of them, and with many open it is waited for
# answers to gather, so that one look finds several; an answer waits 10 ms at most, and so does a request.
MAX_STREAMS: Final = 128  # per connection
MAX_CONNECTIONS: Final = math.ceil(MAX_IN_FLIGHT / MAX_STREAMS)  # per origin
GATHER_PER_STREAM: Final = 10e-6  # seconds
FEW_STREAMS: Final = 16  # looked at without waiting
MAX_BODY: Final = 64 * 1024  # an answer is a short JSON text; more is a hostile peer
MAX_ORIGINS: Final = 256  # clients choose the hosts of Web Push: idle connections must not pile up
IDLE_PER_HOST: Final = 1  # of Web Push: one carries a hundred pushes
ORIGIN_IDLE: Final = 300.0  # seconds without a request after which an origin's connections are closed
SWEEP_INTERVAL: Final = 60.0  # how often idle connections are looked for
MIN_CONNECTION_AGE: Final = 1.0  # seconds; a service that answers 5xx now and then gets no more connections
CONNECT_TIMEOUT: Final = 5.0
USER_AGENT: Final = "ntf-server"
CERTIFICATE_ERRORS: Final = frozenset({pycurl.E_PEER_FAILED_VERIFICATION, pycurl.E_SSL_CACERT_BADFILE})
E_HTTP2_STREAM: Final = 92  # CURLE_HTTP2_STREAM, which pycurl has no name for
# A connection ended under the request: found when writing, or (E_HTTP2) when GOAWAY or the end of TLS came
# before the stream was opened or answered. libcurl repeats by itself what a peer refused, and what was cut
# when reading from a connection it had used before, but not these.
CUT_ERRORS: Final = frozenset({pycurl.E_SEND_ERROR, pycurl.E_HTTP2})
STREAM_ERRORS: Final = frozenset({E_HTTP2_STREAM, pycurl.E_WRITE_ERROR})


class Origin(NamedTuple):
    """Where connections lead; requests of equal origins share them."""

    host: str
    port: int
    address: str | None = None
    "The only IP address to connect to; None: whatever the host name resolves to."
    ca_file: str | None = None
    "Trusted certificates; None: those of the system."


@hides_bytes
class Response(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes
    retry_after: float | None = None


class NoAnswer(Exception):
    """No answer came. `whole_origin`: other requests to the same origin must expect the same."""

    def __init__(self, reason: str, *, whole_origin: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.whole_origin = whole_origin


class ConnectionCut(NoAnswer):
    """The connection ended under the request.

    Nothing tells whether the peer took the request before. As the caller would keep it and send it again
    anyway, it is sent again at once, but once only.
    """


def closed_error() -> NoAnswer:
    """What requests get that are under way when their client is closed."""
    return NoAnswer("the client was closed", whole_origin=True)


Outcome: TypeAlias = Response | NoAnswer


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way through the thread."""

    origin: Origin
    path: str = field(repr=False)
    headers: Sequence[str] = field(repr=False)
    body: bytes = field(repr=False)
    timeout: float
    done: asyncio.Future[Response]
    started: float = 0.0
    resent: bool = False
    connections: _Connections | None = None
    easy: Any = None


class OriginLimits:
    """Bounds how many requests are under way at each origin, so that a slow one holds up only its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: dict[Origin, int] = {}
        self._waiters: dict[Origin, deque[asyncio.Future[None]]] = {}

    def take(self, origin: Origin) -> bool:
        """Take one of the origin's places if one is free."""
        used = self._used.get(origin, 0)
        is_free = used < self._limit
        if is_free:
            self._used[origin] = used + 1
        return is_free

    async def wait(self, origin: Origin, deadline: float) -> None:
        """Take the next place that becomes free; NoAnswer if none does before the deadline."""
        waiters = self._waiters.setdefault(origin, deque())
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(place)
        try:
            async with asyncio.timeout_at(deadline):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.release(origin)  # it was given the place in the moment it stopped waiting
            if isinstance(error, TimeoutError):
                raise NoAnswer("no free stream in time", whole_origin=True) from None
            raise

    def release(self, origin: Origin) -> None:
        """Give a place back, to the one who waits longest."""
        waiters = self._waiters.get(origin)
        while waiters:
            place = waiters.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._waiters.pop(origin, None)
        left = self._used[origin] - 1
        if left:
            self._used[origin] = left
        else:
            del self._used[origin]


class CurlHttp2:
    """An HTTP/2 client for many small POST requests to few origins.

    Certificates and host names are verified, redirects are never followed, proxies of the environment are
    not used. Requests that the peer provably did not process (GOAWAY, REFUSED_STREAM) are sent again on
    another connection without the caller noticing, and so is once what a connection ended under.
    """

    def __init__(self, *, max_in_flight: int = MAX_IN_FLIGHT, max_idle: int = 0) -> None:
        """`max_idle`: origins with connections that nobody uses; 0: as many as are good for anything."""
        self._limits = OriginLimits(max_in_flight)
        self._max_origins = min(max_idle or MAX_ORIGINS, MAX_ORIGINS)
        self._thread: _CurlThread | None = None
        self._closed = False

    async def post(
        self, origin: Origin, path: str, headers: Sequence[str], body: bytes, timeout: float
    ) -> Response:
        """Answer of the peer, whatever its status; NoAnswer if there is none within `timeout`."""
        loop = asyncio.get_running_loop()
        if not self._limits.take(origin):
            deadline = loop.time() + timeout
            await self._limits.wait(origin, deadline)
            timeout = max(deadline - loop.time(), 0.001)
        try:
            if self._closed:
                raise closed_error()
            if self._thread is None or self._thread.ended:
                self._thread = _CurlThread(loop, self._max_origins)
            job = _Job(origin, path, headers, body, timeout, loop.create_future())
            self._thread.submit(job)
            try:
                return await job.done
            except asyncio.CancelledError:
                self._thread.abandon(job)
                raise
            finally:
                del job  # an error holds this frame, and the job the error
        finally:
            self._limits.release(origin)

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._closed = True
        if self._thread is not None:
            await self._thread.stop()


class _Connections:
    """The connections to one origin, from the first request until one of them fell silent or all are idle.

    One that is retired finishes what it has and takes nothing new: that is how a fresh connection is
    enforced, as libcurl offers no way to close a single one.
    """

    def __init__(self, origin: Origin, selector: selectors.BaseSelector) -> None:
        self.origin = origin
        self.active: set[_Job] = set()
        self.deadline: float | None = None
        self.created = time.monotonic()
        self.last_answer = self.last_used = 0.0
        self._selector = selector
        self._url = f"https://{_url_host(origin.host)}:{origin.port}"
        self._spare: list[Any] = []
        self.multi = pycurl.CurlMulti()
        self.multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        self.multi.setopt(pycurl.M_MAX_HOST_CONNECTIONS, MAX_CONNECTIONS)
        self.multi.setopt(pycurl.M_MAX_CONCURRENT_STREAMS, MAX_STREAMS)
        if origin.address is not None:
            self.multi.setopt(pycurl.M_MAXCONNECTS, IDLE_PER_HOST)

    def _on_socket(self, event: int, fd: int, _multi: object, _data: object) -> None:
        if event == pycurl.POLL_REMOVE:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
            return
        mask = selectors.EVENT_READ if event & pycurl.POLL_IN else 0
        mask |= selectors.EVENT_WRITE if event & pycurl.POLL_OUT else 0
        try:
            self._selector.modify(fd, mask, self)
        except KeyError:
            self._selector.register(fd, mask, self)

    def on_ready(self, fd: int, mask: int) -> None:
        """Let libcurl work on a socket."""
        bits = pycurl.CSELECT_IN if mask & selectors.EVENT_READ else 0
        bits |= pycurl.CSELECT_OUT if mask & selectors.EVENT_WRITE else 0
        self.multi.socket_action(fd, bits)

    def on_time(self) -> None:
        """Let libcurl start new requests and look at its time limits."""
        self.multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)

    def read_timer(self, now: float) -> None:
        """Ask libcurl when it wants to be called next; cheaper than being told with every request."""
        timeout_ms = self.multi.timeout()
        self.deadline = None if timeout_ms < 0 else now + timeout_ms / 1000

    def start(self, job: _Job, now: float) -> None:
        """Begin a request."""
        easy = self._spare.pop() if self._spare else self._make_easy()
        easy.setopt(pycurl.URL, self._url + job.path)
        easy.setopt(pycurl.HTTPHEADER, job.headers)
        easy.setopt(pycurl.POSTFIELDS, job.body)
        timeout_ms = math.ceil(job.timeout * 1000)
        if easy.timeout_ms != timeout_ms:
            easy.timeout_ms = timeout_ms
            easy.setopt(pycurl.TIMEOUT_MS, timeout_ms)
        easy.job = job
        job.connections, job.easy, job.started = self, easy, now
        self.last_used = self.deadline = now
        self.multi.add_handle(easy)
        self.active.add(job)

    def _make_easy(self) -> Any:
        easy = pycurl.Curl()
        answer = bytearray()
        easy.answer, easy.timeout_ms = answer, 0
        easy.setopt(pycurl.POST, 1)
        easy.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_2TLS)
        easy.setopt(pycurl.PIPEWAIT, 1)
        easy.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTPS)
        easy.setopt(pycurl.FOLLOWLOCATION, 0)
        easy.setopt(pycurl.PROXY, "")
        easy.setopt(pycurl.NOSIGNAL, 1)
        easy.setopt(pycurl.TCP_KEEPALIVE, 1)
        easy.setopt(pycurl.SSL_VERIFYPEER, 1)
        easy.setopt(pycurl.SSL_VERIFYHOST, 2)
        easy.setopt(pycurl.CAINFO, self.origin.ca_file or system_ca_file())
        easy.setopt(pycurl.CONNECTTIMEOUT_MS, int(CONNECT_TIMEOUT * 1000))
        easy.setopt(pycurl.USERAGENT, USER_AGENT)
        easy.setopt(pycurl.WRITEFUNCTION, lambda data: _collect(answer, data))
        if self.origin.address not in (None, self.origin.host):
            easy.setopt(pycurl.RESOLVE, [f"{self.origin.host}:{self.origin.port}:{self.origin.address}"])
        return easy

    def collect(self, now: float) -> list[tuple[_Job, Outcome]]:
        """Outcomes of the requests that ended since the last call."""
        outcomes: list[tuple[_Job, Outcome]] = []
        more = 1
        while more:
            more, succeeded, failed = self.multi.info_read()
            for easy in succeeded:
                self.last_answer = now
                status = easy.getinfo(pycurl.RESPONSE_CODE)
                wish = easy.getinfo(pycurl.RETRY_AFTER) if status >= 400 else 0
                response = Response(status, bytes(easy.answer), float(wish) if wish > 0 else None)
                outcomes.append((self._release(easy), response))
            for easy, code, text in failed:
                error = self._error(easy.job, code, text)
                outcomes.append((self._release(easy), error))
        return outcomes

    def _error(self, job: _Job, code: int, text: str) -> NoAnswer:
        if code == pycurl.E_OPERATION_TIMEDOUT:
            return NoAnswer("no answer in time", whole_origin=self.last_answer < job.started)
        if code in CERTIFICATE_ERRORS:
            return NoAnswer(f"certificate refused: {text}", whole_origin=True)
        kind = ConnectionCut if code in CUT_ERRORS else NoAnswer
        return kind(f"curl error {code}: {text}", whole_origin=code not in STREAM_ERRORS)

    def _release(self, easy: Any) -> _Job:
        job: _Job = easy.job
        self.multi.remove_handle(easy)
        self.active.discard(job)
        easy.job = job.easy = None
        easy.answer.clear()
        self._spare.append(easy)
        return job

    def is_spoilt_by(self, outcome: Outcome, now: float) -> bool:
        """Whether the next request should meet a fresh connection."""
        if isinstance(outcome, NoAnswer):
            return outcome.whole_origin
        return outcome.status >= 500 and now - self.created > MIN_CONNECTION_AGE

    def abandon(self, job: _Job) -> None:
        """Reset the stream of a request that nobody waits for any more."""
        if job in self.active:
            self._release(job.easy)

    def close(self) -> None:
        """Close the connections; there is no request left or all of them are given up."""
        for job in list(self.active):
            self.abandon(job)
        for easy in self._spare:
            easy.close()
        self.multi.close()


class _CurlThread:
    """The push thread: everything here except submit, abandon and stop runs in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_origins: int) -> None:
        self._loop = loop
        self._max_origins = max_origins
        self._commands: deque[tuple[_Job, bool]] = deque()
        self._awake = False
        self._stopping = False
        self.ended = False
        self._origins: dict[Origin, _Connections] = {}
        self._retired: list[_Connections] = []
        self._outcomes: list[tuple[_Job, Outcome]] = []
        self._next_sweep = 0.0
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="push-http2", daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        """Queue a request."""
        self._commands.append((job, True))
        self._ring()
        if self.ended:  # in the very moment, too late to be seen by the thread
            _resolve([(job, closed_error())])

    def abandon(self, job: _Job) -> None:
        """Give a request up."""
        self._commands.append((job, False))
        self._ring()

    async def stop(self) -> None:
        """End the thread; what is under way fails."""
        if not self._stopping:
            self._stopping = True
            self._awake = False
            self._ring()
        await asyncio.to_thread(self._thread.join)

    def _ring(self) -> None:
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._bell_rope.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("the push thread failed; the next push starts another")
        finally:
            self.ended = True
            self._shut_down()

    def _turn(self) -> None:
        open_streams = max((len(connections.active) for connections in self._origins.values()), default=0)
        if open_streams > FEW_STREAMS:
            time.sleep(open_streams * GATHER_PER_STREAM)
        for key, mask in self._selector.select(self._wait_time()):
            if key.data is None:
                self._hear_bell()
            elif self._selector.get_map().get(key.fd) is not None:
                key.data.on_ready(key.fd, mask)
        now = time.monotonic()
        self._take_commands(now)
        for connections in (*self._origins.values(), *self._retired):
            if connections.active:
                connections.on_time()
                self._collect(connections, now)
                connections.read_timer(now)
        if self._outcomes:
            self._hand_over()
        if now >= self._next_sweep or self._retired:
            self._sweep(now)

    def _wait_time(self) -> float:
        if self._commands:
            return 0.0  # queued while the connections were served; their bell has been heard already
        every = (*self._origins.values(), *self._retired)
        deadlines = [one.deadline for one in every if one.active and one.deadline is not None]
        now = time.monotonic()
        return max(0.0, min(deadlines, default=now + SWEEP_INTERVAL) - now)

    def _hear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        # Cleared before the queue is read: what is queued from now on rings again.
        self._awake = False

    def _take_commands(self, now: float) -> None:
        while self._commands:
            job, wanted = self._commands.popleft()
            if not wanted:
                if job.connections is not None:
                    job.connections.abandon(job)
            elif not job.done.cancelled():
                self._start(job, now)

    def _start(self, job: _Job, now: float) -> None:
        connections = self._origins.get(job.origin)
        if connections is None:
            if len(self._origins) >= self._max_origins:
                self._close_oldest_idle()
            connections = _Connections(job.origin, self._selector)
            self._origins[job.origin] = connections
        try:
            connections.start(job, now)
        except (pycurl.error, ValueError, TypeError) as error:
            reason = f"the request cannot be sent: {type(error).__name__}"
            self._outcomes.append((job, NoAnswer(reason, whole_origin=False)))

    def _collect(self, connections: _Connections, now: float) -> None:
        cut: list[_Job] = []
        for job, outcome in connections.collect(now):
            if (
                connections.is_spoilt_by(outcome, now)
                and self._origins.get(connections.origin) is connections
            ):
                del self._origins[connections.origin]
                self._retired.append(connections)
            if isinstance(outcome, ConnectionCut) and not job.resent:
                cut.append(job)
            else:
                self._outcomes.append((job, outcome))
        for job in cut:
            job.resent = True
            job.timeout = max(job.timeout - (now - job.started), 0.001)
            self._start(job, now)

    def _hand_over(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_resolve, outcomes)

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + SWEEP_INTERVAL
        for connections in [x for x in self._retired if not x.active]:
            self._retired.remove(connections)
            connections.close()
        for connections in [
            x for x in self._origins.values() if not x.active and now - x.last_used > ORIGIN_IDLE
        ]:
            del self._origins[connections.origin]
            connections.close()

    def _close_oldest_idle(self) -> None:
        idle = [connections for connections in self._origins.values() if not connections.active]
        if idle:
            connections = min(idle, key=lambda connections: connections.last_used)
            del self._origins[connections.origin]
            connections.close()

    def _shut_down(self) -> None:
        origins = (*self._origins.values(), *self._retired)
        jobs = [job for connections in origins for job in connections.active]
        jobs += [job for job, wanted in self._commands if wanted]
        self._outcomes += [(job, closed_error()) for job in jobs]
        for connections in origins:
            connections.close()
        self._hand_over()
        self._selector.close()
        self._bell.close()
        self._bell_rope.close()


def _resolve(outcomes: list[tuple[_Job, Outcome]]) -> None:
    for job, outcome in outcomes:
        if job.done.done():
            continue
        if isinstance(outcome, Response):
            job.done.set_result(outcome)
        else:
            job.done.set_exception(outcome)


def _collect(answer: bytearray, data: bytes) -> int:
    if len(answer) + len(data) > MAX_BODY:
        return 0  # fewer bytes than given: libcurl ends the request
    answer += data
    return len(data)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def system_ca_file() -> str:
    """The file of the system's trusted certificates (SSL_CERT_FILE overrides it, as for OpenSSL)."""
    path = ssl.get_default_verify_paths().cafile
    if path is None:
        raise FileNotFoundError("the system has no file of trusted certificates: set SSL_CERT_FILE")
    return path
