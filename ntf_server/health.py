"""Whether this server does its work: all that must hold, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ntf_server.own_routers import OwnRouters


class PushSide(Protocol):
    def trouble(self) -> dict[str, str]: ...

    def in_use(self) -> frozenset[str]: ...


class Health:
    """Asked for by `/health/ready` and the status page; it only looks, and never waits."""

    def __init__(
        self,
        store_problem: Callable[[], str],
        routers: OwnRouters,
        push: PushSide,
        providers: frozenset[str],
        *,
        own_percent: int,
    ) -> None:
        """`providers`: tags of those that are set up. `own_percent`: of the queues of our own routers."""
        self.listening = False
        self._store_problem = store_problem
        self._routers = routers
        self._push = push
        self._providers = providers
        self._own_percent = own_percent
        self.gateway_problem: Callable[[], str] = lambda: ""
        "What keeps the statement gateway from its node; empty: nothing."

    def missing(self) -> list[str]:
        """What keeps the server from doing its work; one line each."""
        lines = [] if self.listening else ["listener: not accepting clients"]
        if problem := self._store_problem():
            lines.append(f"store: {problem}")
        return lines + self._missing_queues() + self._missing_providers()

    def trouble(self) -> dict[str, str]:
        """Providers that take no pushes, by tag, and why."""
        return self._push.trouble()

    def worries(self) -> list[str]:
        """What is wrong although the server works."""
        troubles = [f"provider {tag} {why}" for tag, why in self._push.trouble().items()]
        down = [f"router {router.name} is down" for router in self._routers.now() if not router.up]
        problem = self.gateway_problem()
        return troubles + down + ([f"statement store {problem}"] if problem else [])

    def _missing_queues(self) -> list[str]:
        routers = self._routers.now()
        queues = sum(router.queues for router in routers)
        total = queues + sum(router.missing for router in routers)
        if queues * 100 >= total * self._own_percent:
            return []
        down = ", ".join(router.name for router in routers if not router.up) or "none"
        return [f"own routers: {queues} of {total} queues are subscribed; routers that are down: {down}"]

    def _missing_providers(self) -> list[str]:
        """One that devices use must take pushes; before the first push, one that is set up is enough."""
        trouble = self._push.trouble()
        used = (self._push.in_use() & self._providers) or self._providers
        if not used:
            return ["providers: none is set up"]
        if used - trouble.keys():
            return []
        return [f"providers: none takes pushes; {tag} {trouble[tag]}" for tag in sorted(used)]
