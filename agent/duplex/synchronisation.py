"""A new ratchet in place of one that went wrong: both send keys, the greater hash of keys sends first."""

from __future__ import annotations

from agent.duplex.events import Failed, RatchetSync
from agent.duplex.outgoing import check_answers, queue_message, queue_ratchet_key
from agent.duplex.ratchets import keys_of, put_keys, replace_ratchet, seen_before
from agent.duplex.records import Connection, ConnectionKind
from agent.duplex.store import Tx
from agent.duplex.tables import connection, set_connection
from agent.errors import A_PROHIBITED, A_VERSION, INTERNAL, PeerFault, Prohibited
from protocol.agent.e2e_params import E2eKeys, E2eParams
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


def enter(tx: Tx, connection_id: int, state: SyncState, error: str | None = None) -> None:
    set_connection(tx, connection_id, sync_state=state)
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
    _send_keys(tx, connection(tx.db, connection_id), E2E_VERSIONS.max)
    enter(tx, connection_id, SyncState.STARTED)


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
        return
    keys = keys_of(tx.db, conn.connection_id) if conn.sync_state is SyncState.STARTED else None
    if keys is None:
        keys = _send_keys(tx, conn, theirs.version)
    _agree(tx, conn.connection_id, keys, theirs)


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
    enter(tx, connection_id, SyncState.AGREED)
    if sending:
        ready(tx, connection(tx.db, connection_id))


def ready(tx: Tx, conn: Connection) -> None:
    """EREADY: the first message of the new ratchet, from either side."""
    queue_message(tx, conn, RatchetReady(conn.last_rcv_id))
