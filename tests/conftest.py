"""For all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from ntf_server.journal import EventSink, Journal
from tests.open_databases import forget_connections, open_connections
from tests.postgres import PostgresCluster, running_cluster
from tests.strict_journal import strict
from tests.time_limit import pytest_timeout_set_timer

# A busy machine must not fail a property: no deadlines for an example.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# A failure is the same one in each run, and is reported at once: looking for a smaller one can take minutes.
settings.register_profile(
    "repeatable",
    settings.get_profile("random"),
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("repeatable")

__all__ = ["postgres", "pytest_timeout_set_timer"]


@pytest.fixture(autouse=True)
def strict_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever records an event that breaks the journal's contract is told at once; also without a journal."""
    for sink in (EventSink, Journal):
        monkeypatch.setattr(sink, "record", strict(sink.record))
    monkeypatch.setattr(EventSink, "is_on", True)


@pytest.fixture(autouse=True)
def no_database_stays_open() -> Iterator[None]:
    forget_connections()
    yield
    assert open_connections() == [], "SQLite connections were left open"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresCluster]:
    """A real one; each test takes a new database of it."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgres"])
def postgres_url(request: pytest.FixtureRequest) -> str:
    """Empty: the server keeps its data in a file."""
    if request.param == "sqlite":
        return ""
    cluster: PostgresCluster = request.getfixturevalue("postgres")
    return cluster.new_database()
