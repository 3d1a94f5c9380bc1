"""`python slow_names.py …`: ntf-server with a resolver that takes its time for some names."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from ntf_server.__main__ import main

SLOW_NAMES = ".slow.example"
SECONDS = 10.0

_getaddrinfo = socket.getaddrinfo


def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
    if str(host).endswith(SLOW_NAMES):
        time.sleep(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
    return _getaddrinfo(host, *arguments, **options)


if __name__ == "__main__":
    socket.getaddrinfo = getaddrinfo
    sys.exit(main())
