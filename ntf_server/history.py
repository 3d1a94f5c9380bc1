"""The last hours, kept in memory: a few figures now and then, and what went wrong. Bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY

from ntf_server.clock import Clock
from ntf_server.metrics import PREFIX

STEP = 30.0
SAMPLES = 720
"Six hours."
LOOK_INTERVAL = 2.0
MAX_INCIDENTS = 50
MAX_TEXT = 300

Values = Mapping[str, float]
"By name and, behind a slash, the value of its label `provider`."

RATES = (
    "notifications_received_total",
    "notifications_delivered_total",
    "push_seconds_sum",
    "push_seconds_count",
)
LEVELS = ("notifications_unsent", "notifications_oldest_unsent_seconds", "clients", "loop_lag_seconds")
OTHERS = (
    "push_failures_total",
    "push_under_way",
    "smp_routers",
    "smp_sessions",
    "subscriptions",
    "subscriptions_active",
)
WANTED = frozenset(PREFIX + name for name in (*RATES, *LEVELS, *OTHERS))


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
        self.samples: deque[tuple[float, Values]] = deque(maxlen=SAMPLES)
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
                provider = sample.labels.get("provider")
                name = sample.name.removeprefix(PREFIX) + (f"/{provider}" if provider else "")
                values[name] = values.get(name, 0.0) + sample.value
    return values
