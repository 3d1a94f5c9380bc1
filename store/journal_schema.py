"""The event journal's columns and event names: the contract between the daemon and the analytics.

Standard library only, so that both sides (and anything else that wants to read a journal) can import it.

An event is identified by (`writer`, `seq`): `writer` is drawn at random by each process that writes, `seq`
counts its events from 0. Whatever copies a segment may get, an event counts once.
"""

import hashlib
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

KEY_FILE_NAME = "journal.key"
KEY_SIZE = 32
PSEUDONYM_SIZE = 16
WRITER_ID_SIZE = 16

OPEN_PREFIX = ".open-"
"""Name prefix of segments still being written: readers (and Spark by itself) ignore names with a dot."""

ColumnType = Literal["timestamp_us", "string", "binary", "int64"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, type, whether every event has it, and what it means."""

    name: str
    type: ColumnType
    required: bool
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column("time", "timestamp_us", True, "when it happened, UTC, microseconds"),
    Column("event", "string", True, "one of JournalEvent"),
    Column("writer", "binary", True, "16 random bytes of the process that wrote the event"),
    Column("seq", "int64", True, "number of the event within its writer, from 0"),
    Column("server", "string", False, "host of the SMP server"),
    Column("provider", "string", False, "push provider tag"),
    Column("token", "binary", False, "pseudonym of the token, 16 bytes"),
    Column("subscription", "binary", False, "pseudonym of the subscription, 16 bytes"),
    Column("status_from", "string", False, "status before a change"),
    Column("status_to", "string", False, "status after a change"),
    Column("latency_us", "int64", False, "how long it took, microseconds"),
    Column("error", "string", False, "class of the error or reason, never its text"),
    Column("count", "int64", False, "how many it was about; absent means one"),
    Column("total", "int64", False, "the whole that count is a part of, or the other side's count"),
)


class JournalEvent(StrEnum):
    """Event names. The comment tells which columns an event fills, beside time, writer and seq."""

    TOKEN_REGISTERED = "token_registered"  # token, provider
    TOKEN_CONFIRMED = "token_confirmed"  # token, provider: the provider took the verification push
    TOKEN_VERIFIED = "token_verified"  # token, provider: became ACTIVE
    TOKEN_REPLACED = "token_replaced"  # token, provider: TRPL, new device token in the same record
    TOKEN_DELETED = "token_deleted"  # token, provider
    TOKEN_INVALID = "token_invalid"  # token, provider, error: BAD, TOPIC, EXPIRED or UNREGISTERED

    SUB_CREATED = "sub_created"  # subscription, token, server
    SUB_STATUS_CHANGED = "sub_status_changed"  # subscription, token, server, status_from, status_to
    SUB_DELETED = "sub_deleted"  # subscription, token, server

    SMP_CONNECTED = "smp_connected"  # server, latency_us
    SMP_DISCONNECTED = "smp_disconnected"  # server, error; count: subscriptions that became INACTIVE
    SMP_SERVICE_SUBSCRIBED = "smp_service_subscribed"  # server; count: under NSUBS, total: all of the server
    SMP_DRIFT = "smp_drift"  # server; count: ours, total: the router's
    SMP_HEALED = "smp_healed"  # server, latency_us; count: subscriptions associated again

    NTF_RECEIVED = "ntf_received"  # server, token, subscription (both absent: no such subscription)

    PUSH_SENT = "push_sent"  # token, provider, server of the oldest entry, latency_us since it came; count
    PUSH_FAILED = "push_failed"  # token, provider, server, error; count: entries given up
    PUSH_RETRIED = "push_retried"  # token, provider, server, error: one attempt failed, another follows
    PUSH_COALESCED = "push_coalesced"  # token, provider; count: entries that joined a waiting push
    PUSH_TRIMMED = "push_trimmed"  # token, provider; count: entries that did not fit
    CRON_SENT = "cron_sent"  # token, provider

    SERVER_STARTED = "server_started"  # count: subscriptions to be made active again
    SERVER_STOPPED = "server_stopped"  # orderly stop


def pseudonym(key: bytes, entity_id: bytes) -> bytes:
    """The journal's name for a token or subscription id: groups and joins, but only the key leads back."""
    return hashlib.blake2b(entity_id, digest_size=PSEUDONYM_SIZE, key=key, person=b"ntf-journal").digest()


class JournalKeyError(Exception):
    """The journal's key file cannot be used; the message says why, never what it holds."""


def load_key(path: Path) -> bytes:
    """The pseudonymisation key of an existing key file."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise JournalKeyError(f"cannot read {path}: {error.strerror}") from error
    if len(key) != KEY_SIZE:
        raise JournalKeyError(f"{path} is not a journal key: {len(key)} bytes instead of {KEY_SIZE}")
    return key


def load_or_create_key(path: Path) -> bytes:
    """The key at `path`; a new one, readable by the owner only, if there is none yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if not path.exists():
        try:
            with open(os.open(draft, flags, 0o600), "wb") as file:
                file.write(os.urandom(KEY_SIZE))
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike a rename, never replaces a key that another process just made
        except FileExistsError:
            pass
        except OSError as error:
            raise JournalKeyError(f"cannot create {path}: {error.strerror}") from error
        finally:
            draft.unlink(missing_ok=True)
    return load_key(path)
