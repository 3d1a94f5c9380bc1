"""Columns to records, for every implementation of the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from protocol.addresses import SmpServer
from protocol.device_token import decode_device_token
from protocol.encoding import EntityId, Reader, Writer, new_tuple
from protocol.statuses import SubState, SubStatus, TokenStatus
from store.interface import KEPT_NOTIFICATIONS
from store.records import (
    DeletedSubscription,
    LastNotification,
    QueueRow,
    ServerKey,
    ServerRecord,
    ServiceCredentials,
    StoredRouter,
    SubKey,
    SubscriptionRecord,
    TokenKey,
    TokenRecord,
)
from store.sql_store import smp_server
from store.statement_records import (
    Channel,
    DeviceRegistration,
    GatewayKey,
    GatewaySubscription,
    Outcome,
    PushKey,
    PushRecord,
    RegistrationKey,
    StatementPush,
)
from store.sums import STATE_COLUMNS, STATES, state_now

DELETED = "deleted"
"Stands in the place of a token's status while its rows are deleted; no state of the protocol."

DELETED_PAGE = 500
"Subscriptions deleted in one transaction: bounds how long other writes wait."

TOKEN_COLUMNS = """
token_key, token_id, device_token, verify_key, dh_private, dh_secret, code, status, verified, cron_minutes,
cron_due, updated_on
"""
SERVER_COLUMNS = """
server_key, hosts, port, key_hash, chain, private_key, service_id, associated_count, associated_hash
"""
QUEUE_COLUMNS = "sub_key, notifier_id, notifier_key, associated"


_TOKEN_STATUSES = {status.value: status for status in TokenStatus}


def token_record(row: Sequence[Any]) -> TokenRecord:
    """From `TOKEN_COLUMNS`."""
    return TokenRecord(
        key=TokenKey(row[0]),
        token_id=EntityId(row[1]),
        device_token=decode_device_token(row[2]),
        verify_key=row[3],
        dh_private=row[4],
        dh_secret=row[5],
        code=row[6],
        status=_TOKEN_STATUSES[row[7]],
        verified=bool(row[8]),
        cron_minutes=row[9],
        cron_due=row[10],
        updated_on=row[11],
    )


_DECOY_TOKEN = (0, b"", b"AN\0", b"", b"", b"", b"", TokenStatus.ACTIVE, 1, 0, None, 0)


def token_or_none(row: Sequence[Any]) -> TokenRecord | None:
    """Of an outer join. Unknown ids cost what known ones do."""
    exists = row[0] is not None
    found = token_record(row if exists else _DECOY_TOKEN)
    return found if exists else None


SUBSCRIPTION_COLUMNS = f"""
s.sub_key, s.detail, t.token_id, t.verify_key, {STATE_COLUMNS}
"""

_BARE = {state: SubStatus(state) for state in SubState}


def _status(state: SubState, detail: str) -> SubStatus:
    return SubStatus(state, detail) if detail else _BARE[state]


_DECOY_SUBSCRIPTION = (0, "", b"", b"", SubState.NEW, 0, 0, 0, 0)


def subscription_or_none(row: Sequence[Any]) -> SubscriptionRecord | None:
    """From `SUBSCRIPTION_COLUMNS`, of an outer join with token and router, also without them. Unknown ids
    cost what known ones do."""
    exists = row[2] is not None
    found = _subscription(row if exists else _DECOY_SUBSCRIPTION)
    return found if exists else None


def _subscription(row: Sequence[Any]) -> SubscriptionRecord:
    key, detail, token_id, verify_key, state, associated, as_of, lost, served = row
    now = state_now(STATES[state], associated, as_of, lost, served)
    return new_tuple(SubscriptionRecord, (key, _status(now, detail), bool(associated), token_id, verify_key))


def deleted_subscription(row: Sequence[Any]) -> DeletedSubscription:
    """From server key, notifier id, associated, subscription id, token id, hosts, port, key hash."""
    server_key, notifier_id, associated, subscription_id, token_id, *address = row[:8]
    return DeletedSubscription(
        server_key, notifier_id, bool(associated), subscription_id, token_id, smp_server(*address)
    )


def stored_router(row: Sequence[Any]) -> StoredRouter:
    """From server key, hosts, port, key hash, whether any queue was ever subscribed."""
    return StoredRouter(ServerKey(row[0]), smp_server(row[1], row[2], row[3]), bool(row[4]))


def server_record(row: Sequence[Any]) -> ServerRecord:
    """From `SERVER_COLUMNS`."""
    return ServerRecord(
        key=ServerKey(row[0]),
        server=smp_server(row[1], row[2], row[3]),
        credentials=None if row[4] is None else ServiceCredentials(chain=_chain(row[4]), private_key=row[5]),
        service_id=None if row[6] is None else EntityId(row[6]),
        associated_count=row[7],
        associated_hash=row[8],
    )


def _chain(encoded: bytes) -> tuple[bytes, ...]:
    return tuple(Reader(encoded).pull_nonempty(Reader.pull_large))


def encoded_chain(credentials: ServiceCredentials) -> bytes:
    w = Writer()
    w.push_nonempty(credentials.chain, Writer.push_large)
    return w.value()


def queue_row(row: Sequence[Any]) -> QueueRow:
    """From `QUEUE_COLUMNS`."""
    return QueueRow(SubKey(row[0]), EntityId(row[1]), row[2], bool(row[3]))


def last_notification(row: Sequence[Any], *, sent: bool) -> LastNotification:
    """From sub key, seq, hosts, port, key hash, notifier id, received at, nonce, meta, spelling."""
    sub_key, seq, hosts, port, key_hash, notifier_id, received_at, nonce, meta, spelling = row
    server = spelled_server(hosts, port, key_hash, spelling)
    return new_tuple(LastNotification, (sub_key, seq, server, notifier_id, received_at, nonce, meta, sent))


_SEQ = attrgetter("seq")


def newest_entries(
    unsent: list[LastNotification], sent: Iterable[LastNotification]
) -> tuple[LastNotification, ...]:
    """What a push shows of a token: what is unsent and, while there is room, what was sent last."""
    room = KEPT_NOTIFICATIONS - len(unsent)
    if room > 0:
        # So few are unsent that all of them were loaded: a sent one of the same queue shows as out of date.
        queues = {entry.sub_key for entry in unsent}
        kept = [entry for entry in sent if entry.sub_key not in queues]
        kept.sort(key=_SEQ)
        unsent += kept[-room:]
    unsent.sort(key=_SEQ)
    return tuple(unsent)


def spelled_server(hosts: str, port: str, key_hash: bytes, spelling: str) -> SmpServer:
    """As the client wrote it, whatever it is known by."""
    if spelling:
        hosts, _, port = spelling.rpartition(":")
    return smp_server(hosts, port, key_hash)


# The statement gateway


def statement_subscription(row: Sequence[Any]) -> GatewaySubscription:
    """From key, id, client, channel, device token, call, times."""
    return GatewaySubscription(
        key=GatewayKey(row[0]),
        subscription_id=row[1],
        client_id=row[2],
        channel=Channel(row[3]),
        device_token=decode_device_token(row[4]),
        is_call=bool(row[5]),
        created_at=row[6],
        updated_at=row[7],
    )


def statement_push(row: Sequence[Any]) -> StatementPush:
    """From key, subscription key and id, client, hash, channel, call, proven, device token, sender, topic,
    data, signature, expiry, time."""
    return StatementPush(
        key=PushKey(row[0]),
        subscription_key=GatewayKey(row[1]),
        subscription_id=row[2],
        client_id=row[3],
        statement_hash=row[4],
        channel=Channel(row[5]),
        is_call=bool(row[6]),
        is_proven=bool(row[7]),
        device_token=decode_device_token(row[8]),
        sender=row[9],
        topic=row[10],
        data=row[11],
        signature=row[12],
        expiry=row[13],
        received_at=row[14],
    )


def push_record(row: Sequence[Any]) -> PushRecord:
    """From key, subscription id, hash, sender, topic, times, outcome."""
    return PushRecord(row[1], row[2], row[3], row[4], row[5], row[6], Outcome(row[7]))


def registration(row: Sequence[Any]) -> DeviceRegistration:
    """From key, subscription id, client, channel, device token, call, code, time."""
    return DeviceRegistration(
        key=RegistrationKey(row[0]),
        subscription_id=row[1],
        client_id=row[2],
        channel=Channel(row[3]),
        device_token=decode_device_token(row[4]),
        is_call=bool(row[5]),
        code=row[6],
        created_at=row[7],
    )
