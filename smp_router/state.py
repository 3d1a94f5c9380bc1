"""What makes a router the same one after a restart, the one place that changes it, and who is told of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any

from protocol.blocking import BlockingInfo
from protocol.crypto import AuthPublicKey, X25519PublicKey
from protocol.encoding import NO_CORR, CorrId, EntityId
from protocol.messages_crypto import QuotaExceeded, RcvMessage
from smp_router.queues import ID_SIZE, Link, Notifier, Prepared, Queue, Queues, StoredMessage, agree_secret
from smp_router.services import Service, Services
from smp_router.storage import Holdings, Storage
from transport.certificates import Credentials


class RecordKind(Enum):
    """What is kept, and by which key."""

    QUEUE = "queues"
    "By recipient id."
    MESSAGE = "messages"
    "By number: (recipient id, message, correlation id of its SEND)."
    NMSGS = "nmsgs"
    "By notifier id: the notifier, with what nobody has taken yet."
    SERVICE = "services"
    "By fingerprint and role."
    ASSOCIATION = "associations"
    "By queue id: the service it belongs to."


class Records:
    """Told of every change at once, so that the last state of each key is what counts.

    This one keeps nothing: the router lives in memory.
    """

    place = "memory"
    failing = False
    "Nothing can be written at present: promise nothing more."
    made = 0
    "How many changes there were."

    def put(self, kind: RecordKind, key: Any, thing: Any) -> None:
        """`thing` is new or has changed. It is read when it is written, so it may change further."""

    def delete(self, kind: RecordKind, key: Any) -> None:
        """There is none any more."""

    async def durable(self, made: int) -> None:
        """Wait until so many changes are safe."""

    async def maintain(self) -> None:
        """From time to time: leave no traces of what is gone."""


@dataclass(slots=True)
class RouterState:
    """Identity, queues and services; connections and subscriptions are not part of it.

    Every change is told to `records` as it is made.
    """

    credentials: Credentials
    records: Records = field(default_factory=Records)
    queues: Queues = field(default_factory=Queues)
    services: Services = field(default_factory=Services)
    stored_messages: int = 0
    stored_nmsgs: int = 0
    storage: Storage = field(default_factory=Storage)
    _last_number: int = 0

    # Queues

    def add_queue(self, queue: Queue) -> None:
        self.queues.add(queue)
        self.storage.add(queue.creator, _holdings(queue))
        self._save(queue)

    def restore_queue(self, queue: Queue) -> None:
        """Take in a queue that the records already have, its messages included."""
        self.queues.add(queue)
        self.storage.add(queue.creator, _holdings(queue))
        self.stored_nmsgs += 0 if queue.notifier is None else len(queue.notifier.pending)
        self.stored_messages += len(queue.messages)
        self._last_number = max([self._last_number, *(message.number for message in queue.messages)])

    def delete_queue(self, queue: Queue) -> None:
        self.set_notifier(queue, None)
        self.dissociate(queue.recipient_id)
        self._remove_messages(queue, len(queue.messages))
        self._count(queue, queues=-1, links=-(queue.link is not None), keys=1 - len(queue.recipient_keys))
        self.queues.delete(queue)
        self.records.delete(RecordKind.QUEUE, queue.recipient_id)

    def secure(self, queue: Queue, key: AuthPublicKey) -> bool:
        """Give the queue its sender's key: once, but the same key again is fine."""
        if queue.sender_key is None:
            queue.sender_key = key
            self._save(queue)
        return queue.sender_key == key

    def agree_again(self, queue: Queue, key: X25519PublicKey) -> X25519PublicKey:
        """The router's key for the secret with the recipient's `key`; the same as long as it is known."""
        if queue.agreed is None or queue.agreed[0] != key:
            own, queue.secret = agree_secret(key)
            queue.agreed = key, own
            self._save(queue)
        return queue.agreed[1]

    def set_recipient_keys(self, queue: Queue, keys: tuple[AuthPublicKey, ...]) -> None:
        self._count(queue, keys=len(keys) - len(queue.recipient_keys))
        queue.recipient_keys = keys
        self._save(queue)

    def set_link(self, queue: Queue, link: Link | None) -> None:
        self._count(queue, links=(link is not None) - (queue.link is not None))
        self.queues.set_link(queue, link)
        self._save(queue)

    def set_notifier(self, queue: Queue, notifier: Notifier | None) -> Notifier | None:
        """Returns the notifier there was; it belongs to no service any more."""
        previous = self.queues.set_notifier(queue, notifier)
        self._save(queue)
        if previous is not None:
            self.stored_nmsgs -= len(previous.pending)
            self.records.delete(RecordKind.NMSGS, previous.notifier_id)
            self.dissociate(previous.notifier_id)
        return previous

    def suspend(self, queue: Queue, timestamp: int) -> None:
        """The recipient's decision also ends the operator's block."""
        queue.blocked = None
        if queue.suspended_at is None:
            queue.suspended_at = timestamp
        self._save(queue)

    def block(self, queue: Queue, info: BlockingInfo | None) -> None:
        queue.blocked = info
        self._save(queue)

    def use(self, queue: Queue) -> None:
        """There was a command for it."""
        if queue.unused_since is not None:
            queue.unused_since = None
            self._save(queue)

    def begin_unused(self, queue: Queue, timestamp: int) -> None:
        """Count the time without a command from now on."""
        queue.unused_since = timestamp
        self._save(queue)

    def _count(
        self, queue: Queue, *, queues: int = 0, links: int = 0, keys: int = 0, message_bytes: int = 0
    ) -> None:
        self.storage.add(queue.creator, Holdings(queues, links, keys, message_bytes))

    def _save(self, queue: Queue) -> None:
        self.records.put(RecordKind.QUEUE, queue.recipient_id, queue)

    # Messages

    def accept(self, queue: Queue, content: RcvMessage, quota: int, corr_id: CorrId) -> StoredMessage | None:
        """Store a message; None if there is no room, in which case the recipient will be told so."""
        if queue.full:
            return None
        refused = len(queue.messages) >= quota
        stored = QuotaExceeded(content.timestamp) if refused else content
        self._last_number += 1
        message = StoredMessage(self._last_number, secrets.token_bytes(ID_SIZE), stored)
        queue.messages.append(message)
        self.stored_messages += 1
        self._count(queue, message_bytes=message.size)
        queue.last_corr_id = NO_CORR if refused else corr_id
        self.records.put(
            RecordKind.MESSAGE, message.number, (queue.recipient_id, message, queue.last_corr_id)
        )
        return None if refused else message

    def acknowledge(self, queue: Queue, message_id: bytes) -> None:
        """Forget the first message, if it is this one."""
        if queue.messages and queue.messages[0].message_id == message_id:
            self._remove_messages(queue, 1)

    def expire(self, queue: Queue, before: int) -> int:
        """Forget messages that came earlier; returns how many."""
        old = sum(1 for _ in takewhile(lambda m: m.content.timestamp < before, queue.messages))
        self._remove_messages(queue, old)
        return old

    def _remove_messages(self, queue: Queue, count: int) -> None:
        removed = [queue.messages.popleft() for _ in range(count)]
        for message in removed:
            self.records.delete(RecordKind.MESSAGE, message.number)
        self.stored_messages -= count
        self._count(queue, message_bytes=-sum(message.size for message in removed))

    def add_nmsg(self, notifier: Notifier, nmsg: Prepared, limit: int) -> None:
        """Store it, in place of the oldest one if there are `limit`."""
        self.stored_nmsgs -= len(notifier.pending)
        notifier.pending.append(nmsg)
        while len(notifier.pending) > limit:
            notifier.pending.popleft()
        self.stored_nmsgs += len(notifier.pending)
        self.records.put(RecordKind.NMSGS, notifier.notifier_id, notifier)

    def return_nmsg(self, notifier: Notifier, nmsg: Prepared, limit: int) -> None:
        """It was taken, and could not be delivered; it is older than those that wait."""
        if len(notifier.pending) < limit:
            notifier.pending.appendleft(nmsg)
            self.stored_nmsgs += 1
            self.records.put(RecordKind.NMSGS, notifier.notifier_id, notifier)

    def take_nmsgs(self, notifier: Notifier) -> list[Prepared]:
        taken = list(notifier.pending)
        notifier.pending.clear()
        self.stored_nmsgs -= len(taken)
        self.records.delete(RecordKind.NMSGS, notifier.notifier_id)
        return taken

    # Services

    def find_or_create_service(self, service: Service) -> Service:
        """The service with this fingerprint and role, if there is one; otherwise this one."""
        found = self.services.find(service.fingerprint, service.role)
        if found is not None:
            return found
        self.services.add(service)
        self._save_service(service)
        return service

    def associate(self, service: Service, queue_id: EntityId) -> None:
        if self.services.associate(service, queue_id):
            self.records.put(RecordKind.ASSOCIATION, queue_id, service)

    def dissociate(self, queue_id: EntityId) -> None:
        if self.services.dissociate(queue_id) is not None:
            self.records.delete(RecordKind.ASSOCIATION, queue_id)

    def forget_services(self) -> None:
        """Lose all services and associations."""
        for service in self.services:
            self.delete_service(service)

    def delete_service(self, service: Service) -> None:
        for queue_id in list(service.queue_ids):
            self.dissociate(queue_id)
        self.services.remove(service)
        self.records.delete(RecordKind.SERVICE, (service.fingerprint, service.role))

    def change_service_ids(self) -> None:
        self.services.change_ids()
        for service in self.services:
            self._save_service(service)

    def _save_service(self, service: Service) -> None:
        self.records.put(RecordKind.SERVICE, (service.fingerprint, service.role), service)


def _holdings(queue: Queue) -> Holdings:
    return Holdings(
        queues=1,
        links=int(queue.link is not None),
        keys=len(queue.recipient_keys) - 1,
        message_bytes=sum(message.size for message in queue.messages),
    )
