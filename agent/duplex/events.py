"""What the agent tells the application."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.addresses import SmpServer
from protocol.agent.integrity import Integrity
from protocol.agent.ratchet_sync import SyncState
from protocol.smp_messages import QueueSet


@dataclass(frozen=True, slots=True)
class Confirmed:
    """CONF: somebody joined the link; `allow` lets them in."""

    connection_id: int
    info: bytes = field(repr=False)
    pq_support: bool


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """INFO: what the creator of the link says of himself."""

    connection_id: int
    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Connected:
    """CON: both sides can write."""

    connection_id: int
    pq: bool


@dataclass(frozen=True, slots=True)
class ContactRequested:
    """REQ: somebody wrote to the address; `accept` or `reject`."""

    connection_id: int
    invitation_id: int
    info: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """MSG: `ack` it when it is dealt with; until then no other message of the connection comes."""

    connection_id: int
    message_id: int
    "Local, of all messages of the connection."
    sender_message_id: int
    broker_ts: int
    integrity: Integrity
    body: bytes = field(repr=False)
    pq: bool


@dataclass(frozen=True, slots=True)
class ReceiptsReceived:
    """RCVD: the peer's agent or application has our messages; `ack` it too."""

    connection_id: int
    message_id: int
    receipts: tuple[tuple[int, bool], ...]
    "Local ids of our messages, and whether the peer saw what we sent."


@dataclass(frozen=True, slots=True)
class MessageSent:
    """SENT: the router has it."""

    connection_id: int
    message_id: int


@dataclass(frozen=True, slots=True)
class MessageFailed:
    """MERR: it will not be sent."""

    connection_id: int
    message_id: int
    error: str


@dataclass(frozen=True, slots=True)
class MessageDelayed:
    """MWARN: it is tried again for some time."""

    connection_id: int
    message_id: int
    error: str


@dataclass(frozen=True, slots=True)
class QueueContinued:
    """QCONT: the peer reads again."""

    connection_id: int


@dataclass(frozen=True, slots=True)
class SwitchProgress:
    """SWITCH: a queue is being replaced; of ours if `receiving`."""

    connection_id: int
    receiving: bool
    phase: str


@dataclass(frozen=True, slots=True)
class RatchetSync:
    """RSYNC: whether messages can be read; `sync` helps if it is allowed or required."""

    connection_id: int
    state: SyncState
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """ERR: something about a connection did not work."""

    connection_id: int
    error: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """The connection is gone, here and at the routers."""

    connection_id: int


@dataclass(frozen=True, slots=True)
class ServerUp:
    server: SmpServer
    connection_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerDown:
    server: SmpServer
    connection_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubscriptionEnded:
    """END: another client took over a queue of the connection."""

    connection_id: int


@dataclass(frozen=True, slots=True)
class ServiceUp:
    """SERVICE_UP: the queues of our service are subscribed, all at once."""

    server: SmpServer
    queues: QueueSet
    "What the router had; if that was not what we have, ours were subscribed one by one first."
    as_expected: bool


@dataclass(frozen=True, slots=True)
class ServiceDown:
    """SERVICE_DOWN: the connection to the router is lost, and comes back by itself."""

    server: SmpServer
    queues: QueueSet


@dataclass(frozen=True, slots=True)
class ServiceAll:
    """SERVICE_ALL: the router has sent what it kept of each queue of our service."""

    server: SmpServer


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """SERVICE_END: another client took over all queues of our service."""

    server: SmpServer
    queues: QueueSet


ServiceEvent = ServiceUp | ServiceDown | ServiceAll | ServiceEnd


@dataclass(frozen=True, slots=True)
class Fetched:
    """Nothing more waits in the queues that pushes told of; a device may sleep again."""


Event = (
    Confirmed
    | PeerInfo
    | Connected
    | ContactRequested
    | MessageReceived
    | ReceiptsReceived
    | MessageSent
    | MessageFailed
    | MessageDelayed
    | QueueContinued
    | SwitchProgress
    | RatchetSync
    | Failed
    | Deleted
    | ServerUp
    | ServerDown
    | SubscriptionEnded
    | ServiceEvent
    | Fetched
)
