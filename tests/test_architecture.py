"""Rules that reviews would forget: who may import whom, and how long things may get."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.statuses import SubState, TokenStatus

ROOT = Path(__file__).parent.parent
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60

ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "transport": {"protocol"},
    "store": {"protocol"},
    "smp_client": {"protocol", "transport"},
    "ntf_server": {"protocol", "transport", "smp_client", "store"},
    "smp_router": {"protocol", "transport", "smp_client", "store"},
    "agent": {"protocol", "transport", "smp_client", "store"},
    "analytics": {"protocol", "store"},
    "ntf_demo": {"protocol", "transport", "smp_client", "ntf_server", "smp_router", "agent"},
}
OURS = {*ALLOWED, "tests", "bench"}
PURE_OF = {"asyncio", "socket", "ssl", "time", "random", "secrets", "logging", "threading", "os"}
"What the protocol may not reach: no sockets, clocks, randomness or logs."


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Top-level names of all imports, wherever in the file they stand."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            assert node.module is not None
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", modules(*ALLOWED), ids=name)
def test_imports(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = ALLOWED[package] | {package}
    assert set(imported(path)) & OURS <= allowed


@pytest.mark.parametrize("path", modules("protocol"), ids=name)
def test_the_protocol_is_pure(path: Path) -> None:
    assert not set(imported(path)) & PURE_OF
    assert not [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("path", modules(*ALLOWED, "tests", "bench"), ids=name)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


STATE_NAMES = {*TokenStatus, *SubState}
ROLES = {"NtfStore", "SqlStore", "SqliteStore", "PostgresStore"}
"All roles of the store at once: for those who make it, not for those who use it."
MAKE_THE_STORE = {"ntf_server/stores.py"}
INTO_A_STORE = re.compile(r"\bstore\._[a-z]|setattr\([\w.]*\bstore,")


@pytest.mark.parametrize("path", modules("store"), ids=name)
def test_tables_decide_about_states(path: Path) -> None:
    """SQL takes states from the tables of `protocol.statuses`: none is written out in a statement."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            written = {word for word in re.findall(r"'([A-Z,]+)'", node.value) if word in STATE_NAMES}
            assert not written, f"line {node.lineno}: {written}"


@pytest.mark.parametrize("path", modules("ntf_server"), ids=name)
def test_consumers_see_their_role_of_the_store(path: Path) -> None:
    if name(path) not in MAKE_THE_STORE:
        assert not ROLES & set(re.findall(r"\w+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", modules("tests"), ids=name)
def test_no_test_reaches_into_a_store(path: Path) -> None:
    """Faults come through the roles: `tests/faults.py`."""
    if path != Path(__file__):
        assert INTO_A_STORE.search(path.read_text(encoding="utf-8")) is None


def test_all_packages_are_looked_at() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tests", "bench"} <= set(ALLOWED)
    assert len(modules("protocol")) > 15


WIDE = {"Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup", "CancelledError"}
NO_TASK_GROUPS = {"store/sql_store.py", "store/sqlite_engine.py", "store/postgres_engine.py"}
"May not import the helper, has nothing that raises groups, and its tasks end by a message."


def caught(kind: ast.expr | None) -> set[str]:
    """The last parts of the names in an `except` clause or a call of `suppress`."""
    if kind is None:
        return {"BaseException"}
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in kinds}


def waits(nodes: list[ast.stmt]) -> bool:
    found = (node for statement in nodes for node in ast.walk(statement))
    return any(isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor) for node in found)


def goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether a handler may go on although its task was cancelled."""
    calls = [getattr(node.func, "id", "") for node in ast.walk(handler) if isinstance(node, ast.Call)]
    return "raise_if_cancelled" not in calls and not isinstance(handler.body[-1], ast.Raise)


@pytest.mark.parametrize("path", modules(*ALLOWED), ids=name)
def test_cancellation_always_wins(path: Path) -> None:
    """See `transport/cancellation.py`."""
    if name(path) in NO_TASK_GROUPS:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{name(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Try | ast.TryStar) and waits(node.body):
            for handler in node.handlers:
                wide = isinstance(node, ast.TryStar) or caught(handler.type) & WIDE
                assert not (wide and goes_on(handler)), where
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert not caught(ast.Tuple(node.args)) & WIDE, where
        if isinstance(node, ast.Call):  # in Python 3.11 it loses a cancellation that comes with the result
            assert ast.unparse(node.func) != "asyncio.wait_for", where


OPEN_DATABASES = {"store/database_files.py", "store/sqlcipher.py"}
IN_MEMORY = {"store/schema_doc.py"}
CONNECTING = re.compile(r"\b(?:sqlite3|dbapi2|aiosqlite)\s*\.\s*connect\b|from (?:sqlite3|aiosqlite) import")


@pytest.mark.parametrize("path", modules(*ALLOWED), ids=name)
def test_databases_are_opened_in_one_place(path: Path) -> None:
    """Whoever opens an SQLite file otherwise may drop the locks of those who have it open."""
    text = path.read_text(encoding="utf-8")
    if name(path) in IN_MEMORY:
        text = text.replace('sqlite3.connect(":memory:"', "")
    assert bool(CONNECTING.search(text)) == (name(path) in OPEN_DATABASES)
