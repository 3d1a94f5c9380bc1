"""Accepting TLS connections without letting those who connect slow down those who are connected.

A few sockets are accepted per turn of the event loop, and handshakes, which are mostly public-key arithmetic,
share a millisecond of each turn. However many peers arrive at once, everything else goes on in between.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from OpenSSL import SSL

from transport.accepting import Acceptor
from transport.budget import CpuBudget
from transport.cancellation import raise_if_cancelled
from transport.engine import TlsEngine, receive_buffer
from transport.errors import ConnectionClosed, TlsFailed, TransportError
from transport.limits import network_of, source_of
from transport.streams import READ_LIMIT, HandshakeCallback, TlsStream

HANDSHAKE_TIMEOUT = 15.0
SHUTDOWN_TIMEOUT = 10.0  # handlers that did not end this long after the server closed are left behind
HANDSHAKE_TURN = 0.001  # seconds of handshakes in one turn of the event loop
HANDSHAKE_READ = 4096  # the most that waits of a peer for the next turn of its handshake
GRACE = 3.0  # where room is short, a handshake that takes longer makes room
LOOK_FOR_ROOM = 0.25
NETWORK_PART = 2  # one network may have begun one handshake of so many

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How connections are accepted."""

    handshake_timeout: float = HANDSHAKE_TIMEOUT
    max_handshakes: int = 0
    "Handshakes that have begun and not ended; further ones wait. 0: no limit."
    read_limit: int = READ_LIMIT
    write_limit: int | None = None
    admit: Callable[[str], bool] | None = None
    "Asked with the peer's address when it was accepted, before anything is spent on it."
    release: Callable[[str], None] | None = None
    "Called once for each connection that was admitted, when it is gone."
    on_refused: Callable[[], None] | None = None
    "Called for each connection that was not admitted."
    on_handshake_error: Callable[[TransportError], None] | None = None
    budget: CpuBudget | None = None
    "Charged for handshakes; refuses connections of suspect sources, and delays those of busy ones."
    reuse_port: bool = False
    "Other processes may listen on the same port; the system deals connections out."


DEFAULT = ServerConfig()


class Server:
    """A listening TLS server; it owns the tasks that run the handler."""

    def __init__(
        self,
        handler: Callable[[TlsStream], Awaitable[None]],
        context: SSL.Context | Callable[[], SSL.Context],
        config: ServerConfig,
    ) -> None:
        self._handler = handler
        self._context = context
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(self._take, reuse_port=config.reuse_port)
        self._streams: set[AcceptedStream] = set()
        self._unfinished: dict[AcceptedStream, float] = {}
        "Connections before the end of their handshake, and since when; oldest first."
        self._handshakes = Handshakes(config.max_handshakes, config.budget)
        self._opening: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Task[None], TlsStream] = {}
        self._closing = False

    async def listen(self, host: str | None, port: int) -> None:
        """Start to accept connections."""
        await self._acceptor.listen(host, port)

    @property
    def port(self) -> int:
        """The port really listened on."""
        return self._acceptor.port

    @property
    def connections(self) -> int:
        """How many connections have a running handler."""
        return len(self._running)

    def stop_accepting(self) -> None:
        """Accept no more and drop unfinished handshakes; handlers go on."""
        if not self._closing:
            self._closing = True
            self._acceptor.close()
        for stream in list(self._unfinished):
            stream.abort()

    def close(self) -> None:
        """Accept no more, drop unfinished handshakes, cancel the handlers."""
        self.stop_accepting()
        for task in list(self._running):
            task.cancel()

    async def wait_closed(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """Wait until all handlers and connections have ended; what takes too long is logged and cut off."""
        try:
            async with asyncio.timeout(timeout):
                while tasks := [*self._running, *self._opening]:
                    await asyncio.wait(tasks)
                for stream in list(self._streams):
                    await stream.wait_closed()
        except TimeoutError:
            # Without their names: they hold the addresses of clients.
            logger.error("connections that did not stop in time: %d", len(self._running))
        for stream in list(self._streams):
            stream.abort()
            await stream.wait_closed()

    # Accepting

    def _take(self, sock: socket.socket, peer: str) -> None:
        if self._admits(peer):
            self._open(sock, peer)
        else:
            sock.close()
            if self._config.on_refused is not None:
                self._config.on_refused()
            self._drop_slowest()  # for the next one

    def _admits(self, peer: str) -> bool:
        budget, admit = self._config.budget, self._config.admit
        return (budget is None or budget.admits(source_of(peer))) and (admit is None or admit(peer))

    def _drop_slowest(self) -> None:
        """End the oldest unfinished handshake, if its peer had time enough."""
        oldest, since = next(iter(self._unfinished.items()), (None, 0.0))
        if oldest is not None and self._loop.time() - since > GRACE:
            del self._unfinished[oldest]
            oldest.give_up()

    def _open(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        context = self._context() if callable(self._context) else self._context
        stream = AcceptedStream(context, self._handshake_finished, self, peer, self._config)
        self._streams.add(stream)
        self._unfinished[stream] = self._loop.time()
        task = self._loop.create_task(self._connect(stream, sock), name=f"tls accept {peer}")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, stream: AcceptedStream, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: stream, sock)
        except OSError:  # gone already
            sock.close()
            self._unfinished.pop(stream, None)
            self.lost(stream)

    def opened(self, stream: AcceptedStream) -> None:
        """Its socket is ready: the peer has to begin the handshake."""
        stream.start_timeout(self._config.handshake_timeout)
        if self._closing:
            stream.abort()

    def lost(self, stream: AcceptedStream) -> None:
        """Its socket was closed."""
        if stream in self._streams:
            self._streams.remove(stream)
            if self._config.release is not None:
                self._config.release(stream.address)

    def go_on(self, stream: AcceptedStream) -> None:
        """The peer sent something that its handshake can go on with."""
        self._handshakes.add(stream)

    def _handshake_finished(self, stream: TlsStream, error: TransportError | None) -> None:
        assert isinstance(stream, AcceptedStream)
        self._unfinished.pop(stream, None)
        self._handshakes.remove(stream)
        if error is None:
            name = f"tls {stream.peer[0]} {stream.peer[1]}"
            task = self._loop.create_task(self._run(stream), name=name)
            self._running[task] = stream
            task.add_done_callback(self._forget)
        elif not self._closing and self._config.on_handshake_error is not None:
            self._config.on_handshake_error(error)

    # Handlers

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)

    async def _run(self, stream: TlsStream) -> None:
        try:
            await self._handler(stream)
        except ConnectionClosed:
            stream.abort()
        except Exception as error:
            stream.abort()
            raise_if_cancelled()
            # The error's text may hold what the peer sent, so only its kind and place are logged.
            place = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a connection's handler failed with %s\n%s", type(error).__name__, place)
        finally:
            stream.close()


class Handshakes:
    """Gives the handshakes that can go on a millisecond of each turn of the event loop.

    Those that have begun go first, since they free what they use when they end. The others begin in turn, one
    network (`network_of`) after the other, and one network has a part of the places, fewer if others want
    them: nobody waits for the peers of another.
    """

    def __init__(self, limit: int, budget: CpuBudget | None) -> None:
        self._limit = limit
        self._budget = budget
        self._each = -(-limit // NETWORK_PART)
        self._loop = asyncio.get_running_loop()
        self._begun: dict[AcceptedStream, float] = {}
        "And since when, oldest first."
        self._begun_by: Counter[str] = Counter()
        self._ready: deque[AcceptedStream] = deque()
        self._waiting: OrderedDict[str, dict[AcceptedStream, None]] = OrderedDict()
        "By network; the first one's turn it is."
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: AcceptedStream) -> None:
        """Let it go on when it is its turn."""
        if stream in self._begun:
            self._ready.append(stream)
        else:
            self._waiting.setdefault(stream.network, {})[stream] = None
            self._make_room(stream.network)
        self._schedule()

    def remove(self, stream: AcceptedStream) -> None:
        """It ended."""
        if self._begun.pop(stream, None) is not None:
            self._begun_by[stream.network] -= 1
            if not self._begun_by[stream.network]:
                del self._begun_by[stream.network]
        self._leave(stream)
        if self._waiting:
            self._schedule()

    def _leave(self, stream: AcceptedStream) -> None:
        waiting = self._waiting.get(stream.network)
        if waiting is not None:
            waiting.pop(stream, None)
            if not waiting:
                del self._waiting[stream.network]

    def _schedule(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        until = self._loop.time() + HANDSHAKE_TURN
        while (stream := self._next()) is not None:
            self._shake_hands(stream)
            if self._loop.time() >= until:
                break
        if self._ready or self._network_with_room() is not None:
            self._schedule()
        elif self._waiting and self._timer is None:
            self._timer = self._loop.call_later(LOOK_FOR_ROOM, self._look_for_room)

    def _shake_hands(self, stream: AcceptedStream) -> None:
        started = time.thread_time()
        stream.shake_hands()
        if self._budget is not None:
            self._budget.charge(stream.source, time.thread_time() - started)

    def _next(self) -> AcceptedStream | None:
        if self._ready:
            return self._ready.popleft()
        network = self._network_with_room()
        if network is None:
            return None
        stream = next(iter(self._waiting[network]))
        self._waiting.move_to_end(network)
        self._leave(stream)
        if not stream.is_closing:
            self._begun[stream] = self._loop.time()
            self._begun_by[network] += 1
        return stream

    def _network_with_room(self) -> str | None:
        """The next one that waits and has not begun too many; few have."""
        if self._limit and len(self._begun) >= self._limit:
            return None
        return next((network for network in self._waiting if self._may_begin(network)), None)

    def _may_begin(self, network: str) -> bool:
        if self._each and self._begun_by[network] >= self._each:
            return False
        return self._budget is None or self._budget.has_share(next(iter(self._waiting[network])).source)

    def _make_room(self, network: str) -> None:
        """If all places are taken, the network that has most gives its oldest to one that has fewer. So peers
        that do not go on keep others out only if they are of as many networks as there are places."""
        if not self._limit or len(self._begun) < self._limit:
            return
        busiest, most = self._begun_by.most_common(1)[0]
        if self._begun_by[network] + 1 < most:
            self._waiting.move_to_end(network, last=False)
            next(stream for stream in self._begun if stream.network == busiest).give_up()

    def _look_for_room(self) -> None:
        """End the handshakes whose peers had time enough, if others wait."""
        self._timer = None
        if not self._waiting:
            return
        began_before = self._loop.time() - GRACE
        for stream in [stream for stream, since in self._begun.items() if since < began_before]:
            stream.give_up()
        self._schedule()


class AcceptedStream(TlsStream):
    """A server's side of a connection. Until its peer says something it has no TLS state and costs little."""

    __slots__ = ("_early", "_owner", "_shaking", "_started", "address", "network", "source")

    def __init__(
        self,
        context: SSL.Context,
        on_handshake: HandshakeCallback,
        owner: Server,
        address: str,
        config: ServerConfig,
    ) -> None:
        super().__init__(
            context,
            on_handshake,
            client_side=False,
            read_limit=config.read_limit,
            write_limit=config.write_limit,
        )
        self._owner = owner
        self.address = address
        self.source = source_of(address)
        self.network = network_of(self.source)
        self.peer = (address, 0)
        self._shaking, self._started = True, False
        self._early = b""

    def shake_hands(self) -> None:
        """Go on with what the peer sent, and let it send more."""
        early, self._early = self._early, b""
        if self.is_closing:
            return
        assert self._transport is not None
        if not self._started:
            self._started = True
            self._engine = TlsEngine(self.context, client_side=False)
        self._engine.lend()[: len(early)] = early
        self._engine.feed(len(early))
        self._process()
        self._shaking = not self._engine.established
        if not self._reading_paused:
            self._transport.resume_reading()

    def give_up(self) -> None:
        """Others need the room."""
        self._fail(TlsFailed("the peer took too long for the handshake while others waited"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See TlsStream."""
        if self._shaking:
            return receive_buffer()[: HANDSHAKE_READ - len(self._early)]
        return super().get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """See TlsStream; during the handshake, the bytes wait for their turn."""
        if not self._shaking:
            super().buffer_updated(nbytes)
            return
        assert self._transport is not None
        self.last_received = self._loop.time()
        if not self._early:
            self._owner.go_on(self)
        self._early += receive_buffer()[:nbytes]
        if len(self._early) == HANDSHAKE_READ:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """See TlsStream."""
        super().connection_lost(error)
        self._owner.lost(self)

    def _start(self) -> None:
        self._owner.opened(self)

    def _last_words(self) -> bytes:
        return super()._last_words() if self._started else b""


async def serve(
    handler: Callable[[TlsStream], Awaitable[None]],
    host: str | None,
    port: int,
    *,
    context: SSL.Context | Callable[[], SSL.Context],
    config: ServerConfig = DEFAULT,
) -> Server:
    """Listen, and run `handler` for every connection whose handshake succeeded.

    The stream is closed when the handler returns, and aborted when it raises. A function as `context` is
    called per connection, so certificates can be replaced.
    """
    server = Server(handler, context, config)
    await server.listen(host, port)
    return server
