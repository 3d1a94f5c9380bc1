"""Ports for servers that are told theirs."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

NOT_GIVEN_BY_THE_SYSTEM = range(20_000, 32_000)
"To clients, and to servers that take any: such a port could be gone before it is used."


def _each_once() -> Iterator[int]:
    for port in random.SystemRandom().sample(NOT_GIVEN_BY_THE_SYSTEM, len(NOT_GIVEN_BY_THE_SYSTEM)):
        if _is_free(port):
            yield port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


_ports = _each_once()


def free_port() -> int:
    """On localhost; never the same twice."""
    return next(_ports)
