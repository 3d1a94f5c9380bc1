"""Errors of PostgreSQL and of its driver as the store's."""

from __future__ import annotations

import asyncpg
import pytest

from store.interface import StoreUnavailable
from store.postgres_errors import CAUGHT, store_error

ERRORS = [
    kind
    for name in asyncpg.exceptions.__all__
    if issubclass(kind := getattr(asyncpg.exceptions, name), Exception) and not issubclass(kind, Warning)
]


def test_whatever_the_driver_raises_is_an_error_of_the_store() -> None:
    """What escaped would end the daemon."""
    assert len(ERRORS) > 200
    assert [kind for kind in ERRORS if not issubclass(kind, CAUGHT)] == []


@pytest.mark.parametrize("kind", [asyncpg.InternalClientError, asyncpg.InterfaceError])
def test_a_driver_that_is_confused_means_a_connection_that_ended(kind: type[Exception]) -> None:
    error = store_error(kind("another operation (2) is in progress"))
    assert isinstance(error, StoreUnavailable)
    assert str(error) == f"PostgreSQL ended the connection ({kind.__name__})"
