"""How much one connection, and all connections of one address, may ask of the router."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from hashlib import blake2b

from protocol.blocks import MAX_BATCH
from smp_router.config import RouterConfig
from smp_router.storage import Creator
from transport.budget import BudgetConfig
from transport.limits import Bucket, Rate, RateLimiter, network_of, source_of

PAUSE = 0.05
"Seconds between looks whether a client that was too fast may go on."
MINUTE, HOUR = 60.0, 3600.0


FAILURES_PER_SECOND = 20.0
"Failed authorisations of one address that are forgotten each second."


def budget_config(config: RouterConfig) -> BudgetConfig:
    """What the CPU budget allows each address."""
    return BudgetConfig(
        share=config.address_cpu_percent / 100,
        failures=Rate(per_second=FAILURES_PER_SECOND, burst=config.address_failures_burst),
    )


def _rate(per_second: int, burst: int) -> Rate:
    """A block is taken whole, so a burst is at least that."""
    return Rate(per_second=per_second, burst=max(burst, MAX_BATCH))


async def _until(allowed: Callable[[], bool]) -> None:
    while True:
        if allowed():
            return
        await asyncio.sleep(PAUSE)


class ClientLimits:
    """Of all clients."""

    def __init__(self, config: RouterConfig) -> None:
        self._key = secrets.token_bytes(32)
        self.connection = _rate(config.commands_per_second, config.commands_burst)
        self.address = RateLimiter(_rate(config.address_commands_per_second, config.address_commands_burst))
        self.queues = RateLimiter(Rate.over(config.address_queues_per_hour, HOUR))
        self.relays = RateLimiter(Rate.over(config.address_relays_per_minute, MINUTE))

    def creator(self, source: str) -> Creator:
        """Whose share of the storage is used: no address, and nothing that leads to one. All sources of a
        network of IPv6 have one share: a few of its 65,536 would use all of it."""
        network = network_of(source).encode()
        return int.from_bytes(blake2b(network, digest_size=8, key=self._key).digest(), "big")

    def of(self, address: str) -> Allowance:
        return Allowance(self, source_of(address))


class Allowance:
    """Of one connection."""

    def __init__(self, limits: ClientLimits, source: str) -> None:
        self._limits = limits
        self._source = source
        self.creator = limits.creator(source)
        self._clock = asyncio.get_running_loop().time
        self._bucket = Bucket(limits.connection, self._clock())

    async def wait_for(self, commands: int) -> None:
        """Return when so many more commands are within the limits; nothing more is read until then."""
        limits = self._limits
        await _until(lambda: self._bucket.take(limits.connection, self._clock(), commands))
        await _until(lambda: limits.address.allows(self._source, self._clock(), commands))

    def new_queue(self) -> bool:
        return self._limits.queues.allows(self._source, self._clock())

    def new_relay(self) -> bool:
        return self._limits.relays.allows(self._source, self._clock())
