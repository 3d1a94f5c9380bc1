"""What a router lost, when, and how long it took to heal: one pass over its events."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import udtf

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

    def see(self, row: Any) -> None:
        """The next event in the order of time."""
        getattr(self, f"_on_{row['event']}")(row["us"], row)

    def end(self, us: int) -> None:
        """Nothing more will be heard of it."""
        for outage in self.outages:
            if outage.end_us is None:
                outage.close(max(us, outage.start_us))

    def _on_smp_disconnected(self, us: int, row: Any) -> None:
        if self._down is None:
            self._begin_down(DISCONNECTED, us, row["changed"] or 0)
        else:
            self._miss(row["changed"] or 0)

    def _on_smp_service_reset(self, us: int, row: Any) -> None:
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

    def _on_smp_connected(self, us: int, row: Any) -> None:
        self._regain(us, 0)

    def _on_regained(self, us: int, row: Any) -> None:
        self._regain(us, row["count"])

    def _regain(self, us: int, number: int) -> None:
        self._missing -= min(self._missing, max(0, number))
        if self._down is not None and self._missing * 100 <= self._down.size:
            self._down.close(us)
            self._down, self._missing = None, 0

    def _on_smp_service_subscribed(self, us: int, row: Any) -> None:
        self._regain(us, row["changed"] or 0)
        # What is under the service at the router is served, whoever made it so: a journal may lack a second.
        served = min(row["count"], row["expected"])
        self._regain(us, self._missing - max(0, row["total"] - served))
        if row["count"] >= row["expected"]:
            self._settle(us, row["count"] - self._left)

    def _on_smp_drift(self, us: int, row: Any) -> None:
        size, self._left = max(0, row["expected"] - row["count"]), row["count"]
        if self._lost is None and size:
            self._lost = Outage(self.server, LOST, us, size)
            self.outages.append(self._lost)
        elif self._lost is not None:
            self._lost.size = max(self._lost.size, size)

    def _on_smp_healed(self, us: int, row: Any) -> None:
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


class FindOutages:
    """For Spark: all outages of one router under one key, from its events in the order of time.

    Daemons that share a store share its key, and each goes on where another stopped. Others know nothing of
    each other's subscriptions at the same router. `until_us` says when the key was given up.
    """

    def __init__(self) -> None:
        self._log: RouterLog | None = None
        self._until_us: int | None = None

    def eval(self, row: Any) -> None:
        """The next event."""
        if self._log is None:
            self._log, self._until_us = RouterLog(row["server"]), row["until_us"]
        self._log.see(row)

    def terminate(self) -> Iterator[tuple[str, str, int, int, int | None, int | None]]:
        """All outages, those that ended and those that did not."""
        if self._log is None:
            return
        if self._until_us is not None:
            self._log.end(self._until_us)
        for o in self._log.outages:
            yield o.server, o.kind, o.start_us, o.size, o.end_us, o.heal_us


OUTAGE = "server STRING, kind STRING, start_us BIGINT, size BIGINT, end_us BIGINT, heal_us BIGINT"


def register_outages(session: SparkSession) -> None:
    """Let queries call `find_outages`."""
    session.udtf.register("find_outages", udtf(FindOutages, returnType=OUTAGE, useArrow=False))  # type: ignore[arg-type]
