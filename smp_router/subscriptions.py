"""Who hears of which queue, one instance for recipients and one for notifiers. No input or output here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.encoding import EntityId
from protocol.ids_hash import ids_hash
from protocol.smp_messages import QueueSet
from smp_router.client import Client
from smp_router.services import Service, Services


@dataclass(slots=True)
class ServiceSubscription:
    """The one client that speaks for a service now, and the queues it really subscribed."""

    client: Client
    queue_ids: set[EntityId] = field(default_factory=set)


class Subscriptions:
    def __init__(self, services: Services) -> None:
        self._associations = services
        self._single: dict[EntityId, Client] = {}
        self._single_of: dict[Client, set[EntityId]] = {}
        self._services: dict[Service, ServiceSubscription] = {}

    def subscriber(self, queue_id: EntityId) -> Client | None:
        client = self._single.get(queue_id)
        if client is not None:
            return client
        service = self._associations.owner(queue_id)
        subscription = None if service is None else self._services.get(service)
        if subscription is None or queue_id not in subscription.queue_ids:
            return None
        return subscription.client

    def add(self, queue_id: EntityId, client: Client) -> None:
        self._single[queue_id] = client
        self._single_of.setdefault(client, set()).add(queue_id)

    def remove(self, queue_id: EntityId) -> Client | None:
        """Returns the client that was subscribed."""
        client = self.subscriber(queue_id)
        if self._single.pop(queue_id, None) is not None and client is not None:
            self._single_of[client].discard(queue_id)
        service = self._associations.owner(queue_id)
        if service is not None and service in self._services:
            self._services[service].queue_ids.discard(queue_id)
        return client

    def of_service(self, service: Service) -> ServiceSubscription | None:
        return self._services.get(service)

    def end_service(self, service: Service) -> tuple[Client, QueueSet] | None:
        """End the service's subscription; returns who had it, and to which queues."""
        subscription = self._services.pop(service, None)
        if subscription is None:
            return None
        ids = subscription.queue_ids
        whole = len(ids) == len(service.queue_ids)
        return subscription.client, service.queues if whole else QueueSet(len(ids), ids_hash(ids))

    def add_to_service(self, service: Service, client: Client, queue_ids: Iterable[EntityId]) -> None:
        """`client` must be the only one of its service, or there must be none yet."""
        subscription = self._services.setdefault(service, ServiceSubscription(client))
        assert subscription.client is client
        subscription.queue_ids.update(queue_ids)

    def forget_services(self) -> None:
        self._services.clear()

    def release(self, client: Client) -> None:
        """The client is gone."""
        for queue_id in self._single_of.pop(client, ()):
            del self._single[queue_id]
        for service in [s for s, held in self._services.items() if held.client is client]:
            del self._services[service]

    def subscribed(self) -> set[EntityId]:
        """All queues that have a subscriber now."""
        ids = set(self._single)
        for service, held in self._services.items():
            ids |= held.queue_ids & service.queue_ids
        return ids
