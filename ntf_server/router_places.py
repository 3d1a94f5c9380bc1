"""How many routers are watched: so many in all, and so many that one client address brought. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict

from ntf_server.clock import SECONDS_PER_DAY
from protocol.addresses import SmpServer
from transport.limits import Rate, RateLimiter

NAMED_ROUTERS = 20_000
"Remembered, so that they count once."


class RouterPlaces:
    """Routers that are watched or about to be. Each has one place, however many hold it."""

    def __init__(self, total: int, per_client: int) -> None:
        self._total = total
        self._per_client = per_client
        self._holders: Counter[SmpServer] = Counter()
        self._brought_by: dict[SmpServer, str] = {}
        self._brought: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, server: SmpServer) -> bool:
        return server in self._holders

    def has_room(self, server: SmpServer, client: str | None) -> bool:
        """Routers from the store (no client) are stopped by the total only."""
        if server in self._holders:
            return True
        return len(self) < self._total and (client is None or self._brought[client] < self._per_client)

    def take(self, server: SmpServer, client: str | None) -> None:
        """Hold a place; the first holder decides who brought the router."""
        if server not in self._holders and client is not None:
            self._brought_by[server] = client
            self._brought[client] += 1
        self._holders[server] += 1

    def leave(self, server: SmpServer) -> None:
        self._holders[server] -= 1
        if self._holders[server]:
            return
        del self._holders[server]
        client = self._brought_by.pop(server, None)
        if client is not None:
            self._brought[client] -= 1
            if not self._brought[client]:
                del self._brought[client]

    def brought_by(self, server: SmpServer) -> str | None:
        return self._brought_by.get(server)


class NamedRouters:
    """Where daemons share the routers, the one whose client names a router seldom watches it, and does not
    learn when another one stops to. So here an address may name so many a day for the first time."""

    def __init__(self, per_client: int) -> None:
        self._new = RateLimiter(Rate.over(per_client, SECONDS_PER_DAY))
        self._named_by: OrderedDict[SmpServer, str] = OrderedDict()

    def allows(self, server: SmpServer, client: str, now: float) -> bool:
        if server in self._named_by:
            self._named_by.move_to_end(server)
            return True
        if not self._new.allows(client, now):
            return False
        self._named_by[server] = client
        if len(self._named_by) > NAMED_ROUTERS:
            self._named_by.popitem(last=False)
        return True

    def named_by(self, server: SmpServer) -> str | None:
        """Who named it first, as far as it is remembered."""
        return self._named_by.get(server)
