"""A message of a router: what it is worth, in one transaction; and when the application has dealt with it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any, get_args

from agent.duplex import handshake, rotation, synchronisation
from agent.duplex.defects import survive
from agent.duplex.events import Failed, MessageReceived, QueueContinued, ReceiptsReceived
from agent.duplex.message_kinds import MessageKind
from agent.duplex.outgoing import (
    MAX_ANSWERS,
    connected,
    queue_message,
    send_when_possible,
    waiting_answers,
)
from agent.duplex.ratchets import is_seen, ratchet_of, seen_before, unseal
from agent.duplex.records import Connection, ConnectionKind, QueueStatus, ReceiveQueue
from agent.duplex.store import Tx, insert
from agent.duplex.tables import (
    connection,
    find_address,
    next_local_id,
    receive_queue,
    receive_queue_of,
    receive_queues,
    send_queues,
    set_connection,
    set_receive_queue,
    set_send_queue,
)
from agent.errors import (
    A_DUPLICATE,
    A_MESSAGE,
    A_PROHIBITED,
    A_VERSION,
    INTERNAL,
    AgentError,
    NoConnection,
    PeerFault,
    Prohibited,
)
from protocol.addresses import SmpServer
from protocol.agent import integrity as chain
from protocol.agent.envelopes import (
    AgentEnvelope,
    ConfirmationEnvelope,
    InvitationEnvelope,
    MessageEnvelope,
    RatchetKeyEnvelope,
    decode_agent_envelope,
    decode_body,
)
from protocol.agent.errors import DuplicateMessage, KemStateError, RatchetError
from protocol.agent.messages import (
    AGENT_MESSAGE,
    Hello,
    Numbered,
    QueueAdd,
    QueueAddress,
    QueueContinue,
    QueueKeys,
    QueuesUse,
    QueueTest,
    RatchetReady,
    Receipt,
    Receipts,
    UserMessage,
    message_hash,
)
from protocol.agent.ratchet_sync import SyncState
from protocol.agent.versions import AGENT_RECEIPTS, AGENT_VERSIONS, acceptable
from protocol.crypto import BoxError, sha256
from protocol.encoding import EntityId
from protocol.errors import DecodeError
from protocol.messages_crypto import QuotaExceeded, RcvMessage, open_message
from protocol.queue_uri import SMP_CLIENT_VERSIONS
from protocol.smp_messages import Msg

ENCRYPTED = "encrypted"
"Kind of hash: of messages as the ratchet made them."
DECRYPT_CB = "A_CRYPTO DECRYPT_CB"
"The box of a queue does not open."
_USER, _USER_PQ, _RECEIPTS = b"M", b"P", b"V"
"First byte of stored content."
MAX_REDELIVERIES = 8
REDELIVERY_TIME = 86400


def receive(tx: Tx, server: SmpServer, recipient_id: EntityId, msg: Msg) -> ReceiveQueue | None:
    """The queue, if the message is to be acknowledged now; otherwise the application does it."""
    queue = receive_queue_of(tx.db, server, recipient_id)
    if queue is None:
        return None
    try:
        conn = connection(tx.db, queue.connection_id)
    except NoConnection:
        return queue  # it is being deleted
    try:
        with tx.attempt():
            return queue if _receive(tx, conn, queue, msg) else None
    except DecodeError:
        _report(tx, conn, A_MESSAGE)
    except (PeerFault, AgentError) as error:
        _report(tx, conn, _words(error))
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.IntegrityError):
            raise  # it could not be stored: the router keeps it
        _defect(tx, conn, error)
    except Exception as error:
        _defect(tx, conn, error)
    return queue


def _defect(tx: Tx, conn: Connection, error: Exception) -> None:
    """The message that shows it is acknowledged, or its router would send nothing else."""
    survive(error, "a received message")
    _report(tx, conn, INTERNAL)


def _receive(tx: Tx, conn: Connection, queue: ReceiveQueue, msg: Msg) -> bool:
    """True if it is to be acknowledged now."""
    content = open_message(queue.router_secret, msg.message_id, msg.body)
    if isinstance(content, QuotaExceeded):
        may_answer = waiting_answers(tx, conn.connection_id) < MAX_ANSWERS
        if conn.kind is ConnectionKind.DUPLEX and may_answer:
            send_when_possible(tx, conn, QueueContinue(queue.address))
        # If ours are full too, QCONT waits behind what they do not take, and the peer's behind his: try them.
        tx.hurried |= tx.deliveries
        return True
    set_receive_queue(tx, queue.queue_id, last_broker_ts=content.timestamp, last_broker_id=msg.message_id)
    body = decode_body(content.body)
    if not acceptable(body.client_version, SMP_CLIENT_VERSIONS, queue.client_version):
        raise PeerFault(A_VERSION)
    secret = queue.e2e_secret if body.dh_key is None else queue.e2e_key.exchange(body.dh_key)
    if secret is None:
        raise PeerFault(A_PROHIBITED, "message before confirmation")
    try:
        message = body.open(secret)
    except BoxError as error:
        return _unreadable(tx, conn, sha256(content.body), error)
    envelope = decode_agent_envelope(message.envelope)
    if body.dh_key is None:
        return _with_secret(tx, conn, queue, msg, content, envelope)
    if isinstance(envelope, ConfirmationEnvelope):
        if queue.e2e_secret is None:
            handshake.confirmation_received(tx, conn, queue, secret, body.client_version, message, envelope)
        return True  # of a repeated delivery there is nothing new
    if isinstance(envelope, InvitationEnvelope) and queue.e2e_secret is None:
        handshake.request_received(tx, conn, envelope)
        return True
    raise PeerFault(A_PROHIBITED, "message with a key")


def _with_secret(
    tx: Tx, conn: Connection, queue: ReceiveQueue, msg: Msg, content: RcvMessage, envelope: AgentEnvelope
) -> bool:
    if isinstance(envelope, MessageEnvelope) and conn.kind in (ConnectionKind.RCV, ConnectionKind.DUPLEX):
        return _ratchet_message(tx, conn, queue, msg, content, envelope)
    if isinstance(envelope, RatchetKeyEnvelope):
        synchronisation.keys_received(tx, _upgraded(tx, conn, envelope.agent_version), envelope)
        return True
    raise PeerFault(A_PROHIBITED, "envelope")


# Messages of the ratchet


def _ratchet_message(
    tx: Tx, conn: Connection, queue: ReceiveQueue, msg: Msg, content: RcvMessage, envelope: MessageEnvelope
) -> bool:
    ratchet = ratchet_of(tx.db, conn.connection_id)
    if ratchet is None:
        raise PeerFault(A_PROHIBITED, "message before confirmation")
    digest = sha256(envelope.ratchet_message)
    try:
        done = unseal(tx, conn.connection_id, ratchet, envelope.ratchet_message)
    except RatchetError as error:
        return _not_opened(tx, conn, queue, msg, digest, error)
    if done.error is not None:
        return _not_opened(tx, conn, queue, msg, digest, done.error)
    seen_before(tx, conn.connection_id, ENCRYPTED, digest)
    conn = _upgraded(tx, conn, envelope.agent_version)
    _synchronised(tx, conn)
    try:
        message = AGENT_MESSAGE.decode(done.plaintext)
    except DecodeError:
        return _report(tx, conn, A_MESSAGE)
    if not isinstance(message, Numbered):
        return _report(tx, conn, f"{A_PROHIBITED} message")
    result = chain.check_integrity(conn.last_received, message.message_id, message.previous_hash)
    own_hash = message_hash(done.plaintext)
    set_connection(tx, conn.connection_id, last_rcv_id=message.message_id, last_rcv_hash=own_hash)
    if queue.status is not QueueStatus.ACTIVE and not isinstance(message.message, Hello):
        set_receive_queue(tx, queue.queue_id, status=QueueStatus.ACTIVE)
    if queue.replaces is not None:
        rotation.used(tx, conn, queue)
    received = Incoming(
        conn=connection(tx.db, conn.connection_id),
        queue=queue,
        msg=msg,
        content=content,
        numbered=message,
        own_hash=own_hash,
        integrity=result,
        pq=done.ratchet.rcv_kem,
        answers_ready=ratchet.snd is None,
    )
    try:
        with tx.attempt():
            return received.take(tx)
    except (PeerFault, AgentError) as error:  # the ratchet has moved on all the same
        return _report(tx, conn, _words(error))


def _words(error: PeerFault | AgentError) -> str:
    """Of the peer's fault; or we cannot answer it: not now, or not in one message."""
    return str(error) if isinstance(error, PeerFault) else f"{A_PROHIBITED} {error}"


def _report(tx: Tx, conn: Connection, error: str) -> bool:
    tx.events.append(Failed(conn.connection_id, error))
    return True


def _upgraded(tx: Tx, conn: Connection, theirs: int) -> Connection:
    """The agreed version only ever rises."""
    version = min(theirs, AGENT_VERSIONS.max)
    if version > conn.agent_version:
        set_connection(tx, conn.connection_id, agent_version=version)
        return connection(tx.db, conn.connection_id)
    return conn


def _synchronised(tx: Tx, conn: Connection) -> None:
    state = conn.sync_state.after_success()
    if state is SyncState.STARTED:
        synchronisation.not_synchronised(tx, conn)
    if state is not conn.sync_state:
        synchronisation.enter(tx, conn.connection_id, state)
        if conn.sync_state is SyncState.AGREED:
            rotation.send_again(tx, conn.connection_id)


def _not_opened(
    tx: Tx, conn: Connection, queue: ReceiveQueue, msg: Msg, digest: bytes, error: RatchetError
) -> bool:
    if isinstance(error, DuplicateMessage):
        return _duplicate(tx, conn, queue, msg, digest)
    if isinstance(error, KemStateError):
        return _report(tx, conn, error.word)
    return _unreadable(tx, conn, digest, error)


def _unreadable(tx: Tx, conn: Connection, digest: bytes, error: Exception) -> bool:
    """May ask for a new ratchet, but not twice for the same message."""
    if seen_before(tx, conn.connection_id, ENCRYPTED, digest):
        return True
    word = error.word if isinstance(error, RatchetError) else DECRYPT_CB
    synchronisation.not_synchronised(tx, conn)
    state = conn.sync_state.after_error(error)
    if state is SyncState.REQUIRED and conn.sync_state.may_send and _is_moving(tx, conn):
        state = SyncState.ALLOWED
    if state is not conn.sync_state and conn.kind is ConnectionKind.DUPLEX:
        synchronisation.enter(tx, conn.connection_id, state, word)
    return _report(tx, conn, word)


def _is_moving(tx: Tx, conn: Connection) -> bool:
    """The peer can use two of our queues: by the one, a new ratchet may overtake messages in the other."""
    usable = (QueueStatus.SECURED, QueueStatus.ACTIVE)
    return sum(queue.status in usable for queue in receive_queues(tx.db, conn.connection_id)) > 1


def _duplicate(tx: Tx, conn: Connection, queue: ReceiveQueue, msg: Msg, digest: bytes) -> bool:
    """The router repeats what was not acknowledged."""
    sql = "SELECT * FROM received_messages WHERE connection_id = ? ORDER BY local_id DESC LIMIT 1"
    row = tx.db.execute(sql, (conn.connection_id,)).fetchone()
    if row is None or row["broker_id"] != msg.message_id or row["queue_id"] != queue.queue_id:
        known = is_seen(tx, conn.connection_id, ENCRYPTED, digest)
        return True if known else _report(tx, conn, A_DUPLICATE)
    if row["is_acked"]:
        return True
    attempts = row["attempts"] + 1
    if attempts > MAX_REDELIVERIES and tx.now - row["received_at"] > REDELIVERY_TIME:
        return _report(tx, conn, f"{A_DUPLICATE} {attempts} attempts")
    sql = "UPDATE received_messages SET attempts = ? WHERE connection_id = ? AND local_id = ?"
    tx.db.execute(sql, (attempts, conn.connection_id, row["local_id"]))
    tx.events.append(_event(row))
    return False


# Kinds of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A message that opened, with all that belongs to it."""

    conn: Connection
    queue: ReceiveQueue
    msg: Msg
    content: RcvMessage
    numbered: Numbered
    own_hash: bytes = field(repr=False)
    integrity: chain.Integrity
    pq: bool
    answers_ready: bool

    def take(self, tx: Tx) -> bool:
        """True if it is to be acknowledged now."""
        conn, message = self.conn, self.numbered.message
        match message:
            case UserMessage(body):
                self._keep(tx, (_USER_PQ if self.pq else _USER) + body)
                return False
            case Receipts():
                found = [self._receipt(tx, r.message_id, r.message_hash) for r in message.receipts]
                receipts = [receipt for receipt in found if receipt is not None]
                if not receipts:
                    return True
                self._keep(tx, _RECEIPTS + json.dumps(receipts).encode())
                return False
            case Hello():
                _hello(tx, conn, self.queue)
            case QueueContinue(address):
                _continue(tx, conn, address)
            case QueueAdd():
                rotation.queue_offered(tx, conn, message)
            case QueueKeys():
                rotation.keys_received(tx, conn, self.queue, message)
            case QueuesUse():
                rotation.queue_usable(tx, conn, message)
            case QueueTest():
                pass  # that it came on the new queue is all it says
            case RatchetReady():
                if self.answers_ready:
                    synchronisation.ready(tx, conn)
        return True

    def _keep(self, tx: Tx, content: bytes) -> None:
        """It waits for the application, which is told; those it has dealt with go."""
        connection_id = self.conn.connection_id
        tx.db.execute("DELETE FROM received_messages WHERE connection_id = ? AND is_acked", (connection_id,))
        row = {
            "connection_id": connection_id,
            "local_id": next_local_id(tx, connection_id),
            "queue_id": self.queue.queue_id,
            "broker_id": self.msg.message_id,
            "broker_ts": self.content.timestamp,
            "message_id": self.numbered.message_id,
            "message_hash": self.own_hash,
            "content": content,
            "integrity": _integrity_text(self.integrity),
            "received_at": tx.now,
        }
        insert(tx.db, "received_messages", **row)
        tx.events.append(_event(row))

    def _receipt(self, tx: Tx, message_id: int, digest: bytes) -> tuple[int, bool] | None:
        """(local id of our message, whether the peer saw what we sent); None if it is known already."""
        sql = "SELECT * FROM sent_messages WHERE connection_id = ? AND message_id = ?"
        row = tx.db.execute(sql, (self.conn.connection_id, message_id)).fetchone()
        if row is None or row["receipt"] == "ok":
            return None
        if row["kind"] != MessageKind.USER:
            _report(tx, self.conn, f"{A_PROHIBITED} receipt")
            return None
        same = row["message_hash"] == digest
        sql = "UPDATE sent_messages SET receipt = ? WHERE connection_id = ? AND local_id = ?"
        tx.db.execute(sql, ("ok" if same else "bad hash", self.conn.connection_id, row["local_id"]))
        return row["local_id"], same


def _hello(tx: Tx, conn: Connection, queue: ReceiveQueue) -> None:
    """The last step of a handshake whose queues are secured by their recipients."""
    if queue.status is QueueStatus.ACTIVE:
        raise PeerFault(A_PROHIBITED, "HELLO")
    set_receive_queue(tx, queue.queue_id, status=QueueStatus.ACTIVE)
    sql = "SELECT 1 FROM sent_messages WHERE connection_id = ? AND kind = ?"
    sending = send_queues(tx.db, conn.connection_id)
    if sending and sending[0].status is QueueStatus.ACTIVE:
        connected(tx, conn.connection_id)
    elif tx.db.execute(sql, (conn.connection_id, MessageKind.HELLO)).fetchone() is None:
        queue_message(tx, conn, Hello())


def _continue(tx: Tx, conn: Connection, address: QueueAddress) -> None:
    """Our queue there has room again; if it was replaced in the meantime, there is nothing to be told."""
    queue = find_address(send_queues(tx.db, conn.connection_id), address)
    if queue is not None:
        set_send_queue(tx, queue.queue_id, continued_at=tx.now)
        tx.deliveries.add(queue.queue_id)
        tx.hurried.add(queue.queue_id)
        tx.events.append(QueueContinued(conn.connection_id))


_INTEGRITY: dict[str, Any] = {kind.__name__: kind for kind in get_args(chain.Integrity)}


def _integrity_text(value: chain.Integrity) -> str:
    numbers = [getattr(value, name) for name in value.__slots__]
    return json.dumps([type(value).__name__, *numbers])


def unacknowledged(db: sqlite3.Connection) -> list[MessageReceived | ReceiptsReceived]:
    """What an earlier run told an application that has not dealt with it."""
    sql = (
        "SELECT m.* FROM received_messages m JOIN connections c USING (connection_id)"
        " WHERE NOT m.is_acked AND NOT c.deleted ORDER BY connection_id, local_id"
    )
    return [_event(row) for row in db.execute(sql)]


def _event(row: Any) -> MessageReceived | ReceiptsReceived:
    """What the application is told of a stored message, the first time and again."""
    tag, content = row["content"][:1], row["content"][1:]
    if tag == _RECEIPTS:
        receipts = tuple((local_id, same) for local_id, same in json.loads(content))
        return ReceiptsReceived(row["connection_id"], row["local_id"], receipts)
    name, *numbers = json.loads(row["integrity"])
    return MessageReceived(
        row["connection_id"],
        row["local_id"],
        row["message_id"],
        row["broker_ts"],
        _INTEGRITY[name](*numbers),
        content,
        tag == _USER_PQ,
    )


def acknowledge(
    tx: Tx, connection_id: int, local_id: int, receipt: bytes | None
) -> tuple[ReceiveQueue | None, bytes]:
    """Mark it, queue the receipt if one is wanted, and say what to tell the router.

    The queue that brought it may be gone: it was replaced in the meantime.
    """
    conn = connection(tx.db, connection_id)
    sql = "SELECT * FROM received_messages WHERE connection_id = ? AND local_id = ? AND NOT is_acked"
    row = tx.db.execute(sql, (connection_id, local_id)).fetchone()
    if row is None:
        raise Prohibited("there is no such message")
    sql = "UPDATE received_messages SET is_acked = 1, content = x'' WHERE connection_id = ? AND local_id = ?"
    tx.db.execute(sql, (connection_id, local_id))
    is_message = row["content"][:1] in (_USER, _USER_PQ)
    if receipt is not None and is_message and conn.agent_version >= AGENT_RECEIPTS:
        receipts = Receipts((Receipt(row["message_id"], row["message_hash"], receipt),))
        send_when_possible(tx, conn, receipts)
    return receive_queue(tx.db, row["queue_id"]), row["broker_id"]
