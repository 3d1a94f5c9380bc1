"""Messages on their way out: queued with their place in the ratchet, delivered or given up."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.duplex.events import Connected, Failed, MessageDelayed, MessageFailed, MessageSent, SwitchProgress
from agent.duplex.message_kinds import SWITCHING, MessageKind
from agent.duplex.ratchets import SEALER, ratchet_of, seal_next
from agent.duplex.records import Connection, QueueStatus, SendQueue, SndSwitch
from agent.duplex.resending import forget_undeliverable, is_taken, keep_unread, mark_taken, send_unread
from agent.duplex.store import Tx, insert
from agent.duplex.tables import (
    StoredCommand,
    add_command,
    commands_of,
    connection,
    drop_command,
    drop_send_queue,
    next_local_id,
    receive_queues,
    send_queue,
    send_queues,
    set_connection,
    set_send_queue,
)
from agent.errors import A_PROHIBITED, AgentError, MessageTooLarge, PeerFault, Prohibited
from protocol.agent.e2e_params import E2E_PARAMS, E2eParams
from protocol.agent.envelopes import (
    ClientMessage,
    ConfirmationEnvelope,
    MessageEnvelope,
    RatchetKeyEnvelope,
    encode_agent_envelope,
    padded_sizes,
    seal_body,
)
from protocol.agent.errors import NoSendingChain
from protocol.agent.messages import (
    A_MESSAGE,
    AGENT_MESSAGE,
    AgentMessage,
    AMessage,
    ConnectionInfo,
    ConnectionReply,
    Hello,
    Numbered,
    QueueAdd,
    QueueContinue,
    QueueKeys,
    QueuesUse,
    QueueTest,
    RatchetInfo,
    RatchetReady,
    Receipts,
    UserMessage,
    message_hash,
)
from protocol.agent.retry import FAST, SLOW, Retry
from protocol.agent.versions import AGENT_EARLY_RATCHET, AGENT_VERSIONS, E2E_VERSIONS, pq_possible
from protocol.blocks import PAD_LENGTH_SIZE
from protocol.crypto import X25519PrivateKey
from protocol.encoding import Reader, Writer
from protocol.smp_messages import QueueMode, Send

_KINDS: dict[type[Any], MessageKind] = {
    ConnectionReply: MessageKind.CONFIRMATION,
    ConnectionInfo: MessageKind.REPLY,
    RatchetInfo: MessageKind.RATCHET_KEY,
    Hello: MessageKind.HELLO,
    UserMessage: MessageKind.USER,
    Receipts: MessageKind.RECEIPTS,
    QueueContinue: MessageKind.CONTINUE,
    QueueAdd: MessageKind.ADD,
    QueueKeys: MessageKind.KEY,
    QueuesUse: MessageKind.USE,
    QueueTest: MessageKind.TEST,
    RatchetReady: MessageKind.READY,
}
NOTIFYING = {
    MessageKind.CONFIRMATION,
    MessageKind.REPLY,
    MessageKind.RATCHET_KEY,
    MessageKind.HELLO,
    MessageKind.READY,
}
"Kinds that wake the peer's device; for messages of users the application decides."
_QUIET_WHEN_FULL = SWITCHING | {MessageKind.RATCHET_KEY}
"Kinds that wait for room without a word."
MAX_ANSWERS = 100
"To a peer, or because of a router, that wait to be sent."
CONFIRMATIONS = {MessageKind.CONFIRMATION, MessageKind.REPLY}
_READY = (QueueStatus.SECURED, QueueStatus.ACTIVE)


# Queueing


def queue_confirmation(
    tx: Tx, conn: Connection, queue: SendQueue, message: AgentMessage, params: E2eParams | None
) -> None:
    """The first message to a queue: of the joiner with the keys of the ratchet, of the creator without."""
    plaintext = AGENT_MESSAGE.encode(message)
    size = padded_sizes(conn.agent_version, conn.pq_support).connection_info
    _check_size(plaintext, size)
    seal = _next_seal(tx, conn, conn.pq_support)
    _add(tx, conn, [queue], _KINDS[type(message)], plaintext, size, seal=seal, params=params)


def queue_message(
    tx: Tx,
    conn: Connection,
    message: AMessage,
    *,
    notification: bool | None = None,
    pq: bool | None = None,
    queues: Sequence[SendQueue] | None = None,
) -> int:
    """Its local id. `pq` is for messages of users only; Prohibited while the ratchet is being replaced."""
    kind = _KINDS[type(message)]
    if not conn.sync_state.may_send and kind is not MessageKind.READY:
        raise Prohibited("the ratchet has to be synchronised first")
    targets = _targets(tx, conn) if queues is None else queues
    if kind is MessageKind.USER:
        _check_made(tx, conn, targets[0])
        pq = conn.pq_support if pq is None else pq and _can_pq(tx, conn)
    support = conn.pq_support or bool(pq)
    sizes = padded_sizes(conn.agent_version, support)
    numbered = Numbered(conn.last_snd_id + 1, conn.last_snd_hash, message)
    plaintext = AGENT_MESSAGE.encode(numbered)
    _check_size(plaintext, sizes.message)
    seal = _next_seal(tx, conn, pq)
    if support != conn.pq_support:
        set_connection(tx, conn.connection_id, pq_support=True)
    return _add(tx, conn, targets, kind, plaintext, sizes.message, seal=seal, notification=notification)


POSTPONED = "send"
"Kind of command: a message that waits for the end of a synchronisation."


def send_when_possible(
    tx: Tx, conn: Connection, message: AMessage, *, only_to: SendQueue | None = None
) -> None:
    """Queue a message now, or as soon as the ratchet is synchronised."""
    if conn.sync_state.may_send:
        queue_message(tx, conn, message, queues=None if only_to is None else [only_to])
    else:
        postpone(tx, conn.connection_id, message, only_to=only_to)


def postpone(tx: Tx, connection_id: int, message: AMessage, *, only_to: SendQueue | None = None) -> None:
    """Queue a message with the next commands, as soon as the ratchet is synchronised."""
    w = Writer()
    w.push_int64(0 if only_to is None else only_to.queue_id)
    w.push_bytes(A_MESSAGE.encode(message))
    add_command(tx, connection_id, POSTPONED, w.value())


def send_postponed(tx: Tx, command: StoredCommand) -> bool:
    """False while the ratchet is still being synchronised."""
    conn = connection(tx.db, command.connection_id)
    if not conn.sync_state.may_send:
        return False
    queue_id, message = _postponed(command)
    queue = send_queue(tx.db, queue_id) if queue_id else None
    if queue is not None or not queue_id:
        queue_message(tx, conn, message, queues=None if queue is None else [queue])
    drop_command(tx, command.command_id)
    return True


def _postponed(command: StoredCommand) -> tuple[int, AMessage]:
    r = Reader(command.arguments)
    return r.pull_int64(), A_MESSAGE.decode(r.pull_tail())


def drop_postponed(tx: Tx, connection_id: int, kind: type[AMessage]) -> None:
    for command in commands_of(tx.db, connection_id, POSTPONED):
        if isinstance(_postponed(command)[1], kind):
            drop_command(tx, command.command_id)


def queue_user_message(
    tx: Tx, connection_id: int, body: bytes, *, notification: bool, pq: bool | None = None
) -> int:
    conn = connection(tx.db, connection_id)
    return queue_message(tx, conn, UserMessage(body), notification=notification, pq=pq)


def queue_user_messages(
    tx: Tx, messages: Sequence[tuple[int, bytes]], *, notification: bool
) -> list[int | AgentError]:
    """Their local ids; what one connection cannot send keeps no other from sending."""
    if len(dict(messages)) < len(messages):
        raise Prohibited("there can be one message for each connection")
    made: list[int | AgentError] = []
    for connection_id, body in messages:
        try:
            with tx.attempt():
                made.append(queue_user_message(tx, connection_id, body, notification=notification))
        except AgentError as error:
            made.append(error)
    return made


def _next_seal(tx: Tx, conn: Connection, pq: bool | None) -> bytes:
    """A peer can leave us with a new ratchet that only he can begin to use."""
    try:
        return SEALER.encode(seal_next(tx, conn.connection_id, pq))
    except NoSendingChain:
        raise Prohibited("the other side has to write first") from None


def queue_ratchet_key(tx: Tx, conn: Connection, params: E2eParams) -> None:
    plaintext = AGENT_MESSAGE.encode(RatchetInfo(b""))
    _add(tx, conn, _targets(tx, conn), MessageKind.RATCHET_KEY, plaintext, 0, params=params)


def _can_pq(tx: Tx, conn: Connection) -> bool:
    ratchet = ratchet_of(tx.db, conn.connection_id)
    return ratchet is not None and pq_possible(conn.agent_version, min(ratchet.max_version, E2E_VERSIONS.max))


def _targets(tx: Tx, conn: Connection) -> list[SendQueue]:
    queues = send_queues(tx.db, conn.connection_id)
    if not queues or not conn.last_snd_id:  # the confirmation is always the first
        raise Prohibited("the connection is not made yet")
    return [queues[0], *(queue for queue in queues[1:] if queue.status in _READY)]


def _check_made(tx: Tx, conn: Connection, queue: SendQueue) -> None:
    """A message may follow a confirmation at once, but not overtake the HELLO of a slow handshake.

    An old peer can read nothing before its user has let us in.
    """
    if queue.status is QueueStatus.ACTIVE:
        return
    receiving = receive_queues(tx.db, queue.connection_id)[0]
    is_fast = queue.sender_secures and receiving.mode is QueueMode.MESSAGING
    if (
        not (is_fast and conn.agent_version >= AGENT_EARLY_RATCHET)
        and receiving.status is not QueueStatus.ACTIVE
    ):
        raise Prohibited("the connection is not made yet")


def _check_size(plaintext: bytes, size: int) -> None:
    if len(plaintext) + PAD_LENGTH_SIZE > size:
        raise MessageTooLarge


def _add(
    tx: Tx,
    conn: Connection,
    queues: Sequence[SendQueue],
    kind: MessageKind,
    plaintext: bytes,
    size: int,
    *,
    seal: bytes | None = None,
    params: E2eParams | None = None,
    notification: bool | None = None,
) -> int:
    local_id, digest = next_local_id(tx, conn.connection_id), message_hash(plaintext)
    message_id = conn.last_snd_id + 1
    set_connection(tx, conn.connection_id, last_snd_id=message_id, last_snd_hash=digest)
    insert(
        tx.db,
        "sent_messages",
        connection_id=conn.connection_id,
        local_id=local_id,
        kind=kind,
        message_id=message_id,
        message_hash=digest,
        plaintext=plaintext,
        size=size,
        seal=seal,
        params=None if params is None else E2E_PARAMS.encode(params),
        notification=int(kind in NOTIFYING if notification is None else notification),
        queued_at=tx.now,
        fast_delay=FAST.initial,
        slow_delay=SLOW.initial,
    )
    for queue in queues:
        insert(
            tx.db, "deliveries", queue_id=queue.queue_id, local_id=local_id, connection_id=conn.connection_id
        )
        tx.deliveries.add(queue.queue_id)
    return local_id


def waiting_answers(tx: Tx, connection_id: int) -> int:
    """Messages that wait to be sent, and that the application knows nothing of."""
    sql = (
        "SELECT count(*) FROM sent_messages"
        " WHERE connection_id = ? AND kind NOT IN (?, ?) AND taken_at IS NULL"
    )
    (count,) = tx.db.execute(sql, (connection_id, MessageKind.USER, MessageKind.RECEIPTS)).fetchone()
    return int(count) + len(commands_of(tx.db, connection_id, POSTPONED))


def check_answers(tx: Tx, connection_id: int) -> None:
    """Whoever asks and reads no answer must not make us keep answers without end."""
    if waiting_answers(tx, connection_id) >= MAX_ANSWERS:
        raise PeerFault(A_PROHIBITED, "too many answers wait to be sent")


# Delivering


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The next message of a send queue."""

    queue: SendQueue
    connection_id: int
    agent_version: int
    local_id: int
    kind: MessageKind
    plaintext: bytes = field(repr=False)
    size: int
    seal: bytes | None = field(repr=False)
    params: bytes | None = field(repr=False)
    notification: bool
    queued_at: int
    fast: Retry
    slow: Retry

    @property
    def keys(self) -> tuple[X25519PrivateKey | None, ...]:
        """Of SEND, to be tried in turn: none before the recipient has secured the queue.

        He may have done so for an earlier attempt, whose answer got lost.
        """
        return (None, self.queue.auth_key) if self._carries_key else (self.queue.auth_key,)

    @property
    def _carries_key(self) -> bool:
        return self.kind in CONFIRMATIONS and not self.queue.sender_secures

    def command(self, nonce: bytes) -> Send:
        queue, message = self.queue, ClientMessage(self._envelope())
        if self._carries_key:
            message = ClientMessage(message.envelope, queue.auth_key.public)
        dh_key = queue.e2e_key.public if self.kind in CONFIRMATIONS else None
        body = seal_body(queue.client_version, dh_key, queue.e2e_secret, nonce, message)
        return Send(self.notification, body)

    def _envelope(self) -> bytes:
        params = None if self.params is None else E2E_PARAMS.decode(self.params)
        if self.seal is None:
            assert params is not None
            return encode_agent_envelope(RatchetKeyEnvelope(AGENT_VERSIONS.max, params, self.plaintext))
        sealed = SEALER.decode(self.seal).seal(self.plaintext, self.size)
        if self.kind in CONFIRMATIONS:
            return encode_agent_envelope(ConfirmationEnvelope(self.agent_version, params, sealed))
        return encode_agent_envelope(MessageEnvelope(AGENT_VERSIONS.max, sealed))


def next_delivery(db: sqlite3.Connection, queue_id: int) -> Delivery | None:
    queue = send_queue(db, queue_id)
    if queue is None:
        return None
    row = db.execute(
        "SELECT m.*, c.agent_version FROM deliveries d JOIN sent_messages m USING (connection_id, local_id)"
        " JOIN connections c USING (connection_id) WHERE d.queue_id = ? ORDER BY d.local_id LIMIT 1",
        (queue_id,),
    ).fetchone()
    if row is None:
        return None
    return Delivery(
        queue=queue,
        connection_id=row["connection_id"],
        agent_version=row["agent_version"],
        local_id=row["local_id"],
        kind=MessageKind(row["kind"]),
        plaintext=row["plaintext"],
        size=row["size"],
        seal=row["seal"],
        params=row["params"],
        notification=bool(row["notification"]),
        queued_at=row["queued_at"],
        fast=Retry(row["fast_delay"], row["fast_elapsed"]),
        slow=Retry(row["slow_delay"], row["slow_elapsed"]),
    )


def _finish(tx: Tx, delivery: Delivery, *, sent: bool) -> None:
    """Forget the delivery, and with the last one the message; a user's keeps its hash for receipts."""
    key = (delivery.connection_id, delivery.local_id)
    sql = "DELETE FROM deliveries WHERE queue_id = ? AND local_id = ?"
    tx.db.execute(sql, (delivery.queue.queue_id, delivery.local_id))
    left = tx.db.execute("SELECT 1 FROM deliveries WHERE connection_id = ? AND local_id = ?", key).fetchone()
    if left is not None or (sent and keep_unread(tx, delivery.queue, *key)):
        return
    if sent and delivery.kind is MessageKind.USER:
        sql = (
            "UPDATE sent_messages SET plaintext = NULL, seal = NULL WHERE connection_id = ? AND local_id = ?"
        )
        tx.db.execute(sql, key)
    else:
        tx.db.execute("DELETE FROM sent_messages WHERE connection_id = ? AND local_id = ?", key)


def delivered(tx: Tx, delivery: Delivery) -> None:
    """The router took it, perhaps after the queue was replaced and forgotten."""
    queue = send_queue(tx.db, delivery.queue.queue_id)
    is_first = mark_taken(tx, delivery.connection_id, delivery.local_id)
    _finish(tx, delivery, sent=True)
    if delivery.kind is MessageKind.USER and is_first:
        tx.events.append(MessageSent(delivery.connection_id, delivery.local_id))
    if queue is None:
        return
    match delivery.kind:
        case MessageKind.CONFIRMATION:
            set_send_queue(tx, queue.queue_id, status=QueueStatus.CONFIRMED)
        case MessageKind.REPLY:
            active = queue.sender_secures
            status = QueueStatus.ACTIVE if active else QueueStatus.CONFIRMED
            set_send_queue(tx, queue.queue_id, status=status)
            if active:
                connected(tx, delivery.connection_id)
        case MessageKind.HELLO:
            set_send_queue(tx, queue.queue_id, status=QueueStatus.ACTIVE)
            received = receive_queues(tx.db, delivery.connection_id)
            if received and received[0].status is QueueStatus.ACTIVE:
                connected(tx, delivery.connection_id)
        case MessageKind.KEY:
            tx.events.append(SwitchProgress(delivery.connection_id, False, "confirmed"))
        case MessageKind.TEST:
            _switched(tx, queue)


def connected(tx: Tx, connection_id: int) -> None:
    ratchet = ratchet_of(tx.db, connection_id)
    tx.events.append(Connected(connection_id, ratchet is not None and ratchet.snd_kem))


def _switched(tx: Tx, queue: SendQueue) -> None:
    """The peer's new queue works: the one that it replaces goes, with what was still to be sent there."""
    set_send_queue(tx, queue.queue_id, status=QueueStatus.ACTIVE, is_primary=True, replaces=None)
    for old in send_queues(tx.db, queue.connection_id):
        if old.queue_id == queue.replaces and old.switch is SndSwitch.SENDING_QTEST:
            give_up_queue(tx, old)
            tx.events.append(SwitchProgress(queue.connection_id, False, "completed"))


def give_up_queue(tx: Tx, queue: SendQueue) -> None:
    end_deliveries(tx, queue)
    drop_send_queue(tx, queue.queue_id)
    forget_undeliverable(tx, queue.connection_id)


def end_deliveries(tx: Tx, queue: SendQueue) -> None:
    """Nothing more goes there: its worker need not wait for the next attempt to notice."""
    tx.db.execute("DELETE FROM deliveries WHERE queue_id = ?", (queue.queue_id,))
    tx.deliveries.add(queue.queue_id)
    tx.hurried.add(queue.queue_id)


def send_there_too(tx: Tx, old: SendQueue, new: SendQueue) -> None:
    """What has not reached the one queue goes to the other as well; the peer tells the same bytes apart."""
    tx.db.execute(
        "INSERT OR IGNORE INTO deliveries (queue_id, local_id, connection_id)"
        " SELECT ?, local_id, connection_id FROM deliveries WHERE queue_id = ?",
        (new.queue_id, old.queue_id),
    )
    send_unread(tx, new)
    tx.deliveries.add(new.queue_id)


def delivery_delayed(tx: Tx, delivery: Delivery, *, slow: bool, warning: str | None) -> None:
    """It is tried again after the delay that is stored now."""
    if not _is_wanted(tx, delivery):
        return
    name, retry = ("slow", delivery.slow.next(SLOW)) if slow else ("fast", delivery.fast.next(FAST))
    tx.db.execute(
        f"UPDATE sent_messages SET {name}_delay = ?, {name}_elapsed = ?"
        " WHERE connection_id = ? AND local_id = ?",
        (retry.delay, retry.elapsed, delivery.connection_id, delivery.local_id),
    )
    if warning is not None and not (slow and delivery.kind in _QUIET_WHEN_FULL):
        tx.events.append(MessageDelayed(delivery.connection_id, delivery.local_id, warning))


def delivery_failed(tx: Tx, delivery: Delivery, error: str) -> None:
    """It is given up, unless it goes to the queue that replaces this one, too."""
    if not _is_wanted(tx, delivery):
        return
    queue = send_queue(tx.db, delivery.queue.queue_id)
    if queue is not None and queue.switch is SndSwitch.SENDING_QTEST:
        _finish(tx, delivery, sent=True)
        return
    if is_taken(tx, delivery.connection_id, delivery.local_id):
        _finish(tx, delivery, sent=True)
        return
    _finish(tx, delivery, sent=False)
    if delivery.kind is MessageKind.USER:
        tx.events.append(MessageFailed(delivery.connection_id, delivery.local_id, error))
    else:
        tx.events.append(Failed(delivery.connection_id, error))


def _is_wanted(tx: Tx, delivery: Delivery) -> bool:
    """Not if meanwhile its queue was replaced (and deleted by its owner), or its connection deleted."""
    sql = "SELECT 1 FROM deliveries WHERE queue_id = ? AND local_id = ?"
    return tx.db.execute(sql, (delivery.queue.queue_id, delivery.local_id)).fetchone() is not None


def expire(tx: Tx, delivery: Delivery, age: int, error: str) -> None:
    """Give up this message and all others of its queue that have waited as long."""
    delivery_failed(tx, delivery, error)
    while (following := next_delivery(tx.db, delivery.queue.queue_id)) is not None:
        if tx.now - following.queued_at < age:
            return
        delivery_failed(tx, following, error)
