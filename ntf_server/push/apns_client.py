"""A request to APNs, and what sends it: libcurl here, aioapns in its own module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from ntf_server.push.http2 import CurlHttp2, Origin, Response

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

    def headers(self) -> list[tuple[str, str]]:
        headers = [
            ("authorization", self.authorization),
            ("apns-id", self.push_id),
            ("apns-topic", self.topic),
            ("apns-push-type", self.push_type),
            ("apns-priority", str(self.priority)),
        ]
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

    async def send(self, request: ApnsRequest, timeout: float) -> Response:
        """See ApnsClient."""
        headers = [f"{name}: {value}" for name, value in request.headers()]
        headers.append("content-type: application/json")
        path = f"/3/device/{request.device_token}"
        return await self._http.post(request.origin, path, headers, request.body, timeout)

    async def close(self) -> None:
        """The HTTP client is shared; who made it closes it."""
