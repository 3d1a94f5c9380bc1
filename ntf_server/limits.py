"""Limits that keep a hostile client from hurting others. Pure: time is an argument, memory is bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rate:
    """So many at once, and so many a second in the long run. 0 per second: no limit."""

    per_second: float
    burst: int


UNLIMITED = Rate(per_second=0, burst=0)


class Bucket:
    """A token bucket for one source."""

    __slots__ = ("_at", "_level")

    def __init__(self, rate: Rate, now: float) -> None:
        self._level = float(rate.burst)
        self._at = now

    def take(self, rate: Rate, now: float, amount: int = 1) -> bool:
        level = min(float(rate.burst), self._level + (now - self._at) * rate.per_second)
        self._at = now
        if level < amount:
            self._level = level
            return False
        self._level = level - amount
        return True


class RateLimiter:
    """A bucket per source; the least recently seen sources are forgotten."""

    def __init__(self, rate: Rate, capacity: int = 100_000) -> None:
        self._rate = rate
        self._capacity = capacity
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def allows(self, source: Hashable, now: float, amount: int = 1) -> bool:
        if not self._rate.per_second:
            return True
        bucket = self._buckets.get(source)
        if bucket is None:
            bucket = self._buckets[source] = Bucket(self._rate, now)
            if len(self._buckets) > self._capacity:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(source)
        return bucket.take(self._rate, now, amount)


class ConnectionCounter:
    """Connections in all and per address; 0 is no limit."""

    def __init__(self, limit: int, per_address: int) -> None:
        self._limit = limit
        self._per_address = per_address
        self._counts: Counter[str] = Counter()
        self.total = 0

    def admits(self, address: str) -> bool:
        if self._limit and self.total >= self._limit:
            return False
        return not self._per_address or self._counts[address] < self._per_address

    def opened(self, address: str) -> None:
        self.total += 1
        self._counts[address] += 1

    def closed(self, address: str) -> None:
        self.total -= 1
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]
