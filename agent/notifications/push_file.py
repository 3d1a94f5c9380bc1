"""Pushes from a file of JSON lines, as `ntf-server fake-push --record FILE` and the demo write it.

It stands in for a device's operating system: whoever tries the agent out has no phone at hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from agent.errors import Misused
from protocol.device_token import ApnsToken, DeviceToken, FcmToken

LOOK_AGAIN = 0.1


class PushFile:
    """Follows a file from where it ends now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._position = path.stat().st_size if path.exists() else 0
        except OSError as error:
            raise Misused(f"{path}: {error.strerror}") from None

    async def pushes(self, device_token: DeviceToken) -> AsyncIterator[str]:
        """The body of every accepted push for this device, as they come."""
        if not isinstance(device_token, ApnsToken | FcmToken):
            raise Misused("Web Push bodies are encrypted once more: they cannot be read from a file")
        wanted = device_token.token.decode("ascii", "replace")
        while True:
            for line in self._new_lines():
                body = _body_for(line, wanted)
                if body is not None:
                    yield body
            await asyncio.sleep(LOOK_AGAIN)

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Misused(f"{self._path}: {error.strerror}") from None
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return complete.splitlines()


def _body_for(line: bytes, token: str) -> str | None:
    try:
        record = json.loads(line)
        accepted = 200 <= record["status"] < 300
        return str(record["body"]) if accepted and record["token"] == token else None
    except (ValueError, KeyError, TypeError):
        return None
