"""What the agent keeps: one class per row. Keys and ids never show in a repr."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.addresses import NtfServer, SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey, X25519PublicKey
from protocol.device_token import DeviceToken
from protocol.encoding import EntityId
from protocol.statuses import TokenStatus

MIN_PERIOD = 20
"Minutes: the server refuses less."
MAX_PERIOD = 2**16 - 1


class Mode(StrEnum):
    """How the device hears of messages."""

    INSTANT = "instant"
    "A push for every message: the notification server watches the queues."
    PERIODIC = "periodic"
    "A push now and then: the device looks for itself, nobody watches the queues."


class TokenAction(StrEnum):
    """What is to be done next about the token; none: wait for the verification push."""

    REGISTER = "REGISTER"
    VERIFY = "VERIFY"
    CHECK = "CHECK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The registration of this device at a notification server."""

    server: NtfServer
    device_token: DeviceToken
    mode: Mode
    period: int = MIN_PERIOD
    "Minutes between pushes in the periodic mode."
    auth_key: Ed25519PrivateKey
    dh_key: X25519PrivateKey
    token_id: EntityId | None = field(default=None, repr=False)
    dh_secret: bytes | None = field(default=None, repr=False)
    "Opens pushes."
    status: TokenStatus = TokenStatus.NEW
    action: TokenAction | None = TokenAction.REGISTER
    code: bytes | None = field(default=None, repr=False)
    "Set while it is to be sent."
    cron: int | None = None
    "Minutes between periodic pushes as the server knows them; None: it was never told."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedToken:
    """A token that the server does not know yet to be given up."""

    key: int
    server: NtfServer
    token_id: EntityId = field(repr=False)
    auth_key: Ed25519PrivateKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveQueue:
    """The queue of a connection that this agent reads. Until the router answered NEW it has no ids."""

    connection_id: int
    server: SmpServer
    recipient_key: Ed25519PrivateKey
    dh_key: X25519PrivateKey
    "Its secret with the router's key opens the router's encryption of messages."
    e2e_key: X25519PrivateKey
    "Its secret with the sender's key opens the messages themselves."
    recipient_id: EntityId | None = field(default=None, repr=False)
    sender_id: EntityId | None = field(default=None, repr=False)
    router_secret: bytes | None = field(default=None, repr=False)
    sender_key: X25519PublicKey | None = field(default=None, repr=False)
    "The sender's end-to-end key, from its confirmation; no other is accepted afterwards."
    last_number: int = 0
    "Of the newest message; older ones are repetitions."
    last_broker_ts: int | None = None
    "When the router received the newest message."


@dataclass(frozen=True, slots=True, kw_only=True)
class SendQueue:
    """The queue of a connection that this agent writes to."""

    connection_id: int
    server: SmpServer
    sender_id: EntityId = field(repr=False)
    auth_key: X25519PrivateKey
    "Authenticators made with it can be denied, signatures could not."
    e2e_key: X25519PrivateKey
    recipient_key: X25519PublicKey = field(repr=False)
    confirmed: bool = False
    "The confirmation was sealed and stands in the outbox, or was sent."
    secured: bool = False
    last_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A sealed message that the router has not accepted yet."""

    key: int
    connection_id: int
    notification: bool
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message that was received, opened and kept."""

    connection_id: int
    message_id: bytes = field(repr=False)
    broker_ts: int
    number: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What a person needs to know about a connection."""

    connection_id: int
    wants_notifications: bool
    can_receive: bool
    can_send: bool


class SubAction(StrEnum):
    """The next step of a notification subscription; each is stored before it is taken."""

    SMP_KEY = "SMP_KEY"
    "NKEY at the router, with the keys of the row."
    NTF_CREATE = "NTF_CREATE"
    "SNEW at the notification server, with the notifier the router named."
    NTF_CHECK = "NTF_CHECK"
    "SCHK when due."
    SMP_DELETE = "SMP_DELETE"
    "NDEL at the router, then the row goes."


SMP_ACTIONS = (SubAction.SMP_KEY, SubAction.SMP_DELETE)
NTF_ACTIONS = (SubAction.NTF_CREATE, SubAction.NTF_CHECK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The notification side of a receive queue."""

    connection_id: int
    smp_server: SmpServer
    ntf_server: NtfServer
    token_id: EntityId = field(repr=False)
    "For which token it was made: a new token needs new notifiers."
    action: SubAction | None
    "None: given up; `status` says why."
    due: float = 0.0
    notifier_key: Ed25519PrivateKey
    dh_key: X25519PrivateKey
    notifier_id: EntityId | None = field(default=None, repr=False)
    dh_secret: bytes | None = field(default=None, repr=False)
    "Opens the meta of NMSG."
    subscription_id: EntityId | None = field(default=None, repr=False)
    status: str = ""
