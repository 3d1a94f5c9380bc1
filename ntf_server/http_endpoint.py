"""Metrics and health over plain local HTTP: three GET paths, nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192
PLAIN = "text/plain; charset=utf-8"


class HttpEndpoint:
    """`ready` says what is missing, or nothing when the server can serve clients."""

    def __init__(self, ready: Callable[[], str]) -> None:
        self._ready = ready
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._handle, host, port, limit=MAX_REQUEST)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
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
    """Keep `path` up to date, for ever; readers never see half a file."""
    while True:
        draft = path.with_name(f".{path.name}.new")
        await asyncio.to_thread(_replace, draft, path, generate_latest())
        await asyncio.sleep(interval)


def _replace(draft: Path, path: Path, data: bytes) -> None:
    draft.write_bytes(data)
    os.replace(draft, path)
