"""How many routers are watched: so many in all, and so many that one client address brought. Pure."""

from __future__ import annotations

from collections import Counter

from protocol.addresses import SmpServer


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
