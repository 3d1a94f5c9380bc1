"""For all tests."""

from collections.abc import Iterator
from pathlib import Path

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

SECONDS = {
    "agent/test_cli.py": 5.0,
    "agent/test_process_kills.py": 10.0,
    "packaging/test_debian.py": 30.0,
    "packaging/test_distribution.py": 30.0,
    "test_whole_path.py": 30.0,
    "drills": 12.0,
    "analytics": 2.0,
    "bench": 1.0,
    "docs/test_commands.py": 0.5,
}
"What a test takes, roughly, by file or folder; others: OTHERS. It decides only which files begin first."
OTHERS = 0.02


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest begin first: none of them is left to one worker when the others have ended."""
    here, seconds = Path(__file__).parent, dict[Path, float]()
    for item in items:
        path = item.path.relative_to(here)
        one = SECONDS.get(str(path), SECONDS.get(path.parts[0], OTHERS))
        seconds[item.path] = seconds.get(item.path, 0.0) + one
    items.sort(key=lambda item: (-seconds[item.path], item.path))


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
