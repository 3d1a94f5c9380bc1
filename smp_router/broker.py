"""The router without its sockets: what is stored, who is subscribed, what goes to whom."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from protocol.connection import Outgoing
from protocol.encoding import NO_CORR, NO_ENTITY, CorrId, EntityId
from protocol.messages_crypto import RcvMessage, seal_message
from protocol.push_messages import NmsgMeta
from protocol.smp_messages import Alls, Deld, End, Ends, Msg, Send
from smp_router.client import Client, Reception, RouterMessage
from smp_router.config import RouterConfig
from smp_router.queues import MESSAGE_BYTES, Notifier, Prepared, Queue, StoredMessage
from smp_router.services import Service
from smp_router.state import RouterState
from smp_router.storage import Holdings, share
from smp_router.subscriptions import Subscriptions

if TYPE_CHECKING:
    from smp_router.relays import Relays

ALL_SENT = NO_ENTITY
"Stands among a client's offers for the end of its service's stored messages."
RECEPTIONS_UNCHECKED = 1000
"A client that has no more than these is not looked through for queues that are gone."
EXPIRED_AT_ONCE = 500
"Queues looked at before others have their turn."


RESERVED_MESSAGES = 4
"Of each queue: taken also where all queues together have too many."


class Broker:
    def __init__(self, state: RouterState, config: RouterConfig, now: Callable[[], datetime]) -> None:
        self.state = state
        self.config = config
        self.recipients = Subscriptions(state.services)
        self.notifiers = Subscriptions(state.services)
        self.relays: Relays | None = None
        "Sessions with other routers, from the first command that needs one until the router stops."
        self.counts: Counter[str] = Counter()
        "What happened since the start, for the metrics."
        self._connected: Counter[Service] = Counter()
        "Connections of each service."
        self._now = now
        self._fresh: dict[EntityId, None] = {}

    def timestamp(self) -> int:
        return int(self._now().timestamp())

    # Services

    def service_came(self, service: Service) -> Service | None:
        """The service as it is known, connected once more; None if there is no room for another one.

        Whoever has a certificate is a service, so they are limited: those without queues make room.
        """
        state = self.state
        if state.services.find(service.fingerprint, service.role) is None and not self._has_room_for(service):
            return None
        known = state.find_or_create_service(service)
        self._connected[known] += 1
        return known

    def _has_room_for(self, service: Service) -> bool:
        """After those that have no queues made room, its own address's first."""
        state, limit = self.state, self.config.max_services
        most = share(limit, self.config.address_share_percent)
        crowded = service.creator is not None and state.services.created_by(service.creator) >= most
        if not crowded and len(state.services) < limit:
            return True
        unused = (s for s in state.services if not s.queue_ids and s not in self._connected)
        idle = next((s for s in unused if not crowded or s.creator == service.creator), None)
        if idle is None:
            return False
        state.delete_service(idle)
        return True

    def service_left(self, service: Service) -> None:
        self._connected[service] -= 1
        if not self._connected[service]:
            del self._connected[service]

    # Subscribing

    def subscribe(
        self, subscriptions: Subscriptions, queue_id: EntityId, client: Client, service: Service | None
    ) -> None:
        """The four cases: a service's client or not, with a queue that is the service's or not.

        Whoever had the queue before, and is another client, is told END, or ENDS if it spoke for the same
        service.
        """
        if service is not None:
            self._speak_for(subscriptions, service, client)
        previous = subscriptions.remove(queue_id)
        if service is None:
            self.state.dissociate(queue_id)
            subscriptions.add(queue_id, client)
        else:
            self.state.associate(service, queue_id)
            subscriptions.add_to_service(service, client, queue_id)
        if previous is not None and previous is not client:
            previous.receptions.pop(queue_id, None)
            previous.event(queue_id, End())

    def subscribe_service(self, subscriptions: Subscriptions, service: Service, client: Client) -> bool:
        """All queues of the service at once. False if this client had done so before."""
        self._speak_for(subscriptions, service, client)
        return subscriptions.add_all_of_service(service, client)

    def _speak_for(self, subscriptions: Subscriptions, service: Service, client: Client) -> None:
        held = subscriptions.of_service(service)
        if held is not None and held is not client:
            self.end_service(subscriptions, service)

    def end_service(self, subscriptions: Subscriptions, service: Service) -> None:
        ended = subscriptions.end_service(service)
        if ended is not None:
            client, queues = ended
            if subscriptions is self.recipients:
                client.receptions.clear()
            client.event(service.service_id, Ends(queues))

    def unsubscribe(self, queue_id: EntityId) -> list[Client]:
        """End a subscription, and the queue's association with a service, without a word; who had it?"""
        clients = [subscriptions.remove(queue_id) for subscriptions in (self.recipients, self.notifiers)]
        self.state.dissociate(queue_id)
        found = [client for client in clients if client is not None]
        for client in found:
            client.receptions.pop(queue_id, None)
        return found

    def end(self, queue_id: EntityId) -> None:
        """END a subscription, of a recipient or a notifier, for no reason."""
        for client in self.unsubscribe(queue_id):
            client.event(queue_id, End())

    def deleted(self, queue_id: EntityId, by: Client | None = None) -> None:
        """The queue, or the notifier, is no more: its subscriber is told, unless it did it itself."""
        for client in self.unsubscribe(queue_id):
            if client is not by:
                client.event(queue_id, Deld())

    def is_subscribed(self, client: Client) -> bool:
        return self.recipients.has(client) or self.notifiers.has(client)

    def release(self, client: Client) -> None:
        self.recipients.release(client)
        self.notifiers.release(client)
        self._give_back(client.gone())

    def _give_back(self, unsent: Sequence[Outgoing[RouterMessage]]) -> None:
        """NMSGs that did not leave wait for the next subscriber; whatever else was for this client ends."""
        for outgoing in reversed(unsent):
            queue = self.state.queues.by_notifier(outgoing.entity_id)
            if isinstance(outgoing.message, Prepared) and queue is not None and queue.notifier is not None:
                self.state.return_nmsg(queue.notifier, outgoing.message, self._nmsg_limit(queue.notifier))
                self.offer_pending(queue.notifier)

    # Queues

    def set_notifier(self, queue: Queue, notifier: Notifier | None, by: Client | None = None) -> None:
        if queue.notifier is not None:
            self.deleted(queue.notifier.notifier_id, by)
        self.state.set_notifier(queue, notifier)

    def delete_queue(self, queue: Queue, by: Client | None = None) -> None:
        self.set_notifier(queue, None, by)
        self.deleted(queue.recipient_id, by)
        self.state.delete_queue(queue)

    async def expire(self) -> None:
        """Forget old messages, and queues that were suspended long ago or never used."""
        now = self.timestamp()
        for number, queue in enumerate(self.state.queues):
            if number % EXPIRED_AT_ONCE == EXPIRED_AT_ONCE - 1:
                await asyncio.sleep(0)
            if self.state.queues.by_recipient(queue.recipient_id) is not queue:
                continue
            self._keep_if_subscribed(queue, now)
            if self._is_over(queue, now):
                self.delete_queue(queue)
                self.counts["queues_expired"] += 1
            else:
                self.expire_messages(queue)

    def expire_messages(self, queue: Queue) -> None:
        """Forget the queue's messages that nobody took in time."""
        before = int(self.timestamp() - self.config.message_ttl)
        self.counts["messages_expired"] += self.state.expire(queue, before)

    def _keep_if_subscribed(self, queue: Queue, now: int) -> None:
        """Begin the time of an unused queue again while its recipient is subscribed: a recipient that stayed
        connected, and so had no reason to send SUB, must not lose the queue with the connection."""
        unused = queue.unused_since
        is_due = unused is not None and unused < now - self.config.unused_ttl / 2
        if is_due and self.recipients.subscriber(queue.recipient_id) is not None:
            self.state.begin_unused(queue, now)

    def _is_over(self, queue: Queue, now: float) -> bool:
        suspended, unused = queue.suspended_at, queue.unused_since
        if suspended is not None and suspended < now - self.config.suspended_ttl:
            return True
        return unused is not None and unused < now - self.config.unused_ttl

    # Messages

    def has_room(self, queue: Queue, command: Send) -> bool:
        """A few messages are taken of each queue, however many others there are in all."""
        storage, more = self.state.storage, Holdings(message_bytes=MESSAGE_BYTES + len(command.body))
        if not storage.fits_share(queue.creator, more, self.config):
            return False
        return len(queue.messages) < RESERVED_MESSAGES or storage.fits(more, self.config)

    def send(self, queue: Queue, command: Send, corr_id: CorrId = NO_CORR) -> StoredMessage | None:
        """Store a message, and the NMSG that goes with it; None if the queue is full."""
        timestamp = self.timestamp()
        content = RcvMessage(timestamp, command.notification, command.body)
        message = self.state.accept(queue, content, self.config.quota, corr_id)
        self.recipients.offer(queue.recipient_id)
        if message is None:
            return None
        if command.notification and queue.notifier is not None:
            meta = NmsgMeta(message.message_id, timestamp)
            self.notify(queue.notifier, queue.notifier.seal(meta))
        return message

    def notify(self, notifier: Notifier, nmsg: Prepared) -> None:
        self.state.add_nmsg(notifier, nmsg, self._nmsg_limit(notifier))
        self.offer_pending(notifier)

    def _nmsg_limit(self, notifier: Notifier) -> int:
        """One is stored even where there are too many in all: somebody may be waiting for it."""
        if self.state.stored_nmsgs < self.config.max_nmsgs:
            return self.config.max_pending
        return len(notifier.pending) or 1

    def offer_pending(self, notifier: Notifier) -> None:
        """Have what is pending delivered: now, or in the next round."""
        if not notifier.pending:
            return
        if self.config.interval:
            self._fresh[notifier.notifier_id] = None
        else:
            self.notifiers.offer(notifier.notifier_id)

    def deliver_round(self) -> None:
        """Offer what came since the last round; without a subscriber it waits for one."""
        fresh, self._fresh = self._fresh, {}
        for notifier_id in fresh:
            self.notifiers.offer(notifier_id)

    def next_message(self, client: Client, queue: Queue, by_get: bool = False) -> Msg | None:
        """The first stored message, marked as delivered to this client."""
        reception = client.receptions.get(queue.recipient_id)
        if reception is None:
            self._forget_deleted(client)
            reception = client.receptions[queue.recipient_id] = Reception(by_get)
        reception.again = False
        if not queue.messages:
            reception.delivered = None
            return None
        message = queue.messages[0]
        reception.delivered = message.message_id
        self.counts["messages_delivered"] += 1
        return Msg(message.message_id, seal_message(queue.secret, message.message_id, message.content))

    def _forget_deleted(self, client: Client) -> None:
        """Whoever only reads a queue is not told that others delete it, and must not keep it for ever."""
        if len(client.receptions) < client.receptions_checked:
            return
        for queue_id in [i for i in client.receptions if self.state.queues.by_recipient(i) is None]:
            del client.receptions[queue_id]
        client.receptions_checked = max(RECEPTIONS_UNCHECKED, 2 * len(client.receptions))

    def take_offer(self, client: Client, entity_id: EntityId) -> list[Outgoing[RouterMessage]]:
        """What is stored under an id that was offered, if it still is for this client."""
        if entity_id == ALL_SENT:
            return [Outgoing(NO_CORR, NO_ENTITY, Alls())]
        queue = self.state.queues.by_notifier(entity_id)
        if queue is not None and queue.notifier is not None:
            if self.notifiers.subscriber(entity_id) is not client:
                return []
            taken = self.state.take_nmsgs(queue.notifier)
            self.counts["notifications_delivered"] += len(taken)
            return [Outgoing(NO_CORR, entity_id, nmsg) for nmsg in taken]
        queue = self.state.queues.by_recipient(entity_id)
        if queue is None or queue.blocked or self.recipients.subscriber(entity_id) is not client:
            return []
        reception = client.receptions.get(entity_id)
        if reception is not None and (reception.by_get or (reception.delivered and not reception.again)):
            return []
        message = self.next_message(client, queue)
        return [] if message is None else [Outgoing(NO_CORR, entity_id, message)]
