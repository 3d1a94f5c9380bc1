"""Errors of PostgreSQL and of its driver as the store's."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from store.interface import StoreUnavailable
from store.postgres_errors import CAUGHT, store_error, store_errors

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


async def fails_cleaning_up(started: asyncio.Event) -> None:
    """As a transaction whose connection is gone when it is to be rolled back."""
    with store_errors():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            raise asyncpg.InterfaceError("the underlying connection is closed")


async def test_a_clean_up_that_fails_does_not_take_the_place_of_a_cancellation() -> None:
    started = asyncio.Event()
    task = asyncio.ensure_future(fails_cleaning_up(started))
    await started.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_what_was_cancelled_before_may_clean_up_as_well_as_it_can() -> None:
    """The store is away, and it is told so: the rest of the clean-up goes on."""
    errors: list[Exception] = []

    async def leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                with store_errors():
                    raise OSError
            except StoreUnavailable as error:
                errors.append(error)

    task = asyncio.ensure_future(leave())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert errors
