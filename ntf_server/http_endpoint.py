"""Metrics and health over plain local HTTP: three GET paths, nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ntf_server.metrics import counter

REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192
MAX_REQUESTS = 32
"Under way at once. Scrapers and health checks are few; others on this machine must not use up the files."
PLAIN = "text/plain; charset=utf-8"

FILE_FAILURES = counter("metrics_file_failures", "Attempts to write the metrics file that failed")

logger = logging.getLogger(__name__)


class HttpEndpoint:
    """`ready` says what is missing, or nothing when the server can serve clients."""

    def __init__(self, ready: Callable[[], str]) -> None:
        self._ready = ready
        self._server: asyncio.Server | None = None
        self._requests = 0

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._handle, host, port, limit=MAX_REQUEST)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._requests += 1
        try:
            if self._requests > MAX_REQUESTS:
                return
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._requests -= 1
            writer.close()

    def _respond(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return _response("405 Method Not Allowed", PLAIN, b"only GET\n")
        if path == b"/metrics":
            return _response("200 OK", CONTENT_TYPE_LATEST, generate_latest())
        if path == b"/health/live":
            return _response("200 OK", PLAIN, b"live\n")
        if path == b"/health/ready":
            missing = self._ready()
            return _response(
                *(
                    ("503 Service Unavailable", PLAIN, f"{missing}\n".encode())
                    if missing
                    else ("200 OK", PLAIN, b"ready\n")
                )
            )
        return _response("404 Not Found", PLAIN, b"/metrics, /health/live, /health/ready\n")


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


async def write_metrics_file(path: Path, interval: float) -> None:
    """Keep `path` up to date, for ever; readers never see half a file.

    A missing folder or a full disk is said once and tried again: figures are not worth a daemon.
    """
    draft, failing = path.with_name(f".{path.name}.new"), False
    while True:
        try:
            await asyncio.to_thread(_replace, draft, path, generate_latest())
        except OSError as error:
            FILE_FAILURES.inc()
            if not failing:
                logger.error("cannot write the metrics to %s: %s; it is tried again", path, error.strerror)
            failing = True
        else:
            if failing:
                logger.info("the metrics are written to %s again", path)
            failing = False
        await asyncio.sleep(interval)


def _replace(draft: Path, path: Path, data: bytes) -> None:
    draft.write_bytes(data)
    os.replace(draft, path)
