"""The fake push service: APNs, FCM and Web Push over real HTTP/2 and TLS, with faults on command."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ntf_demo.fake_push.apis import PushApis, Verdict, error_body
from ntf_demo.fake_push.certificates import LOCAL_NAMES, make_certificates, server_context
from ntf_demo.fake_push.faults import ConnectionSettings, Fault, from_json
from ntf_demo.fake_push.http2 import PushRequest, ServerConnection, response_head
from ntf_demo.fake_push.recorder import RecordedPush, Recorder
from ntf_server.config import LOCALHOST

CONTROL_PATH: Final = "/_control"
LOOPBACK: Final = frozenset({LOCALHOST, "::1"})


def wall_clock() -> float:
    """Seconds since 1970."""
    return datetime.datetime.now(datetime.UTC).timestamp()


@dataclass(frozen=True, kw_only=True)
class FakePushConfig:
    """How the fake push service runs."""

    folder: Path
    "Where its CA and certificate are written."
    host: str = LOCALHOST
    port: int = 0
    "0: any free one."
    names: tuple[str, ...] = LOCAL_NAMES
    "What its certificate is for."
    record_file: Path | None = None
    record_limit: int = 10_000
    "Newest pushes kept in memory."
    delay: float = 0.0
    "Seconds until a push is answered."
    settings: ConnectionSettings = field(default_factory=ConnectionSettings)
    apns_key: ec.EllipticCurvePublicKey | None = None
    fcm_key: rsa.RSAPublicKey | None = None
    body_limit: int | None = None
    requires_alpn: bool = True
    "Off: HTTP/2 is also spoken to clients that do not negotiate it in TLS."
    clock: Callable[[], float] = wall_clock


class FakePushServer:
    """A running fake push service; an async context manager."""

    def __init__(self, config: FakePushConfig) -> None:
        self.config = config
        self.recorder = Recorder(config.record_limit, config.record_file)
        self.apis = PushApis(config.clock, config.apns_key, config.fcm_key, config.body_limit)
        self.faults: list[Fault] = []
        self.delay = config.delay
        self.requests = 0
        self.connections_made = 0
        self.violations: list[str] = []
        self.ca_file = config.folder / "ca.pem"
        self.port = 0
        self._settings = config.settings
        self._numbers: dict[ServerConnection, int] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        _, server_file = make_certificates(self.config.folder, self.config.names)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connect, self.config.host, self.config.port, ssl=server_context(server_file), backlog=1000
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_connections()
        self.recorder.close()

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._numbers)

    @property
    def pushes(self) -> list[RecordedPush]:
        """The newest processed pushes, oldest first."""
        return list(self.recorder.pushes)

    def add_fault(self, fault: Fault) -> None:
        """Treat matching requests by this fault from now on; the oldest matching one decides."""
        self.faults.append(fault)

    def clear_faults(self) -> None:
        """Behave again."""
        self.faults.clear()

    def change_settings(self, settings: ConnectionSettings) -> None:
        """Announce other limits, on open connections too."""
        self._settings = settings
        for connection in self._numbers:
            connection.announce(settings)
            connection.flush()

    def go_away(self, *, close: bool) -> None:
        """Send GOAWAY on every connection; requests under way are still answered."""
        for connection in list(self._numbers):
            connection.go_away(connection.highest_stream, close=close)
            connection.flush()

    def drop_connections(self) -> None:
        """Cut every connection."""
        for connection in list(self._numbers):
            connection.drop()

    def _connect(self) -> ServerConnection:
        connection = ServerConnection(
            self._settings, self._on_request, self._on_lost, requires_alpn=self.config.requires_alpn
        )
        connection.violations = self.violations
        self.connections_made += 1
        self._numbers[connection] = self.connections_made
        return connection

    def _on_lost(self, connection: ServerConnection) -> None:
        self._numbers.pop(connection, None)

    def _on_request(self, request: PushRequest) -> None:
        if request.headers.get(":path") == CONTROL_PATH and request.connection.peer_host in LOOPBACK:
            self._control(request)
            return
        self.requests += 1
        verdict = self.apis.judge(request.headers, bytes(request.body))
        fault = next((x for x in self.faults if x.matches(verdict.api, verdict.token)), None)
        delay = self.delay if fault is None or not fault.delay else fault.delay
        if delay:
            asyncio.get_running_loop().call_later(delay, self._act_later, request, verdict, fault)
        else:
            self._act(request, verdict, fault)

    def _act_later(self, request: PushRequest, verdict: Verdict, fault: Fault | None) -> None:
        self._act(request, verdict, fault)
        request.connection.flush()

    def _act(self, request: PushRequest, verdict: Verdict, fault: Fault | None) -> None:
        connection, stream_id = request.connection, request.stream_id
        if fault is None:
            self._answer(request, verdict, verdict.status, verdict.reason, None)
            return
        if fault.action == "answer":
            status = fault.status if verdict.status < 300 else verdict.status
            self._answer(request, verdict, status, fault.reason, fault)
        elif fault.action == "goaway" and fault.processed:
            connection.go_away(stream_id, close=fault.close)
            self._answer(request, verdict, verdict.status, verdict.reason, fault)
        else:
            if fault.processed:
                self._record(request, verdict, verdict.status)
            self._misbehave(connection, stream_id, fault)

    def _misbehave(self, connection: ServerConnection, stream_id: int, fault: Fault) -> None:
        if fault.action == "reset":
            connection.reset(stream_id, fault.error_code)
        elif fault.action == "drop" and fault.close:
            connection.close()
        elif fault.action == "drop":
            connection.drop()
        elif fault.action == "goaway":
            connection.go_away(max(0, stream_id - 2), close=fault.close)

    def _answer(
        self, request: PushRequest, verdict: Verdict, status: int, reason: str, fault: Fault | None
    ) -> None:
        self._record(request, verdict, status)
        body = verdict.body if status == verdict.status < 300 else error_body(verdict.api, status, reason)
        fields = [("apns-id", verdict.push_id)] if verdict.push_id else []
        if fault is not None and fault.retry_after is not None:
            fields.append(("retry-after", str(fault.retry_after)))
        if fault is not None and fault.location is not None:
            fields.append(("location", fault.location))
        head = response_head(status, tuple(fields))
        split = fault.split if fault else False
        request.connection.answer(request.stream_id, head, body, split=split)

    def _record(self, request: PushRequest, verdict: Verdict, status: int) -> None:
        if verdict.api == "oauth":
            return
        self.recorder.count(verdict.api, status)
        if not self.recorder.wants_bodies:
            return
        raw = bytes(request.body)
        text = base64.urlsafe_b64encode(raw).decode() if verdict.api == "webpush" else raw.decode()
        number = self._numbers.get(request.connection, 0)
        self.recorder.add(
            RecordedPush(
                verdict.api,
                verdict.token,
                verdict.push_id,
                status,
                request.headers,
                text,
                number,
                self.config.clock(),
            )
        )

    def _control(self, request: PushRequest) -> None:
        try:
            self._obey(json.loads(bytes(request.body) or b"{}"))
            status, body = 200, json.dumps(self.summary()).encode()
        except (ValueError, TypeError, AttributeError) as error:
            status, body = 400, json.dumps({"error": str(error)}).encode()
        request.connection.answer(request.stream_id, response_head(status, ()), body, split=False)

    def _obey(self, command: Any) -> None:
        known = {"faults", "clear", "settings", "delay", "goaway", "drop"}
        if not isinstance(command, dict) or not command.keys() <= known:
            raise ValueError(f"expected an object with keys out of {sorted(known)}")
        if command.get("clear"):
            self.clear_faults()
        for fault in [from_json(Fault, value) for value in command.get("faults", [])]:
            self.add_fault(fault)
        if "settings" in command:
            self.change_settings(from_json(ConnectionSettings, command["settings"]))
        if "delay" in command:
            self.delay = float(command["delay"])
        if "goaway" in command:
            self.go_away(close=command["goaway"] == "close")
        if command.get("drop"):
            self.drop_connections()

    def summary(self) -> dict[str, Any]:
        """Counts for the control endpoint."""
        return {
            "requests": self.requests,
            "accepted": self.recorder.accepted,
            "statuses": {f"{api} {status}": n for (api, status), n in self.recorder.statuses.items()},
            "connections": self.connections,
            "connections_made": self.connections_made,
            "violations": self.violations[:100],
        }
