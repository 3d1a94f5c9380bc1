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
IPV6_NETWORK = 48
"What one customer of a hosting provider may get: 65,536 times as many."
NETWORK_PART = 16
"A network of IPv6 may do so many times what a source may, however many sources it has."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many at once, and so many a second in the long run. 0 per second: no limit."""

    per_second: float
    burst: int

    @classmethod
    def over(cls, amount: int, seconds: float) -> Rate:
        """`amount` in so many seconds, all at once if they come so."""
        return cls(per_second=amount / seconds, burst=amount)

    def times(self, factor: int) -> Rate:
        return Rate(per_second=self.per_second * factor, burst=self.burst * factor)


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
        if self.left(rate, now) < amount:
            return False
        self._level -= amount
        return True

    def left(self, rate: Rate, now: float) -> float:
        """How much may be taken now."""
        self._level = min(float(rate.burst), self._level + (now - self._at) * rate.per_second)
        self._at = now
        return self._level

    def give(self, rate: Rate, amount: int) -> None:
        """Add to what may be taken, up to the burst."""
        self._level = min(float(rate.burst), self._level + amount)


class RateLimiter:
    """A bucket per source, and one per network of IPv6; the least recently seen are forgotten."""

    def __init__(self, rate: Rate, capacity: int = 100_000) -> None:
        self.rate = rate
        self._capacity = capacity
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def allows(self, source: Hashable, now: float, amount: int = 1) -> bool:
        if not self.rate.per_second:
            return True
        places = self._places(source, now)
        if min(bucket.left(rate, now) for bucket, rate in places) < amount:
            return False
        for bucket, rate in places:
            bucket.take(rate, now, amount)
        return True

    def take_at_most(self, source: Hashable, now: float, amount: int) -> int:
        """Take as much of the amount as there is, and return how much that was."""
        if not self.rate.per_second:
            return amount
        left = min(bucket.left(rate, now) for bucket, rate in self._places(source, now))
        taken = min(amount, int(left))
        self.allows(source, now, taken)
        return taken

    def give_back(self, source: Hashable, amount: int) -> None:
        """What was taken was not used."""
        for place, rate in self._rates(source):
            if (bucket := self._buckets.get(place)) is not None:
                bucket.give(rate, amount)

    def _rates(self, source: Hashable) -> list[tuple[Hashable, Rate]]:
        rates: list[tuple[Hashable, Rate]] = [(source, self.rate)]
        if isinstance(source, str) and (network := network_of(source)) != source:
            rates.append((network, self.rate.times(NETWORK_PART)))
        return rates

    def _places(self, source: Hashable, now: float) -> list[tuple[Bucket, Rate]]:
        return [(self._bucket(place, rate, now), rate) for place, rate in self._rates(source)]

    def _bucket(self, place: Hashable, rate: Rate, now: float) -> Bucket:
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = Bucket(rate, now)
            if len(self._buckets) > self._capacity:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(place)
        return bucket


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


@lru_cache(maxsize=KNOWN_SOURCES)
def network_of(source: str) -> str:
    """What a source shares with its neighbours: the /48 of a /64; otherwise nothing, so the source itself."""
    if not source.endswith(f"::/{IPV6_PREFIX}"):
        return source
    return str(ipaddress.IPv6Network(source).supernet(new_prefix=IPV6_NETWORK))


class ConnectionCounter:
    """Connections in all, per source and per network of IPv6; 0 is no limit."""

    def __init__(self, limit: int, per_source: int) -> None:
        self.limit = limit
        self.per_source = per_source
        self._counts: Counter[str] = Counter()
        self.total = 0

    def admit(self, source: str) -> bool:
        """Count one more, unless that is too many."""
        if self.limit and self.total >= self.limit:
            return False
        places = {source, network_of(source)}
        if self.per_source and any(self._counts[place] >= self._most(place, source) for place in places):
            return False
        self.total += 1
        self._counts.update(places)
        return True

    def release(self, source: str) -> None:
        """One that was admitted is gone."""
        self.total -= 1
        for place in {source, network_of(source)}:
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._counts[place]

    def _most(self, place: str, source: str) -> int:
        """A network never has all that there are."""
        if place == source:
            return self.per_source
        most = self.per_source * NETWORK_PART
        return min(most, max(self.per_source, self.limit // 2)) if self.limit else most
