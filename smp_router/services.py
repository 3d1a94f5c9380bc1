"""Services: who they are and which queues are theirs. Associations outlive connections."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protocol.encoding import EntityId
from protocol.hiding import hides_bytes
from protocol.ids_hash import NO_IDS, ids_hash, xor
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import QueueSet
from smp_router.queues import new_id
from smp_router.storage import Creator


@hides_bytes
@dataclass(slots=True, eq=False)
class Service:
    """A certificate in a role. Its queues are recipient ids (messaging) or notifier ids (notifier)."""

    service_id: EntityId = field(repr=False)
    fingerprint: bytes
    role: ServiceRole
    queue_ids: set[EntityId] = field(default_factory=set, repr=False)
    ids_hash: bytes = NO_IDS
    creator: Creator | None = field(default=None, repr=False)

    @property
    def queues(self) -> QueueSet:
        return QueueSet(len(self.queue_ids), self.ids_hash)


class Services:
    """All services of a router. A queue belongs to one at most; counts and hashes are kept current."""

    def __init__(self) -> None:
        self._by_identity: dict[tuple[bytes, ServiceRole], Service] = {}
        self._by_id: dict[EntityId, Service] = {}
        self._owners: dict[EntityId, Service] = {}
        self.get = self._by_id.get
        self.owner = self._owners.get
        "Of a queue."

    def __iter__(self) -> Iterator[Service]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def created_by(self, creator: Creator) -> int:
        return sum(service.creator == creator for service in self._by_id.values())

    def find(self, fingerprint: bytes, role: ServiceRole) -> Service | None:
        return self._by_identity.get((fingerprint, role))

    def add(self, service: Service) -> None:
        """Take in a service that is complete, its queues included."""
        self._by_identity[service.fingerprint, service.role] = service
        self._by_id[service.service_id] = service
        self._owners.update(dict.fromkeys(service.queue_ids, service))

    def associate(self, service: Service, queue_id: EntityId) -> bool:
        """False if the queue was the service's already."""
        if self._owners.get(queue_id) is service:
            return False
        self.dissociate(queue_id)
        self._owners[queue_id] = service
        service.queue_ids.add(queue_id)
        service.ids_hash = xor(service.ids_hash, ids_hash((queue_id,)))
        return True

    def dissociate(self, queue_id: EntityId) -> Service | None:
        """Returns the service that had the queue, if any."""
        service = self._owners.pop(queue_id, None)
        if service is not None:
            service.queue_ids.discard(queue_id)
            service.ids_hash = xor(service.ids_hash, ids_hash((queue_id,)))
        return service

    def remove(self, service: Service) -> None:
        """Forget a service that has no queues any more."""
        assert not service.queue_ids
        del self._by_identity[service.fingerprint, service.role]
        del self._by_id[service.service_id]

    def change_ids(self) -> None:
        """Give every service another id; its queues stay its own."""
        for service in self:
            del self._by_id[service.service_id]
            service.service_id = new_id()
            self._by_id[service.service_id] = service

    def choose_associated(self, count: int) -> Iterable[EntityId]:
        """Some queues that belong to services, by chance."""
        return random.sample(sorted(self._owners), min(count, len(self._owners)))

    @property
    def associated(self) -> int:
        """How many queues belong to services."""
        return len(self._owners)
