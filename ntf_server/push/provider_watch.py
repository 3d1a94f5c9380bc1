"""Which push providers devices use, and which of them take no pushes now."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ntf_server.outage import Outage
from ntf_server.push.breaker import BreakerState
from ntf_server.push.provider import Destination, ProviderDown, ProviderRefusesUs, PushError
from ntf_server.push.push_events import PushEvents
from ntf_server.push.scheduler import PushScheduler
from protocol.device_token import Provider

log = logging.getLogger(__name__)


class ProviderWatch:
    """Hears of every push that ended; says so once when a provider goes down, and once when it is back."""

    def __init__(self, scheduler: PushScheduler, events: PushEvents, monotonic: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._events = events
        self._monotonic = monotonic
        self._trouble: dict[Provider, str] = {}
        self._outages = {p: Outage(f"provider {p.tag}", monotonic, log) for p in Provider}
        self._used: set[Provider] = set()

    def trouble(self) -> dict[str, str]:
        """Providers that take no pushes now, by tag, and why. Single hosts of Web Push are not named."""
        return {provider.tag: reason for provider, reason in self._trouble.items()}

    def in_use(self) -> frozenset[str]:
        """Tags of the providers that a push was meant for since the start."""
        return frozenset(provider.tag for provider in self._used)

    def ended(self, provider: Provider, error: PushError | None, *, opened: bool) -> None:
        """A push was accepted (None) or not, and perhaps `opened` its destination's breaker."""
        self._used.add(provider)
        if provider is Provider.WEB_PUSH:
            if opened and error is not None:
                log.warning("a Web Push host %s: %s", _how(error), error.reason)
        elif error is not None or self._trouble:  # nothing to note while all is well
            self._note(provider, error)

    def _note(self, provider: Provider, error: PushError | None) -> None:
        destination = Destination(provider)
        if self._scheduler.breaker_state(destination) is BreakerState.CLOSED:
            if self._trouble.pop(provider, None) is not None:
                self._outages[provider].note("")
                self._events.provider_up(provider, self._monotonic(), self._scheduler.held_back(destination))
        elif isinstance(error, (ProviderDown, ProviderRefusesUs)):
            if provider not in self._trouble:
                self._events.provider_down(provider, self._monotonic(), error)
            self._trouble[provider] = problem = f"{_how(error)}: {error.reason}"
            self._outages[provider].note(problem)


def _how(error: PushError) -> str:
    return "refuses us" if isinstance(error, ProviderRefusesUs) else "is down"
