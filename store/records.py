"""Rows of the store as values. Keys and codes are never part of a repr."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

from protocol.addresses import SmpServer
from protocol.device_token import DeviceToken, Provider
from protocol.encoding import EntityId
from protocol.hiding import hides_bytes
from protocol.statuses import SUBSCRIBING, SubEvent, SubState, SubStatus, TokenStatus

TokenKey = NewType("TokenKey", int)
"The store's own short name of a token; never leaves the server."
SubKey = NewType("SubKey", int)
ServerKey = NewType("ServerKey", int)


@dataclass(slots=True, kw_only=True)  # not frozen: one is made per push, and freezing doubles its cost
class NewToken:
    token_id: EntityId = field(repr=False)
    device_token: DeviceToken = field(repr=False)
    verify_key: bytes = field(repr=False)
    "DER public key (Ed25519, Ed448 or X25519)."
    dh_private: bytes = field(repr=False)
    "Raw X25519 private key of the server."
    dh_secret: bytes = field(repr=False)
    "Raw X25519 shared secret with the device."
    code: bytes = field(repr=False)
    updated_on: int
    "Start of the day (seconds): the only time that is kept."


@dataclass(slots=True, kw_only=True)
class TokenRecord(NewToken):
    key: TokenKey
    status: TokenStatus
    verified: bool = False
    "It was ACTIVE once."
    cron_minutes: int = 0
    cron_due: int | None = None

    @property
    def may_subscribe(self) -> bool:
        return self.verified and self.status in SUBSCRIBING


@dataclass(slots=True, kw_only=True)  # not frozen: likewise, per SNEW
class NewSubscription:
    subscription_id: EntityId = field(repr=False)
    token_key: TokenKey
    server: SmpServer
    "In its canonical form: each router has one row."
    spelling: str = ""
    "Hosts and port as the client wrote them, if otherwise: what pushes tell it."
    notifier_id: EntityId = field(repr=False)
    notifier_key: bytes = field(repr=False)
    "DER private key, as it came in SNEW."


@hides_bytes
class SubscriptionRecord(NamedTuple):
    """A subscription with what is needed to authorise a command on it."""

    key: SubKey
    status: SubStatus
    associated: bool
    token_id: EntityId
    verify_key: bytes


@hides_bytes
class QueueRow(NamedTuple):
    """What a router's subscriber needs of a subscription. Do not print: holds the notifier key."""

    key: SubKey
    notifier_id: EntityId
    notifier_key: bytes
    associated: bool


@hides_bytes
class CreatedSubscription(NamedTuple):
    """Answer to SNEW. `created` is False for a repeated one: the id is the one given first.

    `handed_over`: the row is new, or was dead and is revived, and is PENDING now: the caller gives `queue` to
    its router's subscriber. A row that was alive is in its care already. Do not print: holds a key.
    """

    subscription_id: EntityId
    server_key: ServerKey
    queue: QueueRow
    created: bool
    handed_over: bool


class SnewRefusal(Enum):
    AUTH = "the token may not subscribe, the queue is another token's, or the notifier key differs"
    QUOTA = "the token has as many subscriptions, or uses as many routers, as it may"


@hides_bytes
class DeletedToken(NamedTuple):
    """Do not print."""

    token_id: EntityId
    provider: Provider
    subscriptions: int


@hides_bytes
class DeletedSubscription(NamedTuple):
    """A row that is gone: the subscriber forgets its queue. Do not print."""

    server_key: ServerKey
    notifier_id: EntityId
    associated: bool
    subscription_id: EntityId
    token_id: EntityId
    server: SmpServer


class Deletion(NamedTuple):
    """What one call deleted. Tokens are gone at once; of their subscriptions those of the first page are, and
    `more` tells that `delete_more` is to be called."""

    tokens: Sequence[DeletedToken] = ()
    subscriptions: Sequence[DeletedSubscription] = ()
    more: bool = False


class TokenMove(NamedTuple):
    """What an input made of a token; a verified one takes its device from all others."""

    before: TokenStatus
    after: TokenStatus
    deletion: Deletion = Deletion()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCredentials:
    chain: tuple[bytes, ...] = field(repr=False)
    private_key: bytes = field(repr=False)
    "DER PKCS#8 Ed25519."


class StoredRouter(NamedTuple):
    """A router to be watched; `was_there` if any of its queues was ever subscribed."""

    key: ServerKey
    server: SmpServer
    was_there: bool


@hides_bytes
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    key: ServerKey
    server: SmpServer
    credentials: ServiceCredentials | None
    service_id: EntityId | None = field(repr=False)
    associated_count: int
    associated_hash: bytes
    "XOR of MD5 of the associated notifier ids, kept in the transaction that changes them."


@hides_bytes
class Notification(NamedTuple):
    """One NMSG. Do not print."""

    notifier_id: EntityId
    nonce: bytes
    meta: bytes


@hides_bytes
class Stored(NamedTuple):
    """Where a notification went. Do not print."""

    token_key: TokenKey
    sub_key: SubKey
    token_id: EntityId
    subscription_id: EntityId
    provider: Provider
    "Of the token: whoever pushes need not read the token to learn it."


@hides_bytes
class LastNotification(NamedTuple):
    """An entry of a token's list. `seq` rises with every NMSG; a newer one of the queue replaces it."""

    sub_key: SubKey
    seq: int
    server: SmpServer
    notifier_id: EntityId
    received_at: int
    nonce: bytes
    meta: bytes
    sent: bool


@dataclass(frozen=True, slots=True)
class TokenPush:
    """A token with its last notifications, oldest first: every unsent one and the newest sent ones."""

    token: TokenRecord
    entries: tuple[LastNotification, ...] = field(repr=False)


class SentEntry(NamedTuple):
    token_key: TokenKey
    sub_key: SubKey
    seq: int


@hides_bytes
class QueueEvent(NamedTuple):
    """What happened to a queue. Do not print."""

    notifier_id: EntityId
    event: SubEvent


@hides_bytes
class Moved(NamedTuple):
    """A subscription whose state really changed. Do not print."""

    subscription_id: EntityId
    token_id: EntityId
    before: SubState
    after: SubState


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    tokens: int
    active_tokens: int
    subscriptions: int
    active_subscriptions: int
    associated_subscriptions: int
    servers: int
    unsent_notifications: int
    oldest_unsent: int | None
    "When it was received, in seconds since 1970."
