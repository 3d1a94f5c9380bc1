"""A running push side per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ntf_server.clock import SystemClock
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.dispatch.world import World, make_world, running


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with make_world(tmp_path, SystemClock()) as world, running(world.dispatcher):
        yield world


@pytest.fixture
async def slow_world(tmp_path: Path, clock: SimulatedClock) -> AsyncIterator[World]:
    """Its time moves only when told."""
    async with (
        make_world(tmp_path, clock, call_later=clock.call_later) as world,
        running(world.dispatcher),
    ):
        yield world
