"""For the tests of connections."""

from collections.abc import Iterator

import pytest

from tests.agent.duplex.simulation import DATABASES


@pytest.fixture(autouse=True)
def closed_databases() -> Iterator[None]:
    with DATABASES:
        yield
