"""PostgreSQL's errors as the store's, in words for an operator. Never a value, never the address."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from store.interface import StoreError, StoreUnavailable
from store.sql_store import Collision

BAD_ADDRESS = "has an address that makes no sense: check [STORE] url"
NO_SESSIONS = "is behind a pooler that keeps no sessions: set its pool_mode to session"

_MESSAGES: tuple[tuple[type[Exception], str], ...] = (
    (ssl.SSLError, "cannot be trusted, or fails at TLS: check sslmode and sslrootcert in the address"),
    (asyncpg.ClientConfigurationError, BAD_ADDRESS),
    (asyncpg.InvalidPasswordError, "refuses the password"),
    (asyncpg.InvalidAuthorizationSpecificationError, "refuses this user"),
    (asyncpg.InvalidCatalogNameError, "has no such database: create it first"),
    (asyncpg.InsufficientPrivilegeError, "lacks a permission: the user must own the database"),
    (asyncpg.DiskFullError, "cannot grow: its disk is full"),
    (asyncpg.TooManyConnectionsError, "has too many clients: lower pool_size or raise max_connections"),
    (asyncpg.ReadOnlySQLTransactionError, "is read-only: a standby? name the primary in the address"),
    (asyncpg.QueryCanceledError, "did not finish a statement in time"),
    (asyncpg.LockNotAvailableError, "did not get a lock in time"),
    (asyncpg.CannotConnectNowError, "is starting or stopping"),
    (asyncpg.AdminShutdownError, "is stopping"),
    (asyncpg.CrashShutdownError, "crashed"),
    (asyncpg.InvalidSQLStatementNameError, NO_SESSIONS),
    (asyncpg.DuplicatePreparedStatementError, NO_SESSIONS),
    (asyncpg.OutOfMemoryError, "is out of memory"),
    (asyncpg.PostgresConnectionError, "ended the connection"),
    (asyncpg.InterfaceError, "ended the connection"),
    (asyncpg.TargetServerAttributeNotMatched, "has no server that takes writes: name the primary, too"),
    (asyncpg.InternalClientError, "ended the connection"),
    (TimeoutError, "does not answer"),
    (OSError, "cannot be reached: check the address, files that it names, and that it runs"),
    (ValueError, BAD_ADDRESS),
)

RETRIED = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.UniqueViolationError,
    Collision,
)
"Another daemon was faster: the same call finds what it left and decides anew."

CAUGHT = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection that ends in the middle of something may confuse the driver
    OSError,
    TimeoutError,
)


def store_error(error: Exception) -> StoreError:
    for kind, message in _MESSAGES:
        if isinstance(error, kind):
            return StoreUnavailable(f"PostgreSQL {message} ({type(error).__name__})")
    return StoreError(f"PostgreSQL: {type(error).__name__} ({getattr(error, 'sqlstate', '')})")


@contextmanager
def store_errors(*more: type[Exception]) -> Iterator[None]:
    """PostgreSQL's errors, and `more`, as the store's.

    A task that was cancelled meanwhile ends: when the connection is gone as well, the driver's clean-up fails
    in the place of the cancellation, and whoever waits for a store that is away would wait for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    except (*CAUGHT, *more) as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise store_error(error) from None
