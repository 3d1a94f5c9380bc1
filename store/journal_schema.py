"""The event journal's columns and event names: the contract between the daemon and the analytics.

Standard library only, so that both sides (and anything else that wants to read a journal) can import it.

An event is identified by (`writer`, `seq`): `writer` is drawn at random by each process that writes, `seq`
counts its events from 0. Whatever copies a segment may get, an event counts once.
"""

import hashlib
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Literal

KEY_FILE_NAME = "journal.key"
KEY_SIZE = 32
PSEUDONYM_SIZE = 16
WRITER_ID_SIZE = 16

OPEN_PREFIX = ".open-"
"""Name prefix of segments still being written: readers (and Spark by itself) ignore names with a dot."""

ColumnType = Literal["timestamp_us", "string", "binary", "int64"]

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, type, whether every event has it, and what it means."""

    name: str
    type: ColumnType
    required: bool
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column("time", "timestamp_us", True, "when it happened, UTC; no finer than the event's resolution"),
    Column("event", "string", True, "one of JournalEvent"),
    Column("writer", "binary", True, "16 random bytes of the process that wrote the event"),
    Column("seq", "int64", True, "number of the event within its writer, from 0"),
    Column("epoch", "int64", True, "fingerprint of the key that made the pseudonyms"),
    Column("server", "string", False, "SMP server as host:port"),
    Column("provider", "string", False, "push provider tag"),
    Column("token", "binary", False, "pseudonym of the token, 16 bytes"),
    Column("subscription", "binary", False, "pseudonym of the subscription, 16 bytes"),
    Column("kind", "string", False, "what a push was for: message, or a kind of another source"),
    Column("status_from", "string", False, "status before a change"),
    Column("status_to", "string", False, "status after a change, or the one that is counted"),
    Column("latency_us", "int64", False, "how long it took, microseconds"),
    Column("error", "string", False, "class of the error or reason, never its text"),
    Column("count", "int64", False, "how many it was about; absent means one"),
    Column("expected", "int64", False, "how many there should have been"),
    Column("changed", "int64", False, "subscriptions whose status changed with it"),
    Column("total", "int64", False, "the whole that count is a part of"),
    Column("daemon", "string", False, "name of the daemon: stays the same over its restarts"),
    Column("uptime_us", "int64", False, "how long the process had run, by a clock that nobody sets"),
)
WRITERS_COLUMNS = ("time", "event", "writer", "seq", "epoch")
"Filled in for every event, by the journal itself."
GIVEN_COLUMNS = tuple(column.name for column in COLUMNS if column.name not in WRITERS_COLUMNS)
"Filled in by whoever records an event, as its contract says."


class JournalEvent(StrEnum):
    """Event names. `CONTRACT` says which columns they have."""

    TOKEN_REGISTERED = "token_registered"
    TOKEN_CONFIRMED = "token_confirmed"
    TOKEN_VERIFIED = "token_verified"
    TOKEN_REPLACED = "token_replaced"
    TOKEN_DELETED = "token_deleted"
    TOKEN_INVALID = "token_invalid"

    SUB_CREATED = "sub_created"
    SUB_STATUS_CHANGED = "sub_status_changed"
    SUB_DELETED = "sub_deleted"

    SMP_CONNECTED = "smp_connected"
    SMP_DISCONNECTED = "smp_disconnected"
    SMP_SERVICE_SUBSCRIBED = "smp_service_subscribed"
    SMP_SERVICE_RESET = "smp_service_reset"
    SMP_DRIFT = "smp_drift"
    SMP_HEALED = "smp_healed"
    SMP_SAMPLED = "smp_sampled"

    NTF_RECEIVED = "ntf_received"

    PUSH_SENT = "push_sent"
    PUSH_FAILED = "push_failed"
    PUSH_RETRIED = "push_retried"
    PUSH_COALESCED = "push_coalesced"
    PUSH_TRIMMED = "push_trimmed"
    CRON_SENT = "cron_sent"

    PROVIDER_DOWN = "provider_down"
    PROVIDER_UP = "provider_up"

    SERVER_STARTED = "server_started"
    SERVER_ALIVE = "server_alive"
    SERVER_STOPPED = "server_stopped"
    EVENTS_LOST = "events_lost"


class DeletionReason(StrEnum):
    """Why a token or subscription is no more: the `error` of its deletion."""

    REQUESTED = "requested"  # TDEL, SDEL
    SUPERSEDED = "superseded"  # its device verified another registration
    PURGED = "purged"  # housekeeping: never verified, or invalid for long


MESSAGE_PUSH = "message"
"The `kind` of pushes that carry notifications of SMP routers."
STATEMENT_PUSH, CALL_PUSH = "statement", "call"
"Of pushes that carry a statement: to be shown, or to ring."


@dataclass(frozen=True, slots=True)
class Contract:
    """Which columns an event must and may have beside `WRITERS_COLUMNS`, and how exact its time is.

    A router knows when it sent a notification, a provider when it took a push. Times of what they see are
    coarse, so that their logs cannot be joined with a journal to learn who is behind a pseudonym.
    """

    meaning: str
    must: frozenset[str]
    may: frozenset[str] = frozenset()
    resolution_us: int = 1

    def allows(self, columns: Set[str]) -> bool:
        """Whether an event may have just these columns."""
        return self.must <= columns <= self.must | self.may


def _event(meaning: str, must: str, resolution_us: int = 1, *, may: str = "") -> Contract:
    return Contract(meaning, frozenset(must.split()), frozenset(may.split()), resolution_us)


_TOKEN = "token provider"
_SUB = "subscription token server"
_PUSH = "token provider kind"

E = JournalEvent
CONTRACT: Mapping[JournalEvent, Contract] = {
    E.TOKEN_REGISTERED: _event("TNEW, also of a token that was invalid", _TOKEN, SECOND_US),
    E.TOKEN_CONFIRMED: _event("the provider took the verification push", _TOKEN, SECOND_US),
    E.TOKEN_VERIFIED: _event("became ACTIVE", _TOKEN, SECOND_US),
    E.TOKEN_REPLACED: _event("TRPL: a new device token in the same record", _TOKEN, SECOND_US),
    E.TOKEN_DELETED: _event(
        "gone with its subscriptions (count); error is a DeletionReason", f"{_TOKEN} error count", SECOND_US
    ),
    E.TOKEN_INVALID: _event(
        "error: BAD, TOPIC, EXPIRED or UNREGISTERED, as the provider said", f"{_TOKEN} error", SECOND_US
    ),
    E.SUB_CREATED: _event("SNEW", _SUB, SECOND_US),
    E.SUB_STATUS_CHANGED: _event(
        "one subscription; not noted: to PENDING, and what changes a router's subscriptions together",
        f"{_SUB} status_from status_to",
        SECOND_US,
    ),
    E.SUB_DELETED: _event(
        "error is a DeletionReason; none is written for those that go with their token",
        f"{_SUB} error",
        SECOND_US,
    ),
    E.SMP_CONNECTED: _event("latency_us: of connecting and logging in", "server latency_us"),
    E.SMP_DISCONNECTED: _event("changed: how many became INACTIVE", "server error changed"),
    E.SMP_SERVICE_SUBSCRIBED: _event(
        "NSUBS was answered; count: under it at the router, expected: by our count, total: all of the server,"
        " changed: how many became ACTIVE",
        "server count expected total changed",
    ),
    E.SMP_SERVICE_RESET: _event(
        "the service starts afresh (error: why); changed: how many became INACTIVE",
        "server error",
        may="changed",
    ),
    E.SMP_DRIFT: _event("count: the router's, expected: ours", "server count expected"),
    E.SMP_HEALED: _event(
        "count: how many were bound again; latency_us: since the drift was seen", "server count latency_us"
    ),
    E.SMP_SAMPLED: _event(
        "from time to time: how many queues are subscribed (ACTIVE) or wait to be (PENDING) in its session",
        "server status_to count",
    ),
    E.NTF_RECEIVED: _event(
        "token and subscription are absent if there is no such subscription",
        "server",
        MINUTE_US,
        may="token subscription count",
    ),
    E.PUSH_SENT: _event(
        "latency_us: since the oldest new entry came from server; count: new entries, total: with those sent"
        " again",
        f"{_PUSH} latency_us count total",
        MINUTE_US,
        may="server",
    ),
    E.PUSH_FAILED: _event("count: entries given up", f"{_PUSH} error count", MINUTE_US, may="server"),
    E.PUSH_RETRIED: _event("an attempt failed, another follows", f"{_PUSH} error", MINUTE_US, may="server"),
    E.PUSH_COALESCED: _event("count: new entries that joined a waiting push", f"{_PUSH} count", MINUTE_US),
    E.PUSH_TRIMMED: _event("count: entries that did not fit", f"{_PUSH} count", MINUTE_US),
    E.CRON_SENT: _event("a periodic push", _TOKEN, MINUTE_US),
    E.PROVIDER_DOWN: _event("takes no pushes; error: down or refused", "provider error"),
    E.PROVIDER_UP: _event(
        "takes pushes again; latency_us: how long it did not, count: how often a push had to wait for it",
        "provider latency_us count",
    ),
    E.SERVER_STARTED: _event("count: subscriptions to be made active again", "daemon uptime_us count"),
    E.SERVER_ALIVE: _event(
        "from time to time; total: subscriptions, count: active", "daemon uptime_us count total"
    ),
    E.SERVER_STOPPED: _event("orderly", "daemon uptime_us"),
    E.EVENTS_LOST: _event("count: events missing from the journal; error: why", "count error"),
}


def pseudonym(key: bytes, entity_id: bytes) -> bytes:
    """The journal's name for a token or subscription id: groups and joins, but only the key leads back."""
    keyed = _keyed(key).copy()
    keyed.update(entity_id)
    return keyed.digest()


@lru_cache(maxsize=1)
def _keyed(key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=PSEUDONYM_SIZE, key=key, person=b"ntf-journal")


def epoch_of(key: bytes) -> int:
    """Tells keys apart without telling anything about them: pseudonyms of two epochs never match."""
    digest = hashlib.blake2b(digest_size=8, key=key, person=b"ntf-epoch").digest()
    return int.from_bytes(digest) >> 1  # fits a signed column


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
