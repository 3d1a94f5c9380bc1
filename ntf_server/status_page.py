"""The status page: what an operator wants to see at a glance. Read-only; it asks for its data itself.

The last hours are kept in memory, bounded: a few figures now and then, and what went wrong.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from itertools import pairwise
from typing import Any, NamedTuple

from prometheus_client import REGISTRY

from ntf_server.clock import Clock
from ntf_server.health import Health
from ntf_server.metrics import PREFIX
from ntf_server.own_routers import OwnRouters
from protocol.device_token import Provider
from transport.plain_http import LOADS_NOTHING, Page

HTML, JSON = "text/html; charset=utf-8", "application/json"
STEP = 30.0
SAMPLES = 720
"Six hours."
LOOK_INTERVAL = 2.0
MAX_INCIDENTS = 50
MAX_TEXT = 300

Values = Mapping[str, float]
"By name and, behind a slash, the value of its label `provider` or `channel`."
Sample = tuple[float, Values]
"With its time."

FIGURES = {
    "Clients": "clients",
    "Routers connected": "smp_sessions",
    "Routers watched": "smp_routers",
    "Queues in the store": "subscriptions",
    "Queues subscribed": "subscriptions_active",
    "Waiting notifications": "notifications_unsent",
    "Seconds the oldest waits": "notifications_oldest_unsent_seconds",
    "Pushes under way": "push_under_way",
}
"Shown as they are now."

GATEWAY_FIGURES = {
    "Statement store connected": "statements_connected",
    "Statement topics watched": "statements_topics",
    "Statement rules": "statements_rules",
    "Statement pushes, APNs": "statement_pushes_delivered_total/apns",
    "Statement pushes, VoIP": "statement_pushes_delivered_total/voip",
    "Statement pushes, FCM": "statement_pushes_delivered_total/fcm",
    "Statements over a sender's limit": "statements_limited_total",
    "Statements over a device's limit": "statements_device_limited_total",
}
"Of the statement gateway, if it is on."


class Chart(NamedTuple):
    title: str
    metric: str
    per: str = ""
    "What its growth is divided by: `SECOND` or the growth of another metric; empty: the value is shown."


SECOND = "second"
CHARTS = (
    Chart("Notifications received a second", "notifications_received_total", per=SECOND),
    Chart("Pushes accepted a second", "notifications_delivered_total", per=SECOND),
    Chart("Seconds until a push is accepted", "push_seconds_sum", per="push_seconds_count"),
    Chart("Waiting notifications", "notifications_unsent"),
    Chart("Seconds that the oldest has waited", "notifications_oldest_unsent_seconds"),
    Chart("Seconds that the event loop is late", "loop_lag_seconds"),
)
PUSH_FAILURES = "push_failures_total"
_SHOWN = [name.partition("/")[0] for name in (*FIGURES.values(), *GATEWAY_FIGURES.values())]
_USED = {PUSH_FAILURES, *_SHOWN, *(name for chart in CHARTS for name in (chart.metric, chart.per))}
WANTED = frozenset(PREFIX + name for name in _USED)
PROVIDER_NAMES = {
    Provider.APNS_PROD: "Apple",
    Provider.APNS_DEV: "Apple, development",
    Provider.APNS_TEST: "Stand-in for Apple",
    Provider.APNS_NULL: "No push",
    Provider.FCM: "Google",
    Provider.WEB_PUSH: "Web Push",
}


@dataclass(slots=True)
class Incident:
    text: str
    began: float
    ended: float | None = None


class History:
    """`run` for as long as the server does."""

    def __init__(self, clock: Clock, wrong: Callable[[], list[str]]) -> None:
        """`wrong`: what is wrong now, in a few words each."""
        self._clock = clock
        self._wrong = wrong
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_INTERVAL)

    def look(self) -> None:
        now = self._clock.now()
        self._note_incidents(now)
        if not self.samples or not 0 <= now - self.samples[-1][0] < STEP:
            self.samples.append((now, current_values()))

    def _note_incidents(self, now: float) -> None:
        wrong = [text[:MAX_TEXT] for text in self._wrong()]
        under_way = {_about(incident.text): incident for incident in self.incidents if incident.ended is None}
        for text in wrong:
            incident = under_way.pop(_about(text), None)
            if incident is None:
                self.incidents.append(Incident(text, now))
            else:
                incident.text = text
        for incident in under_way.values():
            incident.ended = now


def _about(text: str) -> str:
    """What an incident is about, whatever is known of it at the moment."""
    return " ".join(text.split()[:2])


def current_values() -> dict[str, float]:
    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in WANTED:
                label = sample.labels.get("provider") or sample.labels.get("channel")
                name = sample.name.removeprefix(PREFIX) + (f"/{label}" if label else "")
                values[name] = values.get(name, 0.0) + sample.value
    return values


class StatusPage:
    def __init__(
        self,
        name: str,
        clock: Clock,
        health: Health,
        routers: OwnRouters,
        providers: frozenset[str],
        *,
        with_gateway: bool,
    ) -> None:
        """`name`: of this server among others. `providers`: tags of those that are set up. `with_gateway`:
        statements are pushed, too."""
        self._figures = FIGURES | (GATEWAY_FIGURES if with_gateway else {})
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
            "figures": {title: round(values.get(name, 0)) for title, name in self._figures.items()},
            "providers": [self._provider(tag, values) for tag in sorted(self._providers)],
            "incidents": [asdict(incident) for incident in reversed(self.history.incidents)],
            "charts": self._charts(),
        }

    def _wrong(self) -> list[str]:
        return [*self._health.missing(), *self._health.worries()]

    def _provider(self, tag: str, values: Values) -> dict[str, Any]:
        before = self.history.samples[0][1] if self.history.samples else {}
        count = _since(before, values, f"push_seconds_count/{tag}")
        seconds = _since(before, values, f"push_seconds_sum/{tag}")
        return {
            "name": f"{PROVIDER_NAMES[Provider(tag.encode())]} ({tag})",
            "trouble": self._health.trouble().get(tag),
            "accepted": count,
            "failed": _since(before, values, f"{PUSH_FAILURES}/{tag}"),
            "latency": seconds / count if count else None,
        }

    def _charts(self) -> list[dict[str, Any]]:
        steps = list(pairwise(self.history.samples))
        times = [at for _, (at, _) in steps]
        return [
            {"title": chart.title, "times": times, "values": [_point(chart, *step) for step in steps]}
            for chart in CHARTS
        ]


def _point(chart: Chart, earlier: Sample, later: Sample) -> float | None:
    (began, old), (ended, new) = earlier, later
    if not chart.per:
        return round(new.get(chart.metric, 0), 4)
    per = max(ended - began, 1e-3) if chart.per == SECOND else _sum(new, chart.per) - _sum(old, chart.per)
    return round((_sum(new, chart.metric) - _sum(old, chart.metric)) / per, 4) if per else None


def _sum(values: Values, name: str) -> float:
    """Over all providers."""
    return sum(value for key, value in values.items() if key.partition("/")[0] == name)


def _since(before: Values, values: Values, name: str) -> float:
    return values.get(name, 0.0) - before.get(name, 0.0)


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
