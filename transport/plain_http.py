"""A few pages over plain HTTP, for metrics, health and information: GET only, small and bounded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import NamedTuple

from protocol.hiding import hides_bytes
from transport.hosts import is_address, named_host

REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192
MAX_REQUESTS = 32
"""Under way at once. Scrapers and health checks are few; others on this machine must not use up the files.
The oldest makes room for the next: who asks at once is answered at once, and health is told in any case."""
PLAIN = "text/plain; charset=utf-8"
OK, UNAVAILABLE = "200 OK", "503 Service Unavailable"
LOCAL_NAMES = frozenset({"localhost"})
_HOST = re.compile(rb"\r\nhost[ \t]*:([^\r\n]*)", re.IGNORECASE)
LOADS_NOTHING = "default-src 'none'; frame-ancestors 'none'"
SECURITY = (
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
)
"Other sites that the reader has open can neither show these pages nor read them."


@hides_bytes
class Page(NamedTuple):
    content_type: str
    body: bytes
    status: str = OK
    policy: str = LOADS_NOTHING
    "What a browser may load for it (Content-Security-Policy)."


class HttpPages:
    """Subclasses say which pages there are."""

    def __init__(self, hosts: Collection[str] | None = None) -> None:
        """`hosts`: names that these pages may be asked for by, beside `localhost` and IP addresses. A page of
        another site, whose name the site's owner resolves to this machine, is refused (DNS rebinding).
        None: any name."""
        self._names = None if hosts is None else LOCAL_NAMES.union(host.lower() for host in hosts)
        self._server: asyncio.Server | None = None
        self._requests: dict[asyncio.Task[None], None] = {}

    def page(self, path: bytes) -> Page | None:
        """What is at a path, without its query."""
        raise NotImplementedError

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._handle, host, port, limit=MAX_REQUEST)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Ends requests that are not complete; `asyncio.Server.wait_closed` would wait for them."""
        if self._server is None:
            return
        self._server.close()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._requests[task] = None
        if len(self._requests) > MAX_REQUESTS:
            next(iter(self._requests)).cancel()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._requests.pop(task, None)
            writer.close()

    def _respond(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        if method != b"GET":
            return _response(Page(PLAIN, b"only GET\n", "405 Method Not Allowed"))
        if not all(map(self._answers_to, _HOST.findall(head))):
            return _response(Page(PLAIN, b"unknown host name\n", "421 Misdirected Request"))
        found = self.page(rest.partition(b" ")[0].partition(b"?")[0])
        return _response(found or Page(PLAIN, b"nothing here\n", "404 Not Found"))

    def _answers_to(self, header: bytes) -> bool:
        host = named_host(header.decode("latin-1"))
        return self._names is None or host in self._names or is_address(host)


def _response(page: Page) -> bytes:
    head = f"HTTP/1.1 {page.status}\r\nContent-Type: {page.content_type}\r\n"
    head += f"Content-Security-Policy: {page.policy}\r\n{SECURITY}"
    return f"{head}Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n".encode() + page.body
