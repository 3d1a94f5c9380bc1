"""What makes a router the same one after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field

from smp_router.queues import Queues
from smp_router.services import Services
from transport.certificates import Credentials


@dataclass(slots=True)
class RouterState:
    """Identity, queues and services; connections and subscriptions are not part of it."""

    credentials: Credentials
    queues: Queues = field(default_factory=Queues)
    services: Services = field(default_factory=Services)
