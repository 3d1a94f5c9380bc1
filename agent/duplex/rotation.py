"""Queue rotation: a receive queue is replaced by one at another router, while messages go on.

The owner of the queue offers (QADD) and secures (QUSE); its sender brings keys (QKEY) and tries it (QTEST).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from agent.duplex.events import Failed, QueueDeleted, SwitchProgress
from agent.duplex.handshake import at_version, new_send_queue
from agent.duplex.outgoing import (
    check_answers,
    drop_postponed,
    give_up_queue,
    postpone,
    send_there_too,
    send_when_possible,
)
from agent.duplex.records import (
    Connection,
    ConnectionKind,
    QueueStatus,
    RcvSwitch,
    ReceiveQueue,
    SendQueue,
    SndSwitch,
)
from agent.duplex.store import Strand, Tx
from agent.duplex.tables import (
    DELETE_QUEUE,
    add_command,
    add_receive_queue,
    connection,
    drop_receive_queue,
    find_address,
    receive_queue,
    receive_queue_of,
    receive_queues,
    send_queues,
    set_receive_queue,
    set_secured,
    set_send_queue,
)
from agent.errors import A_QUEUE, A_VERSION, INTERNAL, NoConnection, PeerFault, Prohibited
from agent.notifications.rows import delete_subscription
from protocol.addresses import SmpServer
from protocol.agent.messages import (
    NewQueue,
    QueueAdd,
    QueueAddress,
    QueueKey,
    QueueKeys,
    QueuesUse,
    QueueTest,
    QueueUse,
)
from protocol.encoding import EntityId
from protocol.errors import DecodeError
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueInfo

SWITCH, SECURE_NEW = "switch", "secure_new"
"Kinds of commands."
_ABORTABLE = (RcvSwitch.STARTED, RcvSwitch.SENDING_QADD)


def _progress(tx: Tx, connection_id: int, phase: str, *, receiving: bool) -> None:
    tx.events.append(SwitchProgress(connection_id, receiving, phase))


# The owner of the queue


def start_switch(tx: Tx, connection_id: int, servers: Collection[SmpServer]) -> None:
    """`servers`: where queues can be made."""
    conn, queues = connection(tx.db, connection_id), receive_queues(tx.db, connection_id)
    if conn.kind is not ConnectionKind.DUPLEX or not conn.sync_state.may_send:
        raise Prohibited("this connection cannot be switched now")
    if any(queue.switch is not None for queue in queues):
        raise Prohibited("a queue of this connection is being replaced already")
    if not any(server.canonical != queues[0].server.canonical for server in servers):
        raise Prohibited("there is no other router to move to: name one more with --router")
    set_receive_queue(tx, queues[0].queue_id, switch=RcvSwitch.STARTED)
    add_command(tx, connection_id, SWITCH)


def switching(queues: list[ReceiveQueue]) -> ReceiveQueue | None:
    """The queue that is being replaced."""
    return next((queue for queue in queues if queue.switch is not None), None)


def offer(tx: Tx, connection_id: int, old: ReceiveQueue, new: ReceiveQueue) -> None:
    """QADD: unless the switch was aborted while the new queue was made."""
    current, added = receive_queue(tx.db, old.queue_id), add_receive_queue(tx, connection_id, new)
    if current is None or current.deleting or current.switch is not RcvSwitch.STARTED:
        delete_queue(tx, added, at_once=True)
        return
    set_receive_queue(tx, old.queue_id, switch=RcvSwitch.SENDING_QADD)
    send_when_possible(tx, connection(tx.db, connection_id), _offer(old, new))
    _progress(tx, connection_id, "started", receiving=True)


def _offer(old: ReceiveQueue, new: ReceiveQueue) -> QueueAdd:
    return QueueAdd((NewQueue(new.uri, old.address),))


def abort_switch(tx: Tx, connection_id: int) -> None:
    queues = receive_queues(tx.db, connection_id)
    old = switching(queues)
    if old is None or old.switch not in _ABORTABLE:
        raise Prohibited("there is no switch that could be aborted")
    set_receive_queue(tx, old.queue_id, switch=None)
    drop_postponed(tx, connection_id, QueueAdd)
    for queue in queues:
        if queue.replaces == old.queue_id:
            delete_queue(tx, queue, at_once=True)


def keys_received(tx: Tx, conn: Connection, brought_by: ReceiveQueue, message: QueueKeys) -> None:
    """QKEY: the sender's keys for the new queue."""
    info, sender_key = message.queues[0].queue, message.queues[0].sender_key
    queues = [queue for queue in receive_queues(tx.db, conn.connection_id) if not queue.deleting]
    new = find_address(queues, QueueAddress(info.server, info.sender_id))
    if new is None:
        raise PeerFault(A_QUEUE, "not found")
    if new.status not in (QueueStatus.NEW, QueueStatus.CONFIRMED):
        if new.e2e_secret == new.e2e_key.exchange(info.dh_key):
            return  # sent again
        raise PeerFault(A_QUEUE, "is secured already")
    if brought_by.switch is not RcvSwitch.SENDING_QADD or new.replaces != brought_by.queue_id:
        raise PeerFault(INTERNAL, "QKEY in another state of the switch")
    set_receive_queue(
        tx,
        new.queue_id,
        e2e_secret=new.e2e_key.exchange(info.dh_key),
        sender_key=sender_key,
        client_version=min(SMP_CLIENT_VERSIONS.max, info.version),
        status=QueueStatus.CONFIRMED,
    )
    if new.status is QueueStatus.NEW:  # otherwise the command is there, and takes the newest key
        add_command(tx, conn.connection_id, SECURE_NEW, new.queue_id)
        _progress(tx, conn.connection_id, "confirmed", receiving=True)


def secured(tx: Tx, new: ReceiveQueue) -> None:
    """KEY was accepted: QUSE."""
    current = receive_queue(tx.db, new.queue_id)
    if current is None or current.deleting or current.replaces is None:
        raise Prohibited("the switch was aborted")
    conn = connection(tx.db, new.connection_id)
    set_secured(tx, new)
    set_receive_queue(tx, current.replaces, switch=RcvSwitch.SENDING_QUSE)
    send_when_possible(tx, conn, _usable(new))
    _progress(tx, conn.connection_id, "secured", receiving=True)


def _usable(new: ReceiveQueue) -> QueuesUse:
    return QueuesUse((QueueUse(new.address, True),))


def used(tx: Tx, conn: Connection, new: ReceiveQueue) -> None:
    """A message came on the new queue: the old one goes."""
    assert new.replaces is not None
    old = receive_queue(tx.db, new.replaces)
    if old is None or old.switch is not RcvSwitch.SENDING_QUSE:
        return
    set_receive_queue(tx, new.queue_id, replaces=None, is_primary=True)
    set_receive_queue(tx, old.queue_id, switch=RcvSwitch.RECEIVED_MESSAGE, is_primary=False)
    delete_queue(tx, old)


def delete_queue(tx: Tx, queue: ReceiveQueue, *, at_once: bool = False) -> None:
    """At its router, which nothing else waits for. `at_once`: without reading what is in it."""
    queue_id = queue.queue_id
    if at_once:
        set_receive_queue(tx, queue_id, deleting=True)
    add_command(tx, queue.connection_id, DELETE_QUEUE, queue_id=queue_id)


def queue_deleted(tx: Tx, queue: ReceiveQueue) -> None:
    """DEL was answered: a deletion of the connection may have waited for it."""
    delete_subscription(tx, queue.queue_id)
    drop_receive_queue(tx, queue.queue_id)
    strand = Strand(queue.connection_id)
    tx.commands.add(strand)
    tx.hurried.add(strand)
    if queue.switch is RcvSwitch.RECEIVED_MESSAGE:
        _progress(tx, queue.connection_id, "completed", receiving=True)


# Queues that their router has deleted


def queues_deleted(
    tx: Tx, server: SmpServer, recipient_ids: Iterable[EntityId], servers: Collection[SmpServer]
) -> None:
    """DELD. The peer can be offered another queue only while there is one that it can answer to."""
    for recipient_id in recipient_ids:
        queue = receive_queue_of(tx.db, server, recipient_id)
        if queue is None or queue.deleting:
            continue
        connection_id, others = queue.connection_id, _others(tx, queue)
        tx.events.append(QueueDeleted(connection_id, bool(others)))
        if not others:
            delete_subscription(tx, queue.queue_id)
            set_receive_queue(tx, queue.queue_id, deleting=True)
        elif queue.replaces is not None:
            _offer_another(tx, queue, servers)
        else:
            set_receive_queue(tx, others[0].queue_id, replaces=None, is_primary=True)
            queue_deleted(tx, replace(queue, switch=RcvSwitch.RECEIVED_MESSAGE))


def _others(tx: Tx, queue: ReceiveQueue) -> list[ReceiveQueue]:
    """Queues of the connection that the peer can send to, or will be able to."""
    of_connection = receive_queues(tx.db, queue.connection_id)
    usable = (QueueStatus.SECURED, QueueStatus.ACTIVE)
    return [
        each
        for each in of_connection
        if each.queue_id != queue.queue_id
        and not each.deleting
        and (each.replaces is None or each.status in usable)
    ]


def _offer_another(tx: Tx, new: ReceiveQueue, servers: Collection[SmpServer]) -> None:
    """The queue that was to replace one is gone: the switch begins again."""
    assert new.replaces is not None
    drop_postponed(tx, new.connection_id, QueueAdd)
    queue_deleted(tx, new)
    set_receive_queue(tx, new.replaces, switch=None)
    try:
        start_switch(tx, new.connection_id, servers)
    except (Prohibited, NoConnection) as reason:
        tx.events.append(Failed(new.connection_id, str(reason)))


# Its sender


def queue_offered(tx: Tx, conn: Connection, message: QueueAdd) -> None:
    """QADD: a send queue to the offered one, and our keys for it."""
    check_answers(tx, conn.connection_id)
    offered, replaced = message.queues[0].queue, message.queues[0].replaced
    queues = send_queues(tx.db, conn.connection_id)
    old = None if replaced is None else find_address(queues, replaced)
    known = next((queue for queue in queues if queue.sender_id == offered.sender_id), None)
    if known is not None:
        if old is not None and known.replaces == old.queue_id:
            return  # sent again
        raise PeerFault(A_QUEUE, "address is used already")
    if replaced is None:
        raise PeerFault(A_QUEUE, "replaces nothing")
    version = SMP_CLIENT_VERSIONS.common(offered.versions)
    if old is None:
        raise PeerFault(A_QUEUE, "replaced queue not found")
    if version is None:
        raise PeerFault(A_VERSION)
    for queue in queues:
        if queue.replaces == old.queue_id:  # of an earlier offer
            give_up_queue(tx, queue)
    info = at_version(offered, version)
    try:
        new = new_send_queue(tx, conn.connection_id, info, replaces=old.queue_id)
    except DecodeError:
        raise PeerFault(A_QUEUE, "key") from None
    set_send_queue(tx, old.queue_id, switch=SndSwitch.SENDING_QKEY)
    send_when_possible(tx, conn, _keys(new))
    _progress(tx, conn.connection_id, "started", receiving=False)


def _keys(new: SendQueue) -> QueueKeys:
    info = QueueInfo(new.client_version, new.server, new.sender_id, new.e2e_key.public, new.mode)
    return QueueKeys((QueueKey(info, new.auth_key.public),))


def queue_usable(tx: Tx, conn: Connection, message: QueuesUse) -> None:
    """QUSE: try the new queue, after what the old one has not taken yet: that is dropped with the old one."""
    queues = send_queues(tx.db, conn.connection_id)
    new = find_address(queues, message.queues[0].address)
    if new is None:
        raise PeerFault(A_QUEUE, "not found")
    if new.status in (QueueStatus.SECURED, QueueStatus.ACTIVE):
        return  # sent again
    old = next((queue for queue in queues if queue.queue_id == new.replaces), None)
    if old is None or old.switch is not SndSwitch.SENDING_QKEY:
        raise PeerFault(INTERNAL, "QUSE in another state of the switch")
    set_send_queue(tx, new.queue_id, status=QueueStatus.SECURED)
    set_send_queue(tx, old.queue_id, switch=SndSwitch.SENDING_QTEST)
    send_there_too(tx, old, new)
    send_when_possible(tx, conn, QueueTest((new.address,)), only_to=new)
    _progress(tx, conn.connection_id, "secured", receiving=False)


# After a synchronisation


def send_again(tx: Tx, connection_id: int) -> None:
    """The message that the other side waits for: it may have come with a ratchet that was gone there.

    QTEST is not repeated: whatever comes on the new queue says the same.
    """
    for message in (*_of_owner(tx, connection_id), *_of_sender(tx, connection_id)):
        drop_postponed(tx, connection_id, type(message))
        postpone(tx, connection_id, message)


def _of_owner(tx: Tx, connection_id: int) -> Iterator[QueueAdd | QueuesUse]:
    queues = receive_queues(tx.db, connection_id)
    by_id = {queue.queue_id: queue for queue in queues}
    for new in queues:
        old = by_id.get(new.replaces or 0)
        if old is None or new.deleting:
            continue
        if old.switch is RcvSwitch.SENDING_QADD and new.status is QueueStatus.NEW:
            yield _offer(old, new)
        elif old.switch is RcvSwitch.SENDING_QUSE:
            yield _usable(new)


def _of_sender(tx: Tx, connection_id: int) -> Iterator[QueueKeys]:
    queues = send_queues(tx.db, connection_id)
    waiting = {queue.queue_id for queue in queues if queue.switch is SndSwitch.SENDING_QKEY}
    return (_keys(queue) for queue in queues if queue.replaces in waiting)
