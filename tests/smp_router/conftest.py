"""A router for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from smp_router.router import Router


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router.start() as running:
        yield running
