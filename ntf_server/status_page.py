"""The status page: what an operator wants to see at a glance. Read-only; it asks for its data itself."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import metadata, resources
from itertools import pairwise
from typing import Any

from ntf_server.clock import Clock
from ntf_server.health import Health
from ntf_server.history import RATES, History, Values, current_values
from ntf_server.own_routers import OwnRouters
from protocol.device_token import Provider
from transport.plain_http import LOADS_NOTHING, Page

HTML, JSON = "text/html; charset=utf-8", "application/json"
CHARTS = {
    "received": "Notifications received a second",
    "delivered": "Pushes accepted a second",
    "latency": "Seconds until a push is accepted",
    "backlog": "Waiting notifications",
    "oldest": "Seconds that the oldest has waited",
    "lag": "Seconds that the event loop is late",
}

PROVIDERS = {
    Provider.APNS_PROD: "Apple",
    Provider.APNS_DEV: "Apple, development",
    Provider.APNS_TEST: "Stand-in for Apple",
    Provider.APNS_NULL: "No push",
    Provider.FCM: "Google",
    Provider.WEB_PUSH: "Web Push",
}


class StatusPage:
    def __init__(
        self, name: str, clock: Clock, health: Health, routers: OwnRouters, providers: frozenset[str]
    ) -> None:
        """`name`: of this server among others. `providers`: tags of those that are set up."""
        self._name = name
        self._clock = clock
        self._health = health
        self._routers = routers
        self._providers = providers
        self.history = History(clock, lambda: self._wrong() if health.listening else [])
        self._began = clock.now()

    def page(self, path: bytes) -> Page | None:
        if path in (b"/", b"/status"):
            return _html()
        if path == b"/status.json":
            return Page(JSON, json.dumps(self.data()).encode())
        return None

    def data(self) -> dict[str, Any]:
        values = current_values()
        return {
            "name": self._name,
            "time": self._clock.now(),
            "since": self.history.samples[0][0] if self.history.samples else self._began,
            "began": self._began,
            "version": metadata.version("ntf-server"),
            "missing": self._health.missing(),
            "worries": self._health.worries(),
            "routers": [router._asdict() for router in self._routers.now()],
            "figures": {
                "Clients": values.get("clients", 0),
                "Routers connected": values.get("smp_sessions", 0),
                "Routers watched": values.get("smp_routers", 0),
                "Queues in the store": values.get("subscriptions", 0),
                "Queues subscribed": values.get("subscriptions_active", 0),
                "Waiting notifications": values.get("notifications_unsent", 0),
                "Seconds the oldest waits": round(values.get("notifications_oldest_unsent_seconds", 0)),
                "Pushes under way": values.get("push_under_way", 0),
            },
            "providers": [self._provider(tag, values) for tag in sorted(self._providers)],
            "incidents": [
                {"text": incident.text, "began": incident.began, "ended": incident.ended}
                for incident in reversed(self.history.incidents)
            ],
            "charts": self._charts(),
        }

    def _wrong(self) -> list[str]:
        return [*self._health.missing(), *self._health.worries()]

    def _provider(self, tag: str, values: Values) -> dict[str, Any]:
        before = self.history.samples[0][1] if self.history.samples else {}
        count = _since(before, values, f"push_seconds_count/{tag}")
        seconds = _since(before, values, f"push_seconds_sum/{tag}")
        return {
            "name": f"{PROVIDERS[Provider(tag.encode())]} ({tag})",
            "trouble": self._health.trouble().get(tag),
            "accepted": count,
            "failed": _since(before, values, f"push_failures_total/{tag}"),
            "latency": seconds / count if count else None,
        }

    def _charts(self) -> list[dict[str, Any]]:
        points: dict[str, list[float | None]] = {name: [] for name in CHARTS}
        for (earlier, old), (later, new) in pairwise(self.history.samples):
            rate = {name: _sum(new, name) - _sum(old, name) for name in RATES}
            seconds = max(later - earlier, 1e-3)
            pushes = rate["push_seconds_count"]
            points["received"].append(rate["notifications_received_total"] / seconds)
            points["delivered"].append(rate["notifications_delivered_total"] / seconds)
            points["latency"].append(rate["push_seconds_sum"] / pushes if pushes else None)
            points["backlog"].append(new.get("notifications_unsent", 0))
            points["oldest"].append(new.get("notifications_oldest_unsent_seconds", 0))
            points["lag"].append(new.get("loop_lag_seconds", 0))
        times = [at for at, _ in self.history.samples][1:]
        return [
            {"title": title, "times": times, "values": [_rounded(value) for value in points[name]]}
            for name, title in CHARTS.items()
        ]


def _sum(values: Values, name: str) -> float:
    """Over all providers."""
    return sum(value for key, value in values.items() if key.partition("/")[0] == name)


def _since(before: Values, values: Values, name: str) -> float:
    return values.get(name, 0.0) - before.get(name, 0.0)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@cache
def _html() -> Page:
    """It may use what is written in it, and ask this server."""
    body = resources.files("ntf_server").joinpath("assets", "status_page.html").read_bytes()
    own = {tag: _hash_of(tag, body) for tag in ("style", "script")}
    allowed = "; ".join(f"{tag}-src {value}" for tag, value in own.items())
    policy = (
        f"{LOADS_NOTHING}; {allowed}; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    return Page(HTML, body, policy=policy)


def _hash_of(tag: str, body: bytes) -> str:
    """Of what stands between its first `<tag>` and `</tag>`, as a browser computes it."""
    inside = body.partition(b"<%s>" % tag.encode())[2].partition(b"</%s>" % tag.encode())[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"
