"""How the daemon counts. Metrics are declared beside the code they measure, with these functions.

Existing dashboards know counters by names without `_total`, and a gauge by a name that ends in `_count`. So
`exposition` has those under both names, with the same type.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

PREFIX = "simplex_ntf_"
TOTAL = "_total"
OLD_GAUGES = {f"{PREFIX}smp_sessions": f"{PREFIX}smp_sessions_count"}
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

disable_created_metrics()  # type: ignore[no-untyped-call]


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    return Counter(PREFIX + name, help, labels)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(PREFIX + name, help, labels)


def histogram(name: str, help: str, labels: Sequence[str] = ()) -> Histogram:
    return Histogram(PREFIX + name, help, labels, buckets=LATENCY_BUCKETS)


class Distribution:
    """The values of one label. Written by one thread, so it needs no lock: every push is observed twice."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self.sum += seconds


class LightHistogram:
    """A histogram for hot paths: at most one label, and observing costs a fifth of the library's."""

    def __init__(self, name: str, help: str, label: str = "") -> None:
        self._name, self._help = PREFIX + name, help
        self._labelnames = (label,) if label else ()
        self._by_label: dict[str, Distribution] = {}
        REGISTRY.register(self)

    def labelled(self, value: str = "") -> Distribution:
        return self._by_label.setdefault(value, Distribution())

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labelnames)
        bounds = [floatToGoString(bound) for bound in (*LATENCY_BUCKETS, float("inf"))]  # type: ignore[no-untyped-call]
        for label, values in self._by_label.items():
            buckets = list(zip(bounds, accumulate(values.counts), strict=True))
            family.add_metric([label] * len(self._labelnames), buckets, values.sum)
        yield family


class AskedCounter:
    """A counter that is kept elsewhere."""

    def __init__(self, name: str, help: str) -> None:
        self._name, self._help = PREFIX + name, help
        self.ask: Callable[[], float] = lambda: 0.0
        REGISTRY.register(self)

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._help, value=self.ask())


def exposition(*, old_names: bool = True) -> bytes:
    """All metrics as Prometheus reads them."""
    text = generate_latest().decode()
    return "".join(_with_old_names(text) if old_names else text).encode()


def _with_old_names(text: str) -> Iterator[str]:
    first, *families = text.split("# HELP ")
    yield first
    for family in families:
        yield f"# HELP {family}"
        name = family.partition(" ")[0]
        old = name.removesuffix(TOTAL) if f"# TYPE {name} counter" in family else OLD_GAUGES.get(name, name)
        if old != name and name.startswith(PREFIX):
            yield f"# HELP {family}".replace(name, old)
