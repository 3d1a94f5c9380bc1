"""How the daemon counts. Metrics are declared beside the code they measure, with these functions.

Existing dashboards know the counters by names without `_total`, which prometheus_client's own counters
would append; so they are exposed as gauges that only ever grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Gauge, Histogram

PREFIX = "simplex_ntf_"
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(PREFIX + name, help, labels)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(PREFIX + name, help, labels)


def histogram(name: str, help: str, labels: Sequence[str] = ()) -> Histogram:
    return Histogram(PREFIX + name, help, labels, buckets=LATENCY_BUCKETS)
