"""Connections and queues as the store keeps them: a column for each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.addresses import SmpServer
from protocol.agent.integrity import LastMessage
from protocol.agent.messages import QueueAddress
from protocol.agent.ratchet_sync import SyncState
from protocol.crypto import AuthPublicKey, Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import EntityId
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueUri
from protocol.smp_messages import QueueMode, SmpCommand
from smp_client.requests import Request


class ConnectionKind(StrEnum):
    NEW = "new"
    "No queues yet."
    RCV = "rcv"
    "Made a link, nobody has joined."
    SND = "snd"
    "Joining, without a queue for answers yet."
    DUPLEX = "duplex"
    CONTACT = "contact"
    "An address that others send requests to."


class QueueStatus(StrEnum):
    NEW = "new"
    CONFIRMED = "confirmed"
    SECURED = "secured"
    ACTIVE = "active"


class RcvSwitch(StrEnum):
    """How far the replacement of a receive queue is."""

    STARTED = "switch_started"
    SENDING_QADD = "sending_qadd"
    SENDING_QUSE = "sending_quse"
    RECEIVED_MESSAGE = "received_message"


class SndSwitch(StrEnum):
    """How far the replacement of a send queue is."""

    SENDING_QKEY = "sending_qkey"
    SENDING_QTEST = "sending_qtest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    connection_id: int
    kind: ConnectionKind
    agent_version: int
    pq_support: bool
    sync_state: SyncState
    last_rcv_id: int
    last_rcv_hash: bytes = field(repr=False)
    last_snd_id: int
    last_snd_hash: bytes = field(repr=False)
    deleted: bool
    wants_notifications: bool
    joined: bool = False
    "The other side made the link."
    sync_rounds: int = 0
    "Synchronisations that were started again by themselves, since the ratchet last worked."
    sync_due: int | None = None
    "When the next of them is to be started."
    sync_keys: bytes | None = field(default=None, repr=False)
    "The peer's keys, if they are to be answered then."

    @property
    def last_received(self) -> LastMessage:
        return LastMessage(self.last_rcv_id, self.last_rcv_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What both sides of a queue have."""

    queue_id: int
    connection_id: int
    server: SmpServer
    sender_id: EntityId = field(repr=False)
    e2e_key: X25519PrivateKey
    status: QueueStatus
    client_version: int
    mode: QueueMode | None
    is_primary: bool
    replaces: int | None

    @property
    def address(self) -> QueueAddress:
        return QueueAddress(self.server, self.sender_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveQueue(Queue):
    recipient_id: EntityId = field(repr=False)
    recipient_key: Ed25519PrivateKey
    router_secret: bytes = field(repr=False)
    e2e_secret: bytes | None = field(repr=False)
    "Agreed with the sender; missing until the first message."
    sender_key: AuthPublicKey | None = field(repr=False)
    "For KEY, if the sender cannot secure the queue."
    switch: RcvSwitch | None
    deleting: bool
    service_id: EntityId | None = field(default=None, repr=False)
    "Which service of ours the router counts it to."

    def request(self, command: SmpCommand) -> Request[SmpCommand]:
        """As the recipient."""
        return Request(self.recipient_id, command, self.recipient_key)

    @property
    def uri(self) -> QueueUri:
        """For whoever is to send."""
        return QueueUri(SMP_CLIENT_VERSIONS, self.server, self.sender_id, self.e2e_key.public, self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendQueue(Queue):
    auth_key: X25519PrivateKey
    "Authenticators made with it can be denied, signatures could not."
    e2e_secret: bytes = field(repr=False)
    switch: SndSwitch | None
    continued_at: int | None = None
    "When the recipient last said that it reads again."

    @property
    def sender_secures(self) -> bool:
        return self.mode is QueueMode.MESSAGING
