"""What a router lost, when, and how long it took to heal: one pass over its events. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DISCONNECTED = "disconnected"
LOST = "lost"
RESET = "service reset"


@dataclass(slots=True)
class Outage:
    """Subscriptions of a router that got no notifications; `end_us` is None while it is open."""

    server: str
    kind: str
    start_us: int
    size: int
    end_us: int | None = None
    heal_us: int | None = None

    def close(self, us: int, took_us: int | None = None) -> None:
        """It is over, after the time that the daemon measured if it did."""
        self.end_us = us
        self.heal_us = us - self.start_us if took_us is None else took_us


@dataclass(slots=True)
class RouterLog:
    """Follows one router. Its subscriptions are down as a whole (disconnected, reset), or some were lost."""

    server: str
    outages: list[Outage] = field(default_factory=list)
    _down: Outage | None = None
    _missing: int = 0
    _lost: Outage | None = None
    _left: int = 0

    def see(self, row: dict[str, Any]) -> None:
        """The next event in the order of time."""
        getattr(self, f"_on_{row['event']}")(row["us"], row)

    def end(self, us: int) -> None:
        """Nothing more will be heard of it."""
        for outage in self.outages:
            if outage.end_us is None:
                outage.close(max(us, outage.start_us))

    def _on_smp_disconnected(self, us: int, row: dict[str, Any]) -> None:
        if self._down is None:
            self._begin_down(DISCONNECTED, us, row["changed"] or 0)
        else:
            self._miss(row["changed"] or 0)

    def _on_smp_service_reset(self, us: int, row: dict[str, Any]) -> None:
        if self._down is not None:
            self._down.kind = RESET  # the reason why it lasts
        elif row["changed"]:
            self._begin_down(RESET, us, row["changed"])

    def _begin_down(self, kind: str, us: int, size: int) -> None:
        self._down = Outage(self.server, kind, us, size)
        self._missing = size
        self.outages.append(self._down)
        if self._lost is not None:  # what was lost is counted with the rest from now on
            self._lost.close(us)
            self._lost = None

    def _miss(self, more: int) -> None:
        assert self._down is not None
        self._missing += more
        self._down.size = max(self._down.size, self._missing)

    def _on_smp_connected(self, us: int, row: dict[str, Any]) -> None:
        self._regain(us, 0)

    def _on_regained(self, us: int, row: dict[str, Any]) -> None:
        self._regain(us, row["count"])

    def _regain(self, us: int, number: int) -> None:
        self._missing -= min(self._missing, max(0, number))
        if self._down is not None and self._missing * 100 <= self._down.size:
            self._down.close(us)
            self._down, self._missing = None, 0

    def _on_smp_service_subscribed(self, us: int, row: dict[str, Any]) -> None:
        self._regain(us, row["changed"] or 0)
        # What is under the service at the router is served, whoever made it so: a journal may lack a second.
        served = min(row["count"], row["expected"])
        self._regain(us, self._missing - max(0, row["total"] - served))
        if row["count"] >= row["expected"]:
            self._settle(us, row["count"] - self._left)

    def _on_smp_drift(self, us: int, row: dict[str, Any]) -> None:
        size, self._left = max(0, row["expected"] - row["count"]), row["count"]
        if self._lost is None and size:
            self._lost = Outage(self.server, LOST, us, size)
            self.outages.append(self._lost)
        elif self._lost is not None:
            self._lost.size = max(self._lost.size, size)

    def _on_smp_healed(self, us: int, row: dict[str, Any]) -> None:
        self._settle(us, row["count"], row["latency_us"])

    def _settle(self, us: int, number: int, took_us: int | None = None) -> None:
        """So many of what was lost are bound again. The router does not know the rest: see their statuses."""
        if self._lost is None:
            return
        self._lost.size = min(self._lost.size, number)
        self._lost.close(us, took_us)
        if self._lost.size <= 0:
            self.outages.remove(self._lost)
        self._lost = None


def find_outages(rows: Iterable[dict[str, Any]], ends: Mapping[int, int]) -> list[Outage]:
    """All outages of all routers, from rows in the order of time.

    Daemons that share a store share its key, and each goes on where another stopped. Others know nothing of
    each other's subscriptions at the same router. `ends` says when keys were given up, by epoch.
    """
    logs: dict[tuple[str, int], RouterLog] = {}
    for row in rows:
        server, epoch = row["server"], row["epoch"]
        log = logs.setdefault((server, epoch), RouterLog(server))
        log.see(row)
    for (_, epoch), log in logs.items():
        if epoch in ends:
            log.end(ends[epoch])
    return [outage for log in logs.values() for outage in log.outages]
