"""What the agent tells the application."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.addresses import SmpServer
from protocol.agent.integrity import Integrity
from protocol.agent.ratchet_sync import SyncState
from protocol.smp_messages import QueueSet


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all."""


@dataclass(frozen=True, slots=True)
class ConnectionEvent(Event):
    connection_id: int


@dataclass(frozen=True, slots=True)
class ServerEvent(Event):
    server: SmpServer


@dataclass(frozen=True, slots=True)
class ServiceEvent(ServerEvent):
    """About the queues of our service there."""


@dataclass(frozen=True, slots=True)
class Confirmed(ConnectionEvent):
    """CONF: somebody joined the link; `allow` lets them in."""

    info: bytes = field(repr=False)
    pq_support: bool


@dataclass(frozen=True, slots=True)
class LinkReady(ConnectionEvent):
    """The queue of a prepared link exists: from now on the link works."""


@dataclass(frozen=True, slots=True)
class PeerInfo(ConnectionEvent):
    """INFO: what the creator of the link says of himself."""

    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Connected(ConnectionEvent):
    """CON: both sides can write."""

    pq: bool


@dataclass(frozen=True, slots=True)
class ContactRequested(ConnectionEvent):
    """REQ: somebody wrote to the address; `accept` or `reject`."""

    invitation_id: int
    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MessageReceived(ConnectionEvent):
    """MSG: `ack` it when it is dealt with; until then no other message of the connection comes."""

    message_id: int
    "Local, of all messages of the connection."
    sender_message_id: int
    broker_ts: int
    integrity: Integrity
    body: bytes = field(repr=False)
    pq: bool


@dataclass(frozen=True, slots=True)
class ReceiptsReceived(ConnectionEvent):
    """RCVD: the peer's agent or application has our messages; `ack` it too."""

    message_id: int
    receipts: tuple[tuple[int, bool], ...]
    "Local ids of our messages, and whether the peer saw what we sent."


@dataclass(frozen=True, slots=True)
class MessageSent(ConnectionEvent):
    """SENT: the router has it."""

    message_id: int


@dataclass(frozen=True, slots=True)
class MessageFailed(ConnectionEvent):
    """MERR: it will not be sent."""

    message_id: int
    error: str


@dataclass(frozen=True, slots=True)
class MessageDelayed(ConnectionEvent):
    """MWARN: it is tried again for some time."""

    message_id: int
    error: str


@dataclass(frozen=True, slots=True)
class QueueContinued(ConnectionEvent):
    """QCONT: the peer reads again."""


@dataclass(frozen=True, slots=True)
class SwitchProgress(ConnectionEvent):
    """SWITCH: a queue is being replaced; of ours if `receiving`."""

    receiving: bool
    phase: str


@dataclass(frozen=True, slots=True)
class RatchetSync(ConnectionEvent):
    """RSYNC: whether messages can be read; `sync` helps if it is allowed or required."""

    state: SyncState
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Failed(ConnectionEvent):
    """ERR: something about a connection did not work."""

    error: str


@dataclass(frozen=True, slots=True)
class Deleted(ConnectionEvent):
    """The connection is gone, here and at the routers."""


@dataclass(frozen=True, slots=True)
class ServerUp(ServerEvent):
    connection_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerDown(ServerEvent):
    connection_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubscriptionEnded(ConnectionEvent):
    """END: another client took over a queue of the connection."""


@dataclass(frozen=True, slots=True)
class QueueDeleted(ConnectionEvent):
    """DELD: the router has deleted a queue of the connection, not at our request."""

    is_replaced: bool
    "Another queue is there, or is being made. Otherwise no message of the peer arrives any more."


@dataclass(frozen=True, slots=True)
class ServiceUp(ServiceEvent):
    """SERVICE_UP: the queues of our service are subscribed, all at once."""

    queues: QueueSet
    "What the router had."
    expected: QueueSet
    "What we had; if the router had others, ours were subscribed one by one first."
    as_expected: bool


@dataclass(frozen=True, slots=True)
class ServiceDown(ServiceEvent):
    """SERVICE_DOWN: the connection to the router is lost, and comes back by itself."""

    queues: QueueSet


@dataclass(frozen=True, slots=True)
class ServiceAll(ServiceEvent):
    """SERVICE_ALL: the router has sent what it kept of each queue of our service."""


@dataclass(frozen=True, slots=True)
class ServiceEnd(ServiceEvent):
    """SERVICE_END: another client took over all queues of our service."""

    queues: QueueSet


@dataclass(frozen=True, slots=True)
class Fetched(Event):
    """Nothing more waits in the queues that pushes told of; a device may sleep again."""
