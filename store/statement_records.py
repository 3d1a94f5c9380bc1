"""Rows of the statement gateway as values. Tokens and data are never part of a repr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, NewType

from protocol.device_token import DeviceToken
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


class Rule(NamedTuple):
    """Whose statements about what are pushed."""

    sender: bytes
    topic: bytes


class SignedRequest(NamedTuple):
    """A signed request, which counts once; after `valid_until` its time alone has it refused."""

    request_id: bytes
    valid_until: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySubscription(NewGatewaySubscription):
    key: GatewayKey
    updated_at: int
    rules: tuple[Rule, ...]


class Refusal(Enum):
    REPLAYED = "this request was made before"
    UNKNOWN = "the client has no such subscription"
    QUOTA = "the client has as many as it may"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCaps:
    """How many rows one client may have."""

    subscriptions_per_client: int = 32
    rules_per_subscription: int = 10_000


DEFAULT_GATEWAY_CAPS = GatewayCaps()


class ReceivedStatement(NamedTuple):
    """A genuine statement that has not expired. Do not print."""

    encoded: bytes
    sender: bytes
    topics: tuple[bytes, ...]
    data: bytes
    expires_at: int

    @property
    def statement_hash(self) -> bytes:
        """Computed when it is asked for: most statements are for nobody."""
        return statement_hash(self.encoded)


class Match(NamedTuple):
    """A rule that a statement meets."""

    rule: Rule
    key: GatewayKey
    subscription_id: bytes
    client_id: bytes


Pair = tuple[bytes, bytes]
"Sender and client: whom the limit is for."


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementPush:
    """One push to be made."""

    key: PushKey
    subscription_key: GatewayKey
    subscription_id: bytes
    statement_hash: bytes
    channel: Channel
    is_call: bool
    device_token: DeviceToken = field(repr=False)
    sender: bytes
    topic: bytes
    data: bytes = field(repr=False)
    received_at: int

    @property
    def token_id(self) -> bytes:
        """What stands for the device in a journal."""
        return self.subscription_id


class PushRecord(NamedTuple):
    """What is remembered of a push: for audits, and so that it is made once."""

    subscription_id: bytes
    statement_hash: bytes
    sender: bytes
    topic: bytes
    accepted_at: int
    sent_at: int | None
    "When its provider took it."
