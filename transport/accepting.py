"""Listening, and taking connections a few at a time, so that those who connect do not hold up anybody."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

BACKLOG = 1024
ACCEPTS_PER_TURN = 4
ACCEPT_PAUSE = 0.5  # the system has no socket for us: asking at once again would be asking for ever
NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"A machine without IPv6 listens on IPv4 alone."

logger = logging.getLogger(__name__)


class Acceptor:
    """Hands each connection to `take` with its peer's address, before anything is spent on it.

    `take` owns the socket from then on, and says itself whom it admits.
    """

    def __init__(self, take: Callable[[socket.socket, str], None], *, reuse_port: bool = False) -> None:
        """`reuse_port`: other processes may listen on the same port; the system deals connections out."""
        self._take = take
        self._reuse_port = reuse_port
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._resume: asyncio.TimerHandle | None = None

    async def listen(self, host: str | None, port: int) -> None:
        """Start to accept connections."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        absent = OSError(errno.EADDRNOTAVAIL, f"no address of {host} to listen on")
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                self._listening.append(_listen(family, address, self._reuse_port))
            except OSError as error:
                if error.errno not in NO_SUCH_FAMILY:
                    self.close()
                    raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
                absent = error
        if not self._listening:
            raise absent
        self._start()

    @property
    def port(self) -> int:
        """The port really listened on."""
        return int(self._listening[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more."""
        self._pause()
        while self._listening:
            self._listening.pop().close()

    def _start(self) -> None:
        self._resume = None
        for sock in self._listening:
            self._loop.add_reader(sock, self._accept, sock)

    def _pause(self) -> None:
        for sock in self._listening:
            self._loop.remove_reader(sock)
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept connections: %s", error.strerror)
                self._pause()
                self._resume = self._loop.call_later(ACCEPT_PAUSE, self._start)
                return
            sock.setblocking(False)
            self._take(sock, str(address[0]))


def _listen(family: int, address: tuple[object, ...], reuse_port: bool) -> socket.socket:
    # The protocol is named, and accepted sockets inherit it, so that asyncio sends small blocks at once
    # (TCP_NODELAY): otherwise a second answer or notification waits 40 ms for the delayed acknowledgement
    # of the first.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # there is another socket for IPv4
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
