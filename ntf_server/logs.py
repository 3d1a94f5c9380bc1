"""Log lines as text, as JSON or for journald. No peer can flood them, no full disk stops the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ntf_server.clock import SystemClock
from ntf_server.config import LogConfig
from ntf_server.metrics import counter

logger = logging.getLogger(__name__)

WINDOW = 60.0
LINES_PER_WINDOW = 5
"Lines of one kind; further ones are counted."
MAX_KINDS = 500
MAX_WAITING = 1000
"Lines that wait to be written."
CLOSE_TIMEOUT = 2.0
FLUSH_POLL = 0.005
JOURNALD_SOCKET = "/run/systemd/journal/socket"
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
BETWEEN = "\0"
"Between the fields of a line, from the formatter to the stream."

REPEATED = counter("log_lines_repeated", "Log lines left out because their kind repeats")
LOST = counter("log_lines_lost", "Log lines that could not be written")

LineKind = tuple[str, int, str]
"Logger, level and format: what a line says, whatever it says it about."


@dataclass(slots=True)
class LineCount:
    """How often a kind of line came since it began."""

    began: float
    lines: int = 0
    left_out: logging.LogRecord | None = None
    "The last one that was."


class RepeatFilter:
    """Lets the first lines of each kind through in each window, and says afterwards how many there were."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._windows: OrderedDict[LineKind, LineCount] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """What to write now, instead of `record` alone."""
        now = self._now()
        written = self._ended(now - WINDOW)
        kind = (record.name, record.levelno, str(record.msg))
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= MAX_KINDS:
                written += self._report(*self._windows.popitem(last=False))
            window = self._windows[kind] = LineCount(now)
        window.lines += 1
        if window.lines <= LINES_PER_WINDOW:
            return [*written, record]
        window.left_out = record
        REPEATED.inc()
        return written

    def rest(self) -> list[logging.LogRecord]:
        """What was left out and not reported yet."""
        return self._ended(self._now())

    def _ended(self, before: float) -> list[logging.LogRecord]:
        """Windows are in the order in which they began."""
        reports = []
        while self._windows and next(iter(self._windows.values())).began <= before:
            reports += self._report(*self._windows.popitem(last=False))
        return reports

    def _report(self, kind: LineKind, window: LineCount) -> list[logging.LogRecord]:
        if window.left_out is None:
            return []
        record, count = window.left_out, window.lines - LINES_PER_WINDOW
        text = f"{record.getMessage()} (repeated {count} times in {self._now() - window.began:.0f} s)"
        return [logging.LogRecord(kind[0], kind[1], record.pathname, record.lineno, text, None, None)]


class LineStream(Protocol):
    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...


class QuietHandler(logging.Handler):
    """Hands what the filter lets through to a thread that writes it.

    So neither a full disk nor a pipe that nobody empties stops the daemon: lines that cannot be written are
    counted, and that is all.
    """

    def __init__(self, stream: LineStream, now: Callable[[], float]) -> None:
        super().__init__()
        self._stream = stream
        self._repeats = RepeatFilter(now)
        self._waiting: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._put(self._repeats.filter(record))

    def flush(self) -> None:
        """Wait until everything is written, for a bounded time."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(FLUSH_POLL)

    def tell_left_out(self) -> None:
        """Before the last line: afterwards nothing follows it."""
        self._put(self._repeats.rest())

    def close(self) -> None:
        """At the end of the process."""
        self.tell_left_out()
        self.flush()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        super().close()

    def _put(self, records: Iterable[logging.LogRecord]) -> None:
        for record in records:
            try:
                self._waiting.put_nowait(self.format(record) + "\n")
            except queue.Full:
                LOST.inc()

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):  # a stream that is closed raises the latter
                LOST.inc()
            finally:
                self._waiting.task_done()


class UtcFormatter(logging.Formatter):
    """Times in UTC, and they say so."""

    converter = time.gmtime  # type: ignore[assignment]  # its argument may be left out
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class JsonFormatter(UtcFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class JournaldFormatter(logging.Formatter):
    """With fields to look for: `journalctl -u ntf-server LOGGER=ntf_server.router`."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        fields = {
            "MESSAGE": message.replace(BETWEEN, "?"),
            "PRIORITY": PRIORITIES.get(record.levelno, 5),
            "SYSLOG_IDENTIFIER": "ntf-server",
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": record.lineno,
        }
        return BETWEEN.join(f"{key}={value}" for key, value in fields.items())


class JournaldStream:
    """journald's own protocol: a datagram for each line. Whoever writes counts what is lost."""

    def write(self, text: str) -> None:
        fields = text.removesuffix("\n").split(BETWEEN)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"".join(map(_encoded, fields)), JOURNALD_SOCKET)

    def flush(self) -> None:
        """Datagrams do not wait."""


def _encoded(field: str) -> bytes:
    key, _, value = field.partition("=")
    data = value.encode("utf-8", "replace")
    if b"\n" not in data:
        return f"{key}=".encode() + data + b"\n"
    return f"{key}\n".encode() + len(data).to_bytes(8, "little") + data + b"\n"


def _output(config: LogConfig) -> tuple[LineStream, logging.Formatter]:
    if config.format == "journald":
        return JournaldStream(), JournaldFormatter()
    text = UtcFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    return sys.stderr, JsonFormatter() if config.format == "json" else text


def set_up_logging(config: LogConfig) -> None:
    stream, formatter = _output(config)
    handler = QuietHandler(stream, SystemClock().monotonic)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], force=True)
    set_level(config)
    # Libraries that log statements or requests would put ids into the log.
    for library in ("aiosqlite", "aioapns", "hpack", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)


def tell_left_out() -> None:
    """Sum up the lines that were left out and not told of yet."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QuietHandler):
            handler.tell_left_out()


def set_level(config: LogConfig) -> None:
    logging.getLogger().setLevel(config.level.upper())


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What the event loop says of an error that nobody caught.

    The default shows objects with all they hold, each time in other words; this says what kind of error it
    was and where it came from, always in the same.
    """
    error = context.get("exception")
    place = "".join(traceback.format_tb(error.__traceback__)) if error is not None else ""
    kind = "" if error is None else type(error).__name__
    what = str(context.get("message", "")).partition("(")[0]  # behind it stand the callback's arguments
    logger.error("the event loop: %s: %s\n%s", what, kind, place)
