"""Tells systemd how the server is (sd_notify): a few words in a datagram, if somebody wants them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

from ntf_server.clock import MICROSECONDS

logger = logging.getLogger(__name__)


class ServiceManager:
    """Does nothing unless the environment names a socket."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._address = env.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        ours = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = env.get("WATCHDOG_USEC", "")
        self._patience = int(microseconds) / MICROSECONDS if ours and microseconds.isdecimal() else 0.0

    def ready(self) -> None:
        self._tell("READY=1")

    def reloading(self) -> None:
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    async def keep_alive(self) -> None:
        """As long as the event loop turns, the manager hears of it, twice within its patience."""
        while self._patience:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._patience / 2)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("cannot tell the service manager: %s", error.strerror)
