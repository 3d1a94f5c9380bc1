"""`python odd_names.py …`: ntf-server with a resolver that takes its time for some names, and finds thousands
of addresses for others."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from ntf_server.__main__ import main

SLOW_NAMES = ".slow.example"
SECONDS = 10.0
MANY_ADDRESSES = ".many.example"
ADDRESSES = 4000

_getaddrinfo = socket.getaddrinfo


def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
    if str(host).endswith(SLOW_NAMES):
        time.sleep(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
    if str(host).endswith(MANY_ADDRESSES):
        names = [f"127.77.{number // 250}.{number % 250 + 1}" for number in range(ADDRESSES)]
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (name, 0)) for name in names]
    return _getaddrinfo(host, *arguments, **options)


if __name__ == "__main__":
    socket.getaddrinfo = getaddrinfo
    sys.exit(main())
