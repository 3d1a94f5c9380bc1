"""A request to APNs, and what sends it: libcurl here, aioapns in its own module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ntf_server.push.http2 import CurlHttp2, Origin, Response

COMMON_HEADERS = 16
"Sets of them that are kept as lines: of each type of push, under two authorizations."

PushType = Literal["alert", "background", "voip"]


@dataclass(slots=True)  # not frozen: one is made per push, and freezing doubles its cost
class ApnsRequest:
    """Everything of one push that goes over the wire."""

    origin: Origin
    device_token: str = field(repr=False)
    push_id: str
    topic: str
    push_type: PushType
    priority: int
    authorization: str = field(repr=False)
    body: bytes = field(repr=False)
    only_now: bool = False
    "Not to be kept for a device that is offline."
    collapse_id: str = ""

    def common_headers(self) -> list[tuple[str, str]]:
        """The same for most pushes."""
        return [
            ("authorization", self.authorization),
            ("apns-topic", self.topic),
            ("apns-push-type", self.push_type),
            ("apns-priority", str(self.priority)),
            ("content-type", "application/json"),
        ]

    def own_headers(self) -> list[tuple[str, str]]:
        headers = [("apns-id", self.push_id)]
        if self.only_now:
            headers.append(("apns-expiration", "0"))
        if self.collapse_id:
            headers.append(("apns-collapse-id", self.collapse_id))
        return headers


class ApnsClient(Protocol):
    """Sends requests over HTTP/2."""

    async def send(self, request: ApnsRequest, timeout: float) -> Response:
        """The answer, whatever its status; NoAnswer if there is none within `timeout` seconds."""

    async def close(self) -> None:
        """Close connections; requests under way fail."""


class CurlApnsClient:
    """APNs through the shared libcurl client."""

    def __init__(self, http: CurlHttp2) -> None:
        self._http = http
        self._common: dict[tuple[str, str, str, int], list[str]] = {}

    async def send(self, request: ApnsRequest, timeout: float) -> Response:
        """See ApnsClient."""
        headers = [*self._common_lines(request), *_lines(request.own_headers())]
        path = f"/3/device/{request.device_token}"
        return await self._http.post(request.origin, path, headers, request.body, timeout)

    def _common_lines(self, request: ApnsRequest) -> list[str]:
        key = (request.authorization, request.topic, request.push_type, request.priority)
        lines = self._common.get(key)
        if lines is None:
            if len(self._common) >= COMMON_HEADERS:
                self._common.clear()
            lines = self._common[key] = _lines(request.common_headers())
        return lines

    async def close(self) -> None:
        """The HTTP client is shared; who made it closes it."""


def _lines(headers: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name}: {value}" for name, value in headers]
