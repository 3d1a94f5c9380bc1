"""Who may use how many file descriptors: clients must not starve the store, the routers or the pushes."""

from __future__ import annotations

from dataclasses import dataclass

from ntf_server.config import ConfigError

OWN = 96
"Store, journal, logs, listening sockets, control port, metrics, resolver threads, with room to spare."
PUSHES = 3000
"Connections of the HTTP/2 clients: a few per provider, one for each push to a host that clients chose."
PROVIDER_CONNECTIONS = 32
"Of these, those of the providers that the operator chose."
PUSH_SHARE = 8
"Under a low limit pushes get one in so many,"
IDLE_SHARE = 4
"of which one in so many may be idle,"
ROUTER_SHARE = 4
"routers one in so many, and clients the rest,"
GATEWAY_SHARE = 8
"of which those of the statement gateway get one in so many of all."
MAX_GATEWAY = 2000
MAX_ROUTERS = 20_000
MINIMUM = 256
"A server with fewer serves nobody well."


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorBudget:
    """Open files by use. The parts never exceed the limit together."""

    limit: int
    own: int
    pushes: int
    routers: int
    clients: int
    gateway: int = 0

    @property
    def idle_pushes(self) -> int:
        """Connections that no push uses."""
        return self.pushes // IDLE_SHARE

    @property
    def web_pushes(self) -> int:
        """Pushes of Web Push under way: each may be at another host, and need a connection of its own."""
        return self.pushes - self.idle_pushes - min(PROVIDER_CONNECTIONS, self.pushes // IDLE_SHARE)

    def __str__(self) -> str:
        return (
            f"{self.limit} open files allowed: {self.clients} for clients, {self.routers} for routers, "
            f"{self.pushes} for pushes, {self.own} for the server itself"
            + (f", {self.gateway} for clients of the statement gateway" if self.gateway else "")
        )


def descriptor_budget(limit: int, max_clients: int = 0, *, with_gateway: bool = False) -> DescriptorBudget:
    """Share out `limit` descriptors; `max_clients` is what the configuration allows (0: any number).

    ConfigError if they are so few that the server would fail under an ordinary load.
    """
    if limit < MINIMUM:
        raise ConfigError(
            f"only {limit} files may be open at once; allow at least {MINIMUM} (ulimit -n, LimitNOFILE=)"
        )
    pushes = min(PUSHES, limit // PUSH_SHARE)
    routers = min(MAX_ROUTERS, limit // ROUTER_SHARE)
    gateway = min(MAX_GATEWAY, limit // GATEWAY_SHARE) if with_gateway else 0
    clients = limit - OWN - pushes - routers - gateway
    if max_clients:
        clients = min(clients, max_clients)
    return DescriptorBudget(
        limit=limit, own=OWN, pushes=pushes, routers=routers, clients=clients, gateway=gateway
    )
