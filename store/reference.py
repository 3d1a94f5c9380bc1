"""Rows of the deployed server's PostgreSQL as rows of ours. What cannot be read says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from protocol.addresses import SmpServer, parse_smp_server
from protocol.crypto import (
    Ed25519PrivateKey,
    X25519PrivateKey,
    decode_private_key,
    decode_public_key,
    is_weak,
    sha256,
)
from protocol.device_token import ApnsToken, Provider, encode_device_token
from protocol.encoding import NONCE_SIZE, Reader, b64
from protocol.errors import DecodeError
from protocol.hiding import hides_bytes
from protocol.ids_hash import NO_IDS, ids_hash, xor
from protocol.statuses import MAX_ERROR_DETAIL, RETRIED_SLOWLY, SUBSCRIBABLE, SubState, SubStatus, TokenStatus
from store.policy import retry_delay
from store.sql_store import address_columns
from store.tables import Row

Source = Mapping[str, Any]
"A row as it was read, by column."

PROVIDERS = {
    "apns_dev": Provider.APNS_DEV,
    "apns_prod": Provider.APNS_PROD,
    "apns_test": Provider.APNS_TEST,
    "apns_null": Provider.APNS_NULL,
}
_SECRET_SIZE = 32
_MAX_ID = 255
_MAX_DEVICE_TOKEN = 255
_DAY = 86_400
_MINUTE = 60


class Unreadable(Exception):
    """A row that has no place in our store; the message says why."""


class Moment(NamedTuple):
    """When an import began: rows that it makes twice are the same."""

    now: int

    @property
    def today(self) -> int:
        return self.now - self.now % _DAY


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (DecodeError, ValueError, KeyError, TypeError, AttributeError):
        raise Unreadable(f"{what} cannot be read") from None


def _bytes(row: Source, column: str, size: int | None = None) -> bytes:
    value = row[column]
    if not isinstance(value, bytes) or not value or len(value) > _MAX_ID or size not in (None, len(value)):
        raise Unreadable(f"{column} has a wrong size")
    return value


def token_row(row: Source, moment: Moment) -> Row:
    with _reading("push_provider"):
        provider = PROVIDERS[row["push_provider"]]
    device_token = row["push_provider_token"]
    if not device_token or len(device_token) > _MAX_DEVICE_TOKEN:
        raise Unreadable("push_provider_token has a wrong size")
    with _reading("verify_key"):
        verify_key = decode_public_key(row["verify_key"])
    if is_weak(verify_key):
        raise Unreadable("verify_key is a point of small order: anybody could use this token")
    with _reading("dh_priv_key"):
        private = decode_private_key(row["dh_priv_key"])
    if not isinstance(private, X25519PrivateKey):
        raise Unreadable("dh_priv_key is no X25519 key")
    with _reading("status"):
        status = TokenStatus(row["status"])
    minutes = row["cron_interval"] or 0
    if minutes < 0:
        raise Unreadable("cron_interval is below 0")
    due = None
    if minutes:
        sent_at = row["cron_sent_at"]
        due = (moment.now if sent_at is None else sent_at) + minutes * _MINUTE
    return (
        row["key"],
        _bytes(row, "token_id"),
        encode_device_token(ApnsToken(provider, device_token)),
        row["verify_key"],
        private.raw,
        _bytes(row, "dh_secret", _SECRET_SIZE),
        _bytes(row, "reg_code"),
        status.value,
        int(status is TokenStatus.ACTIVE or row["has_subscriptions"]),
        minutes,
        due,
        moment.today if row["updated_at"] is None else row["updated_at"],
    )


@hides_bytes
class Queues(NamedTuple):
    """Of a router: what its row tells of them."""

    associated: int = 0
    digest: bytes = NO_IDS
    "Of the associated ids."
    active: int = 0
    active_associated: int = 0

    def with_row(self, row: Row) -> Queues:
        """One more, from `subscription_row`."""
        notifier_id, is_associated, is_active = row[4], bool(row[8]), row[6] == SubState.ACTIVE
        return Queues(
            self.associated + is_associated,
            xor(self.digest, ids_hash([notifier_id])) if is_associated else self.digest,
            self.active + is_active,
            self.active_associated + (is_associated and is_active),
        )


@hides_bytes
class RouterRow(NamedTuple):
    """A router and, if they can be read, the service credentials for it. Do not print."""

    key: int
    server: SmpServer
    "In its canonical form."
    spelling: str
    "Hosts and port as they were, if otherwise."
    service: tuple[bytes, bytes, bytes | None] | None
    "Chain, private key and service id."
    problem: str
    "Why there are no credentials although there were some."

    @property
    def has_service(self) -> bool:
        return self.service is not None and self.service[2] is not None

    def row(self, queues: Queues) -> Row:
        service = (None, None, None) if self.service is None else self.service
        turns = (0, 0)
        associated = queues.associated, queues.digest
        active = queues.active, queues.active_associated
        return (self.key, *address_columns(self.server), *service, *associated, *turns, *active)


def router(row: Source) -> RouterRow:
    with _reading("the address"):
        key_hash = row["smp_keyhash"].decode("ascii")
        port = f":{row['smp_port']}" if row["smp_port"] else ""
        written = parse_smp_server(f"smp://{key_hash}@{row['smp_host']}{port}")
    server = written.canonical
    problem, service = "", None
    try:
        service = _service(row)
    except Unreadable as error:
        problem = str(error)
    spelling = "" if server == written else written.spelling
    return RouterRow(row["smp_server_id"], server, spelling, service, problem)


def _service(row: Source) -> tuple[bytes, bytes, bytes | None] | None:
    chain, private_key = row["ntf_service_cert"], row["ntf_service_priv_key"]
    if chain is None or private_key is None:
        return None
    with _reading("ntf_service_cert"):
        r = Reader(chain)
        certificates = r.pull_nonempty(Reader.pull_large)
        r.check_end()
    with _reading("ntf_service_priv_key"):
        key = decode_private_key(private_key)
    if not isinstance(key, Ed25519PrivateKey) or key.public.der not in certificates[0]:
        raise Unreadable("ntf_service_priv_key is not the Ed25519 key of ntf_service_cert")
    digest = row["ntf_service_cert_hash"]
    if digest is not None and digest not in {b64(sha256(certificate)) for certificate in certificates}:
        raise Unreadable("ntf_service_cert_hash is not that of ntf_service_cert")
    return chain, private_key, row["ntf_service_id"]


def subscription_row(row: Source, its_router: RouterRow, moment: Moment, *, keeps_service: bool) -> Row:
    with _reading("smp_notifier_key"):
        decode_private_key(row["smp_notifier_key"])
    with _reading("status"):
        status = SubStatus.parse(row["status"])
    detail = status.detail.encode("ascii", "replace")[:MAX_ERROR_DETAIL].decode().replace("\0", "?")
    waits = status.state in RETRIED_SLOWLY
    associated = keeps_service and row["ntf_service_assoc"] and status.state in SUBSCRIBABLE
    return (
        row["key"],
        _bytes(row, "subscription_id"),
        row["token_key"],
        its_router.key,
        _bytes(row, "smp_notifier_id"),
        row["smp_notifier_key"],
        status.state.value,
        detail if status.state is SubState.ERR else "",
        int(bool(associated)),
        int(waits),
        moment.now + retry_delay(0) if waits else None,
        its_router.spelling,
        0,
    )


def notification_row(row: Source) -> Row:
    """Of the table of sent ones: the deployed server pushes before it stores."""
    sent_at = row["sent_at"]
    if not isinstance(sent_at, datetime):
        raise Unreadable("sent_at is no time")
    meta = row["nmsg_data"]
    if not meta:
        raise Unreadable("nmsg_data is empty")
    nonce = _bytes(row, "nmsg_nonce", NONCE_SIZE)
    return row["token_key"], row["sub_key"], row["seq"], int(sent_at.timestamp()), nonce, meta
