"""Who hears of which queue, one instance for recipients and one for notifiers. No input or output here.

A queue of a service is heard by the one client that speaks for the service, whichever command made it do so;
any other queue by the client that subscribed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.encoding import EntityId
from protocol.hiding import hides_bytes
from protocol.ids_hash import ids_hash
from protocol.smp_messages import QueueSet
from smp_router.client import Client
from smp_router.services import Service, Services


@hides_bytes
@dataclass(slots=True)
class ServiceSubscription:
    """The one client that speaks for a service now."""

    client: Client
    whole: bool = False
    "It subscribed all queues at once; before that, only those in `queue_ids`."
    queue_ids: set[EntityId] = field(default_factory=set)


class Subscriptions:
    def __init__(self, services: Services) -> None:
        self._associations = services
        self._single: dict[EntityId, Client] = {}
        self._single_of: dict[Client, set[EntityId]] = {}
        self._services: dict[Service, ServiceSubscription] = {}
        self._speaks_for: dict[Client, Service] = {}

    def subscriber(self, queue_id: EntityId) -> Client | None:
        service = self._associations.owner(queue_id)
        return self._single.get(queue_id) if service is None else self.of_service(service)

    def offer(self, queue_id: EntityId) -> None:
        """Something is stored for whoever is subscribed."""
        client = self.subscriber(queue_id)
        if client is not None:
            client.offer(queue_id)

    def add(self, queue_id: EntityId, client: Client) -> None:
        self._single[queue_id] = client
        self._single_of.setdefault(client, set()).add(queue_id)

    def remove(self, queue_id: EntityId) -> Client | None:
        """Returns the client that was subscribed."""
        client = self.subscriber(queue_id)
        single = self._single.pop(queue_id, None)
        if single is not None:
            self._single_of[single].discard(queue_id)
        service = self._associations.owner(queue_id)
        if service is not None and service in self._services:
            self._services[service].queue_ids.discard(queue_id)
        return client

    def of_service(self, service: Service) -> Client | None:
        subscription = self._services.get(service)
        return None if subscription is None else subscription.client

    def end_service(self, service: Service) -> tuple[Client, QueueSet] | None:
        """End the service's subscription; returns who had it, and to which queues.

        With it the client loses everything that it subscribed one by one.
        """
        subscription = self._services.pop(service, None)
        if subscription is None:
            return None
        del self._speaks_for[subscription.client]
        self._release_single(subscription.client)
        ids = subscription.queue_ids
        queues = service.queues if subscription.whole else QueueSet(len(ids), ids_hash(ids))
        return subscription.client, queues

    def add_to_service(self, service: Service, client: Client, queue_id: EntityId) -> None:
        """`client` must be the only one of its service, or there must be none yet."""
        self._speaker(service, client).queue_ids.add(queue_id)

    def add_all_of_service(self, service: Service, client: Client) -> bool:
        """False if this client had subscribed them all before."""
        subscription = self._speaker(service, client)
        first, subscription.whole = not subscription.whole, True
        return first

    def _speaker(self, service: Service, client: Client) -> ServiceSubscription:
        subscription = self._services.get(service)
        if subscription is None:
            subscription = self._services[service] = ServiceSubscription(client)
            self._speaks_for[client] = service
        assert subscription.client is client
        return subscription

    def forget_services(self) -> None:
        self._services.clear()
        self._speaks_for.clear()

    def has(self, client: Client) -> bool:
        """The client is subscribed to a queue or speaks for a service."""
        return client in self._speaks_for or bool(self._single_of.get(client))

    def release(self, client: Client) -> None:
        """The client is gone."""
        self._release_single(client)
        service = self._speaks_for.pop(client, None)
        if service is not None:
            del self._services[service]

    def _release_single(self, client: Client) -> None:
        for queue_id in self._single_of.pop(client, ()):
            del self._single[queue_id]

    def subscribed(self) -> set[EntityId]:
        """All queues that have a subscriber now."""
        return set(self._single).union(*(service.queue_ids for service in self._services))
