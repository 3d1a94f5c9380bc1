"""Limits that keep a hostile peer from hurting others. Pure: time is an argument, memory is bounded."""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

KNOWN_SOURCES = 4096  # addresses: each is asked for several times in the life of a connection
IPV6_PREFIX = 64
"What one subscriber of an IPv6 network gets: whoever has one address there has all of them."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many at once, and so many a second in the long run. 0 per second: no limit."""

    per_second: float
    burst: int

    @classmethod
    def over(cls, amount: int, seconds: float) -> Rate:
        """`amount` in so many seconds, all at once if they come so."""
        return cls(per_second=amount / seconds, burst=amount)


UNLIMITED = Rate(per_second=0, burst=0)


class Bucket:
    """A token bucket for one source."""

    __slots__ = ("_at", "_level")

    def __init__(self, rate: Rate, now: float) -> None:
        self._level = float(rate.burst)
        self._at = now

    def take(self, rate: Rate, now: float, amount: int = 1) -> bool:
        if not rate.per_second:
            return True
        level = min(float(rate.burst), self._level + (now - self._at) * rate.per_second)
        self._at = now
        if level < amount:
            self._level = level
            return False
        self._level = level - amount
        return True

    def give(self, rate: Rate, amount: int) -> None:
        """Add to what may be taken, up to the burst."""
        self._level = min(float(rate.burst), self._level + amount)

    def take_rest(self) -> int:
        """All that is left, as a whole number."""
        rest = int(self._level)
        self._level -= rest
        return rest


class RateLimiter:
    """A bucket per source; the least recently seen sources are forgotten."""

    def __init__(self, rate: Rate, capacity: int = 100_000) -> None:
        self.rate = rate
        self._capacity = capacity
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def allows(self, source: Hashable, now: float, amount: int = 1) -> bool:
        if not self.rate.per_second:
            return True
        bucket = self._buckets.get(source)
        if bucket is None:
            bucket = self._buckets[source] = Bucket(self.rate, now)
            if len(self._buckets) > self._capacity:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(source)
        return bucket.take(self.rate, now, amount)

    def take_at_most(self, source: Hashable, now: float, amount: int) -> int:
        """Take as much of the amount as there is, and return how much that was."""
        if not self.rate.per_second or self.allows(source, now, amount):
            return amount
        return self._buckets[source].take_rest()

    def give_back(self, source: Hashable, amount: int) -> None:
        """What was taken was not used."""
        if amount and (bucket := self._buckets.get(source)) is not None:
            bucket.give(self.rate, amount)


@lru_cache(maxsize=KNOWN_SOURCES)
def source_of(address: str) -> str:
    """Whom an address is counted for: itself, or the /64 of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, IPV6_PREFIX), strict=False))


class ConnectionCounter:
    """Connections in all and per source; 0 is no limit."""

    def __init__(self, limit: int, per_source: int) -> None:
        self.limit = limit
        self.per_source = per_source
        self._counts: Counter[str] = Counter()
        self.total = 0

    def admit(self, source: str) -> bool:
        """Count one more, unless that is too many."""
        if self.limit and self.total >= self.limit:
            return False
        if self.per_source and self._counts[source] >= self.per_source:
            return False
        self.total += 1
        self._counts[source] += 1
        return True

    def release(self, source: str) -> None:
        """One that was admitted is gone."""
        self.total -= 1
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]
