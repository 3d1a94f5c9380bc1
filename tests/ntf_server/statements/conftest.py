from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ntf_demo.fake_node.server import FakeNode


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    async with FakeNode() as running:
        yield running
