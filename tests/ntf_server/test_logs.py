"""Log lines: bounded whatever happens, and never the end of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntf_server import logs
from ntf_server.config import LogConfig
from ntf_server.logs import LINES_PER_WINDOW, MAX_KINDS, WINDOW, QuietHandler, set_up_logging


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Lines(io.StringIO):
    """What was written, once everything is."""

    handler: QuietHandler

    def getvalue(self) -> str:
        self.handler.flush()
        return super().getvalue()


@pytest.fixture
def stream() -> Lines:
    return Lines()


@pytest.fixture
def log(clock: Clock, stream: Lines) -> Iterator[logging.Logger]:
    log = logging.Logger("test")
    stream.handler = handler = QuietHandler(stream, clock)
    log.addHandler(handler)
    yield log
    handler.close()


def test_repeated_lines_are_counted(log: logging.Logger, clock: Clock, stream: Lines) -> None:
    for number in range(412 + LINES_PER_WINDOW):
        log.warning("peer %d misbehaves", number)
        log.warning("once") if number == 7 else None
    assert len(stream.getvalue().splitlines()) == LINES_PER_WINDOW + 1
    clock.now += WINDOW
    log.info("something else")
    *_, summary, last = stream.getvalue().splitlines()
    assert summary == "peer 416 misbehaves (repeated 412 times in 60 s)"
    assert last == "something else"
    log.warning("peer %d misbehaves", 1)
    assert stream.getvalue().endswith("peer 1 misbehaves\n")


def test_the_rest_is_told_at_the_end(clock: Clock, stream: Lines) -> None:
    stream.handler = handler = QuietHandler(stream, clock)
    log = logging.Logger("test")
    log.addHandler(handler)
    for _ in range(LINES_PER_WINDOW + 2):
        log.error("again")
    handler.close()
    assert stream.getvalue().endswith("again (repeated 2 times in 0 s)\n")


def test_kinds_are_bounded(log: logging.Logger, stream: Lines) -> None:
    for number in range(2 * MAX_KINDS):
        log.info(f"never the same {number}")
    (handler,) = log.handlers
    assert isinstance(handler, QuietHandler)
    assert len(handler._repeats._windows) == MAX_KINDS


def test_a_stream_that_fails_is_survived(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log, handler = logging.Logger("test"), QuietHandler(FullDisk(), clock)
    log.addHandler(handler)
    before = logs.LOST._value.get()
    log.error("nobody reads this")
    handler.close()
    assert logs.LOST._value.get() == before + 1
    assert capsys.readouterr().err == ""


def test_a_pipe_that_nobody_empties_does_not_stop_the_daemon(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CLOSE_TIMEOUT", 0.1)
    reading, writing = os.pipe()
    before = logs.LOST._value.get()
    stream = os.fdopen(writing, "w")
    log, handler = logging.Logger("test"), QuietHandler(stream, clock)
    log.addHandler(handler)
    for number in range(3000):
        log.error(f"line {number} {'x' * 200}")
    assert logs.LOST._value.get() > before
    handler.close()
    os.close(reading)  # what waits fails now, and frees the thread
    monkeypatch.setattr(logs, "CLOSE_TIMEOUT", 10.0)
    handler.close()
    handler._thread.join(10)
    assert not handler._thread.is_alive()
    with contextlib.suppress(OSError):
        stream.close()


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        set_up_logging(LogConfig(level="info", format="json"))
        logging.getLogger("a.b").info("hello %s", "you")
        root.handlers[0].flush()
        line = json.loads(capsys.readouterr().err)
        assert (line["level"], line["logger"], line["message"]) == ("info", "a.b", "hello you")
    finally:
        logging.basicConfig(level=level, handlers=before, force=True)


async def test_errors_that_nobody_caught_are_one_kind(
    log: logging.Logger, stream: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "logger", log)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.log_loop_error)

    def fail(secret: str) -> None:
        raise ValueError(secret)

    for number in range(50):
        loop.call_soon(fail, f"token {number}")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert stream.getvalue().count("the event loop") == LINES_PER_WINDOW
    assert "fail: ValueError" in stream.getvalue()
    assert "token" not in stream.getvalue()


def test_times_are_utc_and_say_so() -> None:
    record = logging.LogRecord("test", logging.INFO, "x.py", 1, "text", None, None)
    record.created, record.msecs = 0.25, 250.0
    line = logs.UtcFormatter("%(asctime)s %(message)s").format(record)
    assert line == "1970-01-01T00:00:00.250Z text"
    assert json.loads(logs.JsonFormatter().format(record))["time"] == "1970-01-01T00:00:00.250Z"


def test_journald_gets_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(logs, "JOURNALD_SOCKET", str(tmp_path / "journal"))
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "journal"))
        manager.settimeout(10)
        handler = QuietHandler(logs.JournaldStream(), clock)
        handler.setFormatter(logs.JournaldFormatter())
        log = logging.Logger("ntf_server.test")
        log.addHandler(handler)
        log.error("one line")
        log.warning("two\nlines")
        first, second = manager.recv(4096), manager.recv(4096)
        handler.close()
    assert first.startswith(
        b"MESSAGE=one line\nPRIORITY=3\nSYSLOG_IDENTIFIER=ntf-server\nLOGGER=ntf_server.test\n"
    )
    assert second.startswith(b"MESSAGE\n" + (9).to_bytes(8, "little") + b"two\nlines\nPRIORITY=4\n")


def test_no_journald_costs_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(logs, "JOURNALD_SOCKET", str(tmp_path / "nobody"))
    before = logs.LOST._value.get()
    handler = QuietHandler(logs.JournaldStream(), clock)
    handler.emit(logging.LogRecord("test", logging.INFO, "x.py", 1, "text", None, None))
    handler.close()
    assert logs.LOST._value.get() == before + 1
