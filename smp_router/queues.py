"""Queues: what the router knows of them, found by any of their four ids."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.blocking import BlockingInfo
from protocol.crypto import AuthPublicKey, X25519PrivateKey, X25519PublicKey
from protocol.encoding import NONCE_SIZE, EntityId
from protocol.messages_crypto import QuotaExceeded, RcvMessage
from protocol.push_messages import NmsgMeta, seal_nmsg_meta
from protocol.smp_codec import SMP_MESSAGES
from protocol.smp_messages import LinkData, Nmsg, QueueMode
from protocol.versions import SMP_VERSIONS
from smp_router.storage import Creator

ID_SIZE = 24
MESSAGE_BYTES = 300
"What a stored message takes beside its body."


class Prepared(bytes):
    """A router message that is already encoded, in a form that is the same in all versions."""

    __slots__ = ()


def new_id() -> EntityId:
    return EntityId(secrets.token_bytes(ID_SIZE))


@dataclass(slots=True, eq=False)
class Notifier:
    """The notification side of a queue, with the NMSGs nobody has taken yet."""

    notifier_id: EntityId = field(repr=False)
    key: AuthPublicKey = field(repr=False)
    secret: bytes = field(repr=False)
    "Shared by router and recipient: it boxes the meta of NMSG."
    pending: deque[Prepared] = field(default_factory=deque, repr=False)

    def seal(self, meta: NmsgMeta) -> Prepared:
        nonce = secrets.token_bytes(NONCE_SIZE)
        nmsg = Nmsg(nonce, seal_nmsg_meta(self.secret, nonce, meta))
        return Prepared(SMP_MESSAGES.encode(nmsg, SMP_VERSIONS.max))


@dataclass(frozen=True, slots=True)
class StoredMessage:
    number: int
    "Of the whole router, in order of arrival."
    message_id: bytes = field(repr=False)
    content: RcvMessage | QuotaExceeded

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return MESSAGE_BYTES + (len(self.content.body) if isinstance(self.content, RcvMessage) else 0)


@dataclass(frozen=True, slots=True)
class Link:
    link_id: EntityId = field(repr=False)
    data: LinkData


@dataclass(slots=True, eq=False, kw_only=True)
class Queue:
    recipient_id: EntityId = field(repr=False)
    recipient_keys: tuple[AuthPublicKey, ...] = field(repr=False)
    "Any of them may be used; more than one only for a contact's queue."
    secret: bytes = field(repr=False)
    "Shared by router and recipient: it boxes messages."
    sender_id: EntityId = field(repr=False)
    sender_key: AuthPublicKey | None = field(default=None, repr=False)
    mode: QueueMode | None = None
    agreed: tuple[X25519PublicKey, X25519PublicKey] | None = field(default=None, repr=False)
    "The recipient's key and ours that made `secret`, for a repeated NEW; forgotten by a restart."
    notifier: Notifier | None = None
    link: Link | None = None
    messages: deque[StoredMessage] = field(default_factory=deque, repr=False)
    last_corr_id: bytes = field(default=b"", repr=False)
    "Of the last SEND that was taken: a sender that did not see the answer may send it again."
    suspended_at: int | None = None
    blocked: BlockingInfo | None = None
    creator: Creator | None = field(default=None, repr=False)
    "Whose share of the storage it counts for."
    unused_since: int | None = None
    "When it was created, if there was no command for it since then."

    @property
    def suspended(self) -> bool:
        return self.suspended_at is not None

    @property
    def full(self) -> bool:
        """The quota was reached; nothing is accepted until the recipient took everything."""
        return bool(self.messages) and isinstance(self.messages[-1].content, QuotaExceeded)


class Queues:
    """All queues of a router, by each of their ids."""

    def __init__(self) -> None:
        self._by_recipient: dict[EntityId, Queue] = {}
        self._by_sender: dict[EntityId, Queue] = {}
        self._by_notifier: dict[EntityId, Queue] = {}
        self._by_link: dict[EntityId, Queue] = {}
        self.by_recipient = self._by_recipient.get
        self.by_sender = self._by_sender.get
        self.by_notifier = self._by_notifier.get
        self.by_link = self._by_link.get

    def __len__(self) -> int:
        return len(self._by_recipient)

    def __iter__(self) -> Iterator[Queue]:
        return iter(list(self._by_recipient.values()))

    @property
    def links(self) -> int:
        """How many queues have a link."""
        return len(self._by_link)

    def by_any(self, entity_id: EntityId) -> Queue | None:
        found = self.by_recipient(entity_id) or self.by_sender(entity_id) or self.by_notifier(entity_id)
        return found or self.by_link(entity_id)

    def add(self, queue: Queue) -> None:
        self._by_recipient[queue.recipient_id] = queue
        self._by_sender[queue.sender_id] = queue
        if queue.notifier is not None:
            self._by_notifier[queue.notifier.notifier_id] = queue
        if queue.link is not None:
            self._by_link[queue.link.link_id] = queue

    def set_notifier(self, queue: Queue, notifier: Notifier | None) -> Notifier | None:
        """Replace the notifier; returns the one there was."""
        previous = queue.notifier
        if previous is not None:
            del self._by_notifier[previous.notifier_id]
        queue.notifier = notifier
        if notifier is not None:
            self._by_notifier[notifier.notifier_id] = queue
        return previous

    def set_link(self, queue: Queue, link: Link | None) -> None:
        if queue.link is not None:
            del self._by_link[queue.link.link_id]
        queue.link = link
        if link is not None:
            self._by_link[link.link_id] = queue

    def delete(self, queue: Queue) -> None:
        self.set_notifier(queue, None)
        self.set_link(queue, None)
        del self._by_recipient[queue.recipient_id]
        del self._by_sender[queue.sender_id]


def agree_secret(peer: X25519PublicKey) -> tuple[X25519PublicKey, bytes]:
    """(the router's fresh public key, the secret shared with the owner of `peer`)."""
    own = X25519PrivateKey(secrets.token_bytes(32))
    return own.public, own.exchange(peer)
