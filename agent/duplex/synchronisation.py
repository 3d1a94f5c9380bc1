"""A new ratchet in place of one that went wrong: both send keys, the greater hash of keys sends first."""

from __future__ import annotations

import sqlite3

from agent.duplex.events import Failed, RatchetSync
from agent.duplex.outgoing import check_answers, queue_message, queue_ratchet_key
from agent.duplex.ratchets import keys_of, put_keys, replace_ratchet, seen_before
from agent.duplex.records import Connection, ConnectionKind
from agent.duplex.resending import forget_unread
from agent.duplex.store import Strand, Tx
from agent.duplex.tables import connection, set_connection
from agent.errors import A_PROHIBITED, A_VERSION, INTERNAL, AgentError, PeerFault, Prohibited
from protocol.agent.e2e_params import E2E_PARAMS, E2eKeys, E2eParams
from protocol.agent.envelopes import RatchetKeyEnvelope
from protocol.agent.errors import RatchetError
from protocol.agent.messages import RatchetReady
from protocol.agent.ratchet import creator_ratchet, joiner_ratchet
from protocol.agent.ratchet_sync import SyncState, sends_first
from protocol.agent.versions import AGENT_SYNC, E2E_VERSIONS, pq_possible
from protocol.agent.x3dh import RatchetKem

RATCHET_KEY = "ratchet key"
"Kind of hash: of the keys that a peer sent."
RATCHET_SYNC = "RATCHET_SYNC"
"Other keys, when both sides had agreed already."


MAX_ROUNDS = 5
"Synchronisations that are started again; then the application decides."
Span = tuple[int, int]
ANSWERED, STUCK, PATIENT = (2, 10), (30, 60), (600, 1200)
"Seconds until then, at random between these: two sides that start at once may miss each other again."
PATIENT_GROWTH = 4
"How much longer each round waits for a peer of whom nothing is heard."
RECOVERED_AT_ONCE = 100


def enter(tx: Tx, connection_id: int, state: SyncState, error: str | None = None) -> None:
    set_connection(tx, connection_id, sync_state=state, sync_due=None, sync_keys=None)
    if state.may_send:
        set_connection(tx, connection_id, sync_rounds=0)
        tx.commands.add(Strand(connection_id))
        tx.hurried.add(Strand(connection_id))
    tx.events.append(RatchetSync(connection_id, state, error))


def start_sync(tx: Tx, connection_id: int, *, force: bool, pq: bool | None = None) -> None:
    """With `pq` post-quantum keys are offered from now on, or no more; nothing else can take them back."""
    conn = connection(tx.db, connection_id)
    if conn.kind is not ConnectionKind.DUPLEX or conn.agent_version < AGENT_SYNC:
        raise Prohibited("this connection cannot be synchronised")
    if not conn.sync_state.may_start and not force:
        raise Prohibited("there is no need to synchronise")
    if pq is not None:
        support = pq and pq_possible(conn.agent_version, E2E_VERSIONS.max)
        set_connection(tx, connection_id, pq_support=support)
    set_connection(tx, connection_id, sync_rounds=0)
    _start(tx, connection_id)


def _start(tx: Tx, connection_id: int) -> None:
    _send_keys(tx, connection(tx.db, connection_id), E2E_VERSIONS.max)
    enter(tx, connection_id, SyncState.STARTED)


# Synchronisations that do not end by themselves


def _plan_round(tx: Tx, connection_id: int, span: Span, keys: bytes | None = None) -> None:
    """Start another round some time from now, or answer the peer's keys."""
    conn = connection(tx.db, connection_id)
    if conn.sync_rounds < MAX_ROUNDS:
        least, most = span
        if span is PATIENT:  # a peer that is away gets all keys at once, in the end
            least, most = (seconds * PATIENT_GROWTH**conn.sync_rounds for seconds in span)
        due = tx.now + least + tx.secrets.below(most - least + 1)
        set_connection(tx, connection_id, sync_due=min(due, conn.sync_due or due), sync_keys=keys)


def not_synchronised(tx: Tx, conn: Connection) -> None:
    """The peer uses a ratchet that it should not have any more: it may have forgotten the synchronisation."""
    if conn.sync_state in (SyncState.STARTED, SyncState.AGREED):
        _plan_round(tx, conn.connection_id, STUCK, conn.sync_keys)


def due_rounds(db: sqlite3.Connection, now: int) -> list[int]:
    """Connections whose synchronisation is to be started again."""
    sql = "SELECT connection_id FROM connections WHERE sync_due <= ? AND NOT deleted LIMIT ?"
    return [connection_id for (connection_id,) in db.execute(sql, (now, RECOVERED_AT_ONCE))]


def start_due_rounds(tx: Tx) -> None:
    for connection_id in due_rounds(tx.db, tx.now):
        conn = connection(tx.db, connection_id)
        set_connection(tx, connection_id, sync_due=None, sync_keys=None, sync_rounds=conn.sync_rounds + 1)
        try:
            with tx.attempt():
                _start_again(tx, conn)
        except (PeerFault, AgentError) as error:
            tx.events.append(Failed(connection_id, str(error)))


def _start_again(tx: Tx, conn: Connection) -> None:
    if conn.sync_keys is None:
        _start(tx, conn.connection_id)
        _plan_round(tx, conn.connection_id, PATIENT)
    else:
        _answer(tx, conn, E2E_PARAMS.decode(conn.sync_keys))


# The keys of the peer


def _send_keys(tx: Tx, conn: Connection, version: int) -> E2eKeys:
    keys = tx.secrets.e2e_keys(conn.pq_support)
    put_keys(tx, conn.connection_id, keys)
    queue_ratchet_key(tx, conn, keys.params(version))
    return keys


def keys_received(tx: Tx, conn: Connection, envelope: RatchetKeyEnvelope) -> None:
    theirs = envelope.params
    if conn.kind is not ConnectionKind.DUPLEX:
        raise PeerFault(A_PROHIBITED, "ratchet keys")
    check_answers(tx, conn.connection_id)
    if seen_before(tx, conn.connection_id, RATCHET_KEY, theirs.hash):
        return
    if theirs.version not in E2E_VERSIONS:
        raise PeerFault(A_VERSION)
    if conn.sync_state is SyncState.AGREED:
        enter(tx, conn.connection_id, SyncState.REQUIRED, RATCHET_SYNC)
        tx.events.append(Failed(conn.connection_id, f"A_CRYPTO {RATCHET_SYNC}"))
        # If both only answered, or both only started, each would always miss the other's keys.
        _plan_round(tx, conn.connection_id, ANSWERED, None if conn.joined else E2E_PARAMS.encode(theirs))
        return
    keys = keys_of(tx.db, conn.connection_id) if conn.sync_state is SyncState.STARTED else None
    if keys is None:
        _answer(tx, conn, theirs)
        return
    _agree(tx, conn.connection_id, keys, theirs)
    # The peer may have seen our keys before it made these, and wait for others: send some if nothing comes.
    _plan_round(tx, conn.connection_id, PATIENT, E2E_PARAMS.encode(theirs))


def _answer(tx: Tx, conn: Connection, theirs: E2eParams) -> None:
    _agree(tx, conn.connection_id, _send_keys(tx, conn, theirs.version), theirs)
    _plan_round(tx, conn.connection_id, PATIENT)


def _agree(tx: Tx, connection_id: int, keys: E2eKeys, theirs: E2eParams) -> None:
    conn = connection(tx.db, connection_id)
    sending = sends_first(keys.params(theirs.version).hash, theirs.hash)
    try:
        if sending:
            kem = RatchetKem(keys.kem) if keys.kem else None
            ratchet = joiner_ratchet(keys, kem, theirs, E2E_VERSIONS.max, tx.secrets)
        else:
            ratchet = creator_ratchet(keys, theirs, E2E_VERSIONS.max, conn.pq_support)
    except RatchetError:
        raise PeerFault(INTERNAL, "ratchet keys") from None
    replace_ratchet(tx, connection_id, ratchet)
    forget_unread(tx, connection_id)
    enter(tx, connection_id, SyncState.AGREED)
    if sending:
        ready(tx, connection(tx.db, connection_id))


def ready(tx: Tx, conn: Connection) -> None:
    """EREADY: the first message of the new ratchet, from either side."""
    queue_message(tx, conn, RatchetReady(conn.last_rcv_id))
