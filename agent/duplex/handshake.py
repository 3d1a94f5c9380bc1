"""Making a connection: the steps of both sides, each one transaction."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from agent.duplex.events import Confirmed, ContactRequested, PeerInfo
from agent.duplex.links import own_request
from agent.duplex.outgoing import connected, queue_confirmation
from agent.duplex.ratchets import keys_of, put_keys, put_ratchet, ratchet_of, unseal
from agent.duplex.records import Connection, ConnectionKind, QueueStatus, ReceiveQueue, SendQueue
from agent.duplex.store import Tx, insert
from agent.duplex.tables import (
    add_command,
    add_receive_queue,
    add_send_queue,
    connection,
    new_connection,
    receive_queues,
    send_queues,
    set_connection,
    set_receive_queue,
)
from agent.errors import A_MESSAGE, A_PROHIBITED, A_VERSION, INTERNAL, PeerFault, Prohibited
from protocol.agent.connection_requests import ConnectionRequest, InvitationRequest, parse_request
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.envelopes import ClientMessage, ConfirmationEnvelope, InvitationEnvelope
from protocol.agent.errors import RatchetError
from protocol.agent.forms import QUEUE_INFO
from protocol.agent.messages import AGENT_MESSAGE, AgentMessage, ConnectionInfo, ConnectionReply, message_hash
from protocol.agent.ratchet import creator_ratchet, joiner_ratchet
from protocol.agent.ratchet_state import Ratchet
from protocol.agent.versions import AGENT_VERSIONS, E2E_VERSIONS, acceptable, pq_possible
from protocol.agent.x3dh import joiner_kem, joiner_params
from protocol.crypto import X25519PrivateKey
from protocol.errors import DecodeError
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueInfo, QueueUri
from protocol.smp_messages import QueueMode

MAX_INVITATIONS = 1000
"Requests to one address that wait for an answer; more are refused."


# The creator


def created(tx: Tx, queue: ReceiveQueue, keys: E2eKeys | None, *, pq: bool) -> int:
    """A connection with its first queue; without keys it is an address."""
    kind = ConnectionKind.CONTACT if keys is None else ConnectionKind.RCV
    connection_id = new_connection(tx, kind, pq_support=pq)
    add_receive_queue(tx, connection_id, queue)
    if keys is not None:
        put_keys(tx, connection_id, keys)
    return connection_id


# The joiner


def start_join(
    tx: Tx,
    connection_id: int,
    request: InvitationRequest,
    *,
    pq: bool,
    secured_with: X25519PrivateKey | None = None,
) -> None:
    """Send queue and ratchet, from the link."""
    agent_version = AGENT_VERSIONS.common(request.agent_versions)
    e2e_version = E2E_VERSIONS.common(request.e2e.versions)
    client_version = SMP_CLIENT_VERSIONS.common(request.queues[0].versions)
    if agent_version is None or e2e_version is None or client_version is None:
        raise Prohibited(A_VERSION)
    pq = pq and pq_possible(agent_version, e2e_version)
    theirs, keys = request.e2e.at(e2e_version), tx.secrets.e2e_keys(pq=False)
    kem = joiner_kem(theirs, pq, e2e_version, tx.secrets)
    ratchet = joiner_ratchet(keys, kem, theirs, E2E_VERSIONS.max, tx.secrets)
    put_ratchet(tx, connection_id, ratchet)
    put_keys(tx, connection_id, keys)
    set_connection(tx, connection_id, kind=ConnectionKind.SND, joined=True)
    set_connection(tx, connection_id, agent_version=agent_version, pq_support=pq)
    info = at_version(request.queues[0], client_version)
    new_send_queue(tx, connection_id, info, secured_with=secured_with)


def at_version(uri: QueueUri, version: int) -> QueueInfo:
    """The queue for whom this version of it is common."""
    return QueueInfo(version, uri.server, uri.sender_id, uri.dh_key, uri.mode)


def new_send_queue(
    tx: Tx,
    connection_id: int,
    info: QueueInfo,
    *,
    replaces: int | None = None,
    secured_with: X25519PrivateKey | None = None,
) -> SendQueue:
    e2e_key = tx.secrets.x25519()
    queue = SendQueue(
        queue_id=0,
        connection_id=connection_id,
        server=info.server,
        sender_id=info.sender_id,
        auth_key=secured_with or tx.secrets.x25519(),
        e2e_key=e2e_key,
        e2e_secret=e2e_key.exchange(info.dh_key),
        status=QueueStatus.SECURED if secured_with else QueueStatus.NEW,
        client_version=info.version,
        mode=info.mode,
        is_primary=True,
        replaces=replaces,
        switch=None,
    )
    return replace(queue, queue_id=add_send_queue(tx, queue))


def contact_queue_made(tx: Tx, connection_id: int, queue: ReceiveQueue, *, pq: bool) -> None:
    """For an answer to our request: the owner of the address joins it."""
    add_receive_queue(tx, connection_id, queue)
    set_connection(tx, connection_id, kind=ConnectionKind.RCV, pq_support=pq)
    put_keys(tx, connection_id, tx.secrets.e2e_keys(pq))


def own_invitation(db: sqlite3.Connection, connection_id: int) -> ConnectionRequest | None:
    """None if the owner of the address has joined it: our request arrived, only its answer did not."""
    keys = keys_of(db, connection_id)
    return None if keys is None else own_request(receive_queues(db, connection_id)[0].uri, keys)


def reply_queue_made(tx: Tx, connection_id: int, queue: ReceiveQueue) -> None:
    add_receive_queue(tx, connection_id, queue)
    set_connection(tx, connection_id, kind=ConnectionKind.DUPLEX)


def confirm_join(tx: Tx, connection_id: int, info: bytes) -> None:
    """The confirmation goes out, with our keys and the queue for answers."""
    conn = connection(tx.db, connection_id)
    keys, ratchet = keys_of(tx.db, connection_id), ratchet_of(tx.db, connection_id)
    if keys is None:
        return  # it stands in the queue already
    assert ratchet is not None
    (sending, *_), (receiving, *_) = send_queues(tx.db, connection_id), receive_queues(tx.db, connection_id)
    params = joiner_params(keys, ratchet.kem, ratchet.version)
    reply = at_version(receiving.uri, receiving.client_version)
    queue_confirmation(tx, conn, sending, ConnectionReply((reply,), info), params)
    put_keys(tx, connection_id, None)


# Confirmations


def confirmation_received(
    tx: Tx,
    conn: Connection,
    queue: ReceiveQueue,
    secret: bytes,
    client_version: int,
    message: ClientMessage,
    envelope: ConfirmationEnvelope,
) -> None:
    if queue.status is not QueueStatus.NEW:
        raise PeerFault(A_PROHIBITED, "confirmation")
    if message.sender_key is None and queue.mode is not QueueMode.MESSAGING:
        raise PeerFault(A_PROHIBITED, "the sender cannot secure this queue")
    if not acceptable(envelope.agent_version, AGENT_VERSIONS, conn.agent_version):
        raise PeerFault(A_VERSION)
    set_receive_queue(
        tx,
        queue.queue_id,
        e2e_secret=secret,
        client_version=min(SMP_CLIENT_VERSIONS.max, client_version),
        sender_key=message.sender_key,
        status=QueueStatus.CONFIRMED,
    )
    if conn.kind is ConnectionKind.RCV and envelope.params is not None:
        _joined(tx, conn, envelope)
    elif conn.kind is ConnectionKind.DUPLEX and envelope.params is None:
        _answered(tx, conn, queue, message, envelope)
    else:
        raise PeerFault(A_PROHIBITED, "confirmation")


def _joined(tx: Tx, conn: Connection, envelope: ConfirmationEnvelope) -> None:
    """Somebody used our link."""
    params, keys = envelope.params, keys_of(tx.db, conn.connection_id)
    assert params is not None
    assert keys is not None
    if params.version not in E2E_VERSIONS:
        raise PeerFault(A_VERSION)
    pq = conn.pq_support and pq_possible(envelope.agent_version, params.version)
    try:
        ratchet = creator_ratchet(keys, params, E2E_VERSIONS.max, pq)
    except RatchetError:
        raise PeerFault(INTERNAL, "KEM state") from None
    message = _open(tx, conn, ratchet, envelope)
    if not isinstance(message, ConnectionReply):
        raise PeerFault(A_PROHIBITED, "confirmation without a queue")
    put_keys(tx, conn.connection_id, None)
    set_connection(tx, conn.connection_id, agent_version=envelope.agent_version, pq_support=pq)
    values = {"reply_queue": QUEUE_INFO.encode(message.queues[0]), "info": message.info}
    insert(tx.db, "confirmations", connection_id=conn.connection_id, **values)
    tx.events.append(Confirmed(conn.connection_id, message.info, pq))


def _answered(
    tx: Tx, conn: Connection, queue: ReceiveQueue, message: ClientMessage, envelope: ConfirmationEnvelope
) -> None:
    """The creator of the link lets us in."""
    ratchet = ratchet_of(tx.db, conn.connection_id)
    assert ratchet is not None
    content = _open(tx, conn, ratchet, envelope)
    if not isinstance(content, ConnectionInfo):
        raise PeerFault(A_PROHIBITED, "confirmation")
    tx.events.append(PeerInfo(conn.connection_id, content.info))
    if message.sender_key is None:
        set_receive_queue(tx, queue.queue_id, status=QueueStatus.ACTIVE)
        connected(tx, conn.connection_id)
    else:
        add_command(tx, conn.connection_id, "secure")


def _open(tx: Tx, conn: Connection, ratchet: Ratchet, envelope: ConfirmationEnvelope) -> AgentMessage:
    try:
        done = unseal(tx, conn.connection_id, ratchet, envelope.ratchet_message)
        if done.error is not None:
            raise done.error
        message = AGENT_MESSAGE.decode(done.plaintext)
    except RatchetError as error:
        raise PeerFault(error.word) from None
    except DecodeError:
        raise PeerFault(A_MESSAGE) from None
    digest = message_hash(done.plaintext)
    set_connection(tx, conn.connection_id, last_rcv_id=1, last_rcv_hash=digest)
    return message


# Letting somebody in


def allow(tx: Tx, connection_id: int, info: bytes) -> None:
    if confirmation_of(tx.db, connection_id) is None:
        raise Prohibited("nobody has joined this connection")
    add_command(tx, connection_id, "allow", info)


def confirmation_of(db: sqlite3.Connection, connection_id: int) -> QueueInfo | None:
    """Where the one who joined wants to be answered."""
    sql = "SELECT reply_queue FROM confirmations WHERE connection_id = ?"
    row = db.execute(sql, (connection_id,)).fetchone()
    return None if row is None else QUEUE_INFO.decode(row["reply_queue"])


def waiting(db: sqlite3.Connection) -> list[Confirmed | ContactRequested]:
    """Who waits for an answer of the application: told again at each start."""
    confirmed = db.execute(
        "SELECT f.*, c.pq_support FROM confirmations f JOIN connections c USING (connection_id)"
        " WHERE NOT c.deleted AND NOT EXISTS (SELECT 1 FROM commands k"
        " WHERE k.connection_id = c.connection_id AND k.kind = 'allow')"
    )
    requests = db.execute("SELECT * FROM invitations WHERE NOT accepted ORDER BY invitation_id")
    return [
        *(Confirmed(row["connection_id"], row["info"], bool(row["pq_support"])) for row in confirmed),
        *(ContactRequested(row["connection_id"], row["invitation_id"], row["info"]) for row in requests),
    ]


def start_answer(tx: Tx, connection_id: int) -> tuple[SendQueue, ReceiveQueue]:
    """The send queue to the reply address; again, it is the same."""
    conn = connection(tx.db, connection_id)
    if conn.kind is ConnectionKind.RCV:
        info = confirmation_of(tx.db, connection_id)
        assert info is not None
        new_send_queue(tx, connection_id, info)
        set_connection(tx, connection_id, kind=ConnectionKind.DUPLEX)
    return send_queues(tx.db, connection_id)[0], receive_queues(tx.db, connection_id)[0]


def answer(tx: Tx, connection_id: int, info: bytes) -> None:
    """Our confirmation goes out."""
    if confirmation_of(tx.db, connection_id) is None:
        return  # it stands in the queue already
    conn = connection(tx.db, connection_id)
    queue_confirmation(tx, conn, send_queues(tx.db, connection_id)[0], ConnectionInfo(info), None)
    tx.db.execute("DELETE FROM confirmations WHERE connection_id = ?", (connection_id,))


# Addresses


def request_received(tx: Tx, conn: Connection, envelope: InvitationEnvelope) -> None:
    """Kept even if its versions are not ours: the application may want to tell its user."""
    if conn.kind is not ConnectionKind.CONTACT:
        raise PeerFault(A_PROHIBITED, "invitation")
    sql = "SELECT link FROM invitations WHERE connection_id = ?"
    known = {link for (link,) in tx.db.execute(sql, (conn.connection_id,))}
    if envelope.link in known or _is_joined(tx.db, envelope.link):
        return  # whoever asked did not hear that the question had arrived
    if len(known) >= MAX_INVITATIONS:
        raise PeerFault(A_PROHIBITED, "too many requests wait for an answer")
    values = {"link": envelope.link, "info": envelope.info}
    invitation_id = insert(tx.db, "invitations", connection_id=conn.connection_id, **values)
    tx.events.append(ContactRequested(conn.connection_id, invitation_id, envelope.info))


def _is_joined(db: sqlite3.Connection, link: str) -> bool:
    """Whether it was accepted: then a connection sends to its queue, and no other can be made of it."""
    try:
        queue = parse_request(link).queues[0]
    except DecodeError:
        return False
    sql = "SELECT 1 FROM send_queues WHERE server = ? AND sender_id = ?"
    return db.execute(sql, (str(queue.server), queue.sender_id)).fetchone() is not None


def _of_waiting(tx: Tx, change: str, invitation_id: int) -> None:
    if not tx.db.execute(f"{change} WHERE invitation_id = ? AND NOT accepted", (invitation_id,)).rowcount:
        raise Prohibited("there is no such request, or it was accepted")


def take_invitation(tx: Tx, invitation_id: int) -> str:
    """The link of somebody's request, which is accepted now."""
    _of_waiting(tx, "UPDATE invitations SET accepted = 1", invitation_id)
    sql = "SELECT link FROM invitations WHERE invitation_id = ?"
    return str(tx.db.execute(sql, (invitation_id,)).fetchone()["link"])


def reject_invitation(tx: Tx, invitation_id: int) -> None:
    _of_waiting(tx, "DELETE FROM invitations", invitation_id)


def invitation_joined(tx: Tx, invitation_id: int, *, success: bool) -> None:
    """If accepting it did not work, it can be tried again."""
    if success:
        tx.db.execute("DELETE FROM invitations WHERE invitation_id = ?", (invitation_id,))
    else:
        tx.db.execute("UPDATE invitations SET accepted = 0 WHERE invitation_id = ?", (invitation_id,))
