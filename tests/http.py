"""One request over plain HTTP."""

from __future__ import annotations

import asyncio

DEADLINE = 60.0


async def get(port: int, path: str, method: str = "GET") -> str:
    """The whole answer of something on this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    async with asyncio.timeout(DEADLINE):
        answer = await reader.read()
    writer.close()
    return answer.decode()
