"""The server side of HTTP/2, as much of it as a push service needs and with control over every frame.

A general HTTP/2 library refuses to misbehave and costs several times more per request; both would defeat
the purpose of a test peer. Requests are complete before they are handled, answers are short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hpack import HPACKError
from hpack.hpack import encode_integer

from ntf_demo.fake_push.certificates import ALPN
from ntf_demo.fake_push.faults import REFUSED_STREAM, ConnectionSettings
from ntf_demo.fake_push.header_block import HeaderDecoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4
FRAME_HEADER: Final = 9
MAX_FRAME: Final = 1 << 14
MAX_REQUEST_BODY: Final = 1 << 20
DEFAULT_WINDOW: Final = 65535
PROTOCOL_ERROR: Final = 1
LINGER: Final = 0.5  # seconds of quiet after the last answer until the connection is closed


@dataclass(slots=True)
class PushRequest:
    """A complete request."""

    connection: ServerConnection
    stream_id: int
    headers: dict[str, str] = field(repr=False)
    body: bytearray = field(default_factory=bytearray, repr=False)
    unacknowledged: int = 0


class ServerConnection(asyncio.Protocol):
    """One client's connection; hands complete requests to `handle`."""

    def __init__(
        self,
        settings: ConnectionSettings,
        handle: Callable[[PushRequest], None],
        on_lost: Callable[[ServerConnection], None],
        *,
        requires_alpn: bool = True,
    ) -> None:
        self.violations: list[str] = []
        self._settings = settings
        self._handle = handle
        self._on_lost = on_lost
        self._requires_alpn = requires_alpn
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._decoder = HeaderDecoder()
        self._input = bytearray()
        self._output: list[bytes] = []
        self._preface_seen = False
        self._streams: dict[int, PushRequest] = {}
        self._open: set[int] = set()
        self._header_block: tuple[int, int, bytearray] | None = None
        self._unacknowledged = 0
        self._granted = max(DEFAULT_WINDOW, settings.connection_window)
        self._max_streams_agreed: int | None = None
        self._settings_sent: list[int] = []
        self.highest_stream = 0
        "The newest one that the client opened."
        self._last_processed: int | None = None
        self._close_when_done = False
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        if self._requires_alpn and tls.selected_alpn_protocol() != ALPN:
            transport.close()
            return
        self.announce(self._settings)
        if self._granted > DEFAULT_WINDOW:
            self._frame(WINDOW_UPDATE, 0, 0, (self._granted - DEFAULT_WINDOW).to_bytes(4, "big"))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._transport = None
        if self._closing is not None:
            self._closing.cancel()
        self._on_lost(self)

    @property
    def peer_host(self) -> str:
        """The client's IP address."""
        return str(self._transport.get_extra_info("peername")[0]) if self._transport else ""

    def announce(self, settings: ConnectionSettings) -> None:
        """Send SETTINGS."""
        self._settings = settings
        body = MAX_CONCURRENT_STREAMS.to_bytes(2, "big") + settings.max_streams.to_bytes(4, "big")
        body += INITIAL_WINDOW_SIZE.to_bytes(2, "big") + settings.window.to_bytes(4, "big")
        self._settings_sent.append(settings.max_streams)
        self._frame(SETTINGS, 0, 0, body)
        # A smaller window may stop streams that would then never send the data that gives them more.
        for request in self._streams.values():
            if request.unacknowledged:
                self._give_window(request.stream_id, request.unacknowledged)
                request.unacknowledged = 0

    def answer(self, stream_id: int, head: bytes, body: bytes, *, split: bool) -> None:
        """Send a response; it ends the stream."""
        if stream_id not in self._open:
            return
        self._open.discard(stream_id)
        self._frame(HEADERS, END_HEADERS | (0 if body else END_STREAM), stream_id, head)
        step = 1 if split else MAX_FRAME
        for start in range(0, len(body), step):
            last = start + step >= len(body)
            self._frame(DATA, END_STREAM if last else 0, stream_id, body[start : start + step])
        self._close_if_done()

    def reset(self, stream_id: int, code: int) -> None:
        """Send RST_STREAM."""
        self._open.discard(stream_id)
        self._streams.pop(stream_id, None)
        self._frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))
        self._close_if_done()

    def go_away(self, last_stream_id: int, *, close: bool) -> None:
        """Send GOAWAY; streams above the last one are ignored from now on."""
        self._last_processed = last_stream_id
        for stream_id in [x for x in self._open if x > last_stream_id]:
            self._open.discard(stream_id)
            self._streams.pop(stream_id, None)
        self._frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + bytes(4))
        self._close_when_done = close
        self._close_if_done()

    def drop(self) -> None:
        """Cut the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End TLS and the connection in good order, but without a GOAWAY."""
        if self._transport is not None:
            self._transport.close()

    def flush(self) -> None:
        """Write what has been queued."""
        if self._output and self._transport is not None:
            self._transport.write(b"".join(self._output))
        self._output.clear()

    def data_received(self, data: bytes) -> None:
        """Take frames."""
        self._input += data
        if not self._preface_seen:
            if len(self._input) < len(PREFACE):
                return
            if not self._input.startswith(PREFACE):
                self.drop()
                return
            del self._input[: len(PREFACE)]
            self._preface_seen = True
        try:
            self._take_frames()
        except (ValueError, IndexError, HPACKError) as error:
            self.violations.append(f"malformed frame: {type(error).__name__}")
            self._frame(GOAWAY, 0, 0, bytes(4) + PROTOCOL_ERROR.to_bytes(4, "big"))
            self.flush()
            self.drop()
        self._close_if_done()
        self.flush()

    def _take_frames(self) -> None:
        view = bytes(self._input)
        start, end = 0, len(view)
        while end - start >= FRAME_HEADER:
            length = int.from_bytes(view[start : start + 3], "big")
            if length > MAX_FRAME:
                raise ValueError
            if end - start < FRAME_HEADER + length:
                break
            kind, flags = view[start + 3], view[start + 4]
            stream_id = int.from_bytes(view[start + 5 : start + 9], "big") & 0x7FFFFFFF
            start += FRAME_HEADER
            self._on_frame(kind, flags, stream_id, view[start : start + length])
            start += length
        del self._input[:start]

    def _on_frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        if kind == DATA:
            self._on_data(flags, stream_id, body)
        elif kind == HEADERS:
            self._on_headers(flags, stream_id, body)
        elif kind == CONTINUATION and self._header_block is not None:
            self._header_block[2].extend(body)
            if flags & END_HEADERS:
                self._end_headers()
        elif kind == SETTINGS and flags & ACK:
            self._max_streams_agreed = self._settings_sent.pop(0)
        elif kind == SETTINGS:
            self._frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._frame(PING, ACK, 0, body)
        elif kind == RST_STREAM:
            self._open.discard(stream_id)
            self._streams.pop(stream_id, None)
            self._close_if_done()

    def _on_headers(self, flags: int, stream_id: int, body: bytes) -> None:
        if flags & PADDED:
            body = body[1 : len(body) - body[0]]
        if flags & PRIORITY:
            body = body[5:]
        self._header_block = (stream_id, flags, bytearray(body))
        if flags & END_HEADERS:
            self._end_headers()

    def _end_headers(self) -> None:
        assert self._header_block is not None
        stream_id, flags, block = self._header_block
        self._header_block = None
        # Decoded even if the stream is ignored: the compression state is shared.
        headers = self._decoder.decode(bytes(block))
        self.highest_stream = max(self.highest_stream, stream_id)
        if self._last_processed is not None and stream_id > self._last_processed:
            return
        agreed = self._max_streams_agreed
        if agreed is not None and len(self._open) >= agreed and not self._settings_sent:
            self.violations.append("more streams than allowed")
            self._frame(RST_STREAM, 0, stream_id, REFUSED_STREAM.to_bytes(4, "big"))
            return
        request = PushRequest(self, stream_id, headers)
        self._open.add(stream_id)
        if flags & END_STREAM:
            self._handle(request)
        else:
            self._streams[stream_id] = request

    def _on_data(self, flags: int, stream_id: int, body: bytes) -> None:
        self._unacknowledged += len(body)
        if flags & PADDED:
            body = body[1 : len(body) - body[0]]
        request = self._streams.get(stream_id)
        if request is not None:
            request.body += body
            request.unacknowledged += len(body)
        if self._unacknowledged * 2 > min(self._settings.connection_window, self._granted):
            self._give_window(0, self._unacknowledged)
            self._unacknowledged = 0
        if request is None:
            return
        if len(request.body) > MAX_REQUEST_BODY:
            self.reset(stream_id, PROTOCOL_ERROR)
        elif flags & END_STREAM:
            del self._streams[stream_id]
            self._handle(request)
        elif request.unacknowledged * 2 > self._settings.window:
            self._give_window(stream_id, request.unacknowledged)
            request.unacknowledged = 0

    def _give_window(self, stream_id: int, size: int) -> None:
        delay = self._settings.window_delay
        if delay:
            self._loop.call_later(delay, self._give_window_now, stream_id, size)
        else:
            self._frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))

    def _give_window_now(self, stream_id: int, size: int) -> None:
        self._frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))
        self.flush()

    def _close_if_done(self) -> None:
        if self._close_when_done and not self._open and self._transport is not None:
            # Not at once: closing while the client sends would take the GOAWAY back from its buffer.
            if self._closing is not None:
                self._closing.cancel()
            self._closing = self._loop.call_later(LINGER, self._transport.close)

    def _frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        head = len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
        self._output.append(head + body)


def response_head(status: int, fields: tuple[tuple[str, str], ...]) -> bytes:
    """A header block that leaves the compression state alone (RFC 7541, literals without indexing)."""
    block = b"\x88" if status == 200 else b"\x08" + _string(str(status))
    return block + b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields)


def _string(text: str) -> bytes:
    data = text.encode()
    return bytes(encode_integer(len(data), 7)) + data
