"""Rows of the statement gateway as values. Tokens and data are never part of a repr."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

from protocol.device_token import DeviceToken, encode_device_token
from protocol.hiding import hides_bytes
from protocol.statements import statement_hash

PushKey = NewType("PushKey", int)
"The store's own short name of a push; never used again."
GatewayKey = NewType("GatewayKey", int)
"Likewise of a subscription."


class Channel(StrEnum):
    """A subscription's `notificationType`."""

    APNS = "apns"
    VOIP = "voip"
    FCM = "fcm"


@hides_bytes
class Rule(NamedTuple):
    """Whose statements about what are pushed."""

    sender: bytes
    topic: bytes


@hides_bytes
class MadeRule(NamedTuple):
    """A rule of a subscription."""

    sender: bytes
    topic: bytes
    created_at: float
    is_settled: bool
    "What the node stored before the rule was made is known."

    def rule_id(self, subscription_id: bytes) -> bytes:
        """A UUID's 16 bytes; another one if the rule is removed and added again."""
        text = subscription_id + self.sender + self.topic + struct.pack(">d", self.created_at)
        return hashlib.blake2b(text, digest_size=16).digest()


@hides_bytes
class SignedRequest(NamedTuple):
    """A signed request, which counts once; after `valid_until` its time alone has it refused."""

    request_id: bytes
    valid_until: int


@hides_bytes
@dataclass(frozen=True, slots=True, kw_only=True)
class NewGatewaySubscription:
    subscription_id: bytes
    "A UUID's 16 bytes."
    client_id: bytes
    channel: Channel
    device_token: DeviceToken = field(repr=False)
    is_call: bool = False
    "Pushes of FCM are for calls."
    created_at: int

    @property
    def device_id(self) -> bytes:
        """What stands for the device where its token must not be kept."""
        return hashlib.blake2b(encode_device_token(self.device_token), digest_size=16).digest()


@hides_bytes
@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySubscription(NewGatewaySubscription):
    key: GatewayKey
    updated_at: int


RegistrationKey = NewType("RegistrationKey", int)
"The store's own short name of a device that was registered and has to show its code."


@hides_bytes
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRegistration:
    """A device that was registered and has to show its code."""

    key: RegistrationKey
    subscription_id: bytes
    client_id: bytes
    channel: Channel
    device_token: DeviceToken = field(repr=False)
    is_call: bool
    code: bytes = field(repr=False)
    created_at: int

    @property
    def token_id(self) -> bytes:
        """What stands for the device in a journal."""
        return self.subscription_id


class Refusal(Enum):
    REPLAYED = "this request was made before"
    UNKNOWN = "the client has no such subscription"
    QUOTA = "the client has as many as it may"
    WRONG_CODE = "this is not the code that was pushed to the device"
    TOPICS = "more topics that no rule named before than may be added now"


@hides_bytes
class TokenTaken(NamedTuple):
    """The device token has a subscription; `subscription_id` if it is the same client's, of the same kind."""

    subscription_id: bytes | None


class RuleEdit(Enum):
    REPLACE = "exactly these"
    ADD = "these too"
    REMOVE = "not these"


class RulesEdited(NamedTuple):
    changed: int
    total: int
    new_topics: int = 0
    "That no rule named before, of any client."


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCaps:
    """How many rows one client may have."""

    subscriptions_per_client: int = 32
    rules_per_subscription: int = 10_000


DEFAULT_GATEWAY_CAPS = GatewayCaps()


class Outcome(StrEnum):
    """What became of a statement that met a rule. A device gets a statement once, whatever it is."""

    WAITING = "waiting"
    SENT = "sent"
    STORED = "stored"
    "The node had it before the rule was made."
    LIMITED = "limited"
    "The sender had too many for the client."
    DEVICE_LIMITED = "device_limited"
    "All senders together had too many for the device."
    REVOKED = "revoked"
    "The rule, or the subscription, was gone before the push was sent."
    EXPIRED = "expired"
    LATE = "late"
    "A call that could not be sent at once."
    FAILED = "failed"
    UNKNOWN = "unknown"
    "The server ended between the push and its answer."


DROPPED = frozenset({Outcome.STORED, Outcome.LIMITED, Outcome.DEVICE_LIMITED})
"Decided when the statement came; there may be many, so a device has at most `MAX_DROPPED` of them."


REGISTRATION_SECONDS = 3600
"In which a device that was registered shows its code."


class Purged(NamedTuple):
    """Rows that nobody needs any more."""

    rows: int = 0
    expired: int = 0
    "Pushes whose statements expired before they were sent."
    unrenewed: int = 0
    "Subscriptions of clients that were not heard of for long."


class PushLimits(NamedTuple):
    """What the gateway allows beyond the limit of each sender."""

    per_minute: int = 120
    "Pushes of one device, whoever the senders are."
    call_age: float = 30.0
    "Seconds after which a call is not sent any more."


DEFAULT_LIMITS = PushLimits()


@hides_bytes
class ReceivedStatement(NamedTuple):
    """A genuine statement that has not expired. Do not print."""

    encoded: bytes
    sender: bytes
    topics: tuple[bytes, ...]
    data: bytes
    expires_at: int
    expiry: bytes = b""
    "As the statement has it."
    signature: bytes = b""
    is_stored: bool = False
    "The node had it when its topics were subscribed."
    received_at: float = math.inf
    "It came to the node at this time at the earliest; later than now: now."

    @property
    def statement_hash(self) -> bytes:
        """Computed when it is asked for: most statements are for nobody."""
        return statement_hash(self.encoded)


@hides_bytes
class Match(NamedTuple):
    """A rule that a statement meets."""

    rule: Rule
    key: GatewayKey
    subscription_id: bytes
    client_id: bytes
    device_id: bytes
    is_settled: bool
    "What the node stored before the rule was made is known."
    made_at: float
    "When the rule was made."


Pair = tuple[bytes, bytes]
"Sender and client: whom the limit is for."


@hides_bytes
class BatchPage(NamedTuple):
    """How far a batch of statements is: one may be for more subscriptions than a transaction should hold."""

    done: int = 0
    "So many statements are."
    after: GatewayKey = GatewayKey(0)
    "The next one is up to here;"
    told: int = 0
    "it was for so many subscriptions so far,"
    decided: Mapping[tuple[Pair, bytes], bool] = MappingProxyType({})
    "and this is what the limit said to it, by statement hash: it counts once for a client."


FIRST_PAGE = BatchPage()


class Accepted(NamedTuple):
    """What became of a page of statements."""

    pushes: Sequence[PushKey]
    limited: int = 0
    "Notifications of a sender to a client beyond the limit."
    repeated: int = 0
    "Pushes made before."
    cut: int = 0
    "Statements for more subscriptions than one may be for: the rest hears nothing."
    following: BatchPage | None = None
    "Where to go on; None: that was all."
    device_limited: int = 0
    "Pushes to a device beyond its limit."
    stored: int = 0
    "Statements that the node had before the rule was made."


@hides_bytes
@dataclass(frozen=True, slots=True, kw_only=True)
class StatementPush:
    """One push to be made."""

    key: PushKey
    subscription_key: GatewayKey
    subscription_id: bytes
    client_id: bytes
    statement_hash: bytes
    channel: Channel
    is_call: bool
    device_token: DeviceToken = field(repr=False)
    sender: bytes
    topic: bytes
    data: bytes = field(repr=False)
    received_at: float
    signature: bytes = field(repr=False)
    expiry: bytes
    is_proven: bool
    "The device took a push before."

    @property
    def is_for_call(self) -> bool:
        return self.is_call or self.channel is Channel.VOIP

    @property
    def token_id(self) -> bytes:
        """What stands for the device in a journal."""
        return self.subscription_id


class Claim(NamedTuple):
    """What is to be done about pushes that are about to be sent."""

    claimed: frozenset[PushKey] = frozenset()
    changed: frozenset[PushKey] = frozenset()
    "Another rule allows them by now: read them again."
    dropped: Mapping[PushKey, Outcome] = MappingProxyType({})
    "Never sent."


class GatewayCounts(NamedTuple):
    """How much the gateway keeps."""

    subscriptions: Mapping[Channel, int]
    rules: int
    topics: int
    waiting: int
    "Pushes to be made."
    heard_at: float | None
    "When a daemon was last connected to the node; None: never."


class OutcomeCount(NamedTuple):
    channel: Channel | None
    "None: the subscription is deleted."
    outcome: Outcome
    statements: int


@hides_bytes
class PushRecord(NamedTuple):
    """What is remembered of a push: for audits, and so that it is made once."""

    subscription_id: bytes
    statement_hash: bytes
    sender: bytes
    topic: bytes
    accepted_at: int
    sent_at: int | None
    "When its provider took it."
    outcome: Outcome
