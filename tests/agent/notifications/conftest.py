"""Real servers, Alice's phone and Bob."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ntf_demo.demo import Playground, playground
from tests.agent.duplex.world import Person, person
from tests.agent.notifications.world import Clock, phone


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Playground]:
    async with playground(tmp_path / "servers") as running:
        yield running


@pytest.fixture
async def alice(world: Playground, tmp_path: Path, clock: Clock) -> AsyncIterator[Person]:
    async with phone(tmp_path / "alice.db", world.router.address, clock=clock) as made:
        yield made


@pytest.fixture
async def bob(world: Playground, tmp_path: Path) -> AsyncIterator[Person]:
    async with person(tmp_path / "bob.db", world.router.address) as made:
        yield made
