"""Notes every SQLite connection that the tests' own process opens: a test that leaves one open fails.

An open connection keeps its file, its locks and its log. Python 3.13 and later warn of one when it is
collected, which may be in another test; earlier versions say nothing.
"""

from __future__ import annotations

import sqlite3
import sys
import traceback

LIBRARIES = ("site-packages", "/lib/python3")

_opened: list[tuple[sqlite3.Connection, str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "sqlite3.connect/handle":
        (connection,) = arguments
        assert isinstance(connection, sqlite3.Connection)
        stack = [
            f for f in traceback.extract_stack()[:-1] if not any(part in f.filename for part in LIBRARIES)
        ]
        _opened.append((connection, f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "by a library"))


sys.addaudithook(_note)


def forget_connections() -> None:
    _opened.clear()


def open_connections() -> list[str]:
    """Where those were opened that are open now, except the forgotten ones."""
    return [place for connection, place in _opened if _is_open(connection)]


def _is_open(connection: sqlite3.Connection) -> bool:
    try:
        return connection.total_changes >= 0  # the one question that any thread may ask
    except sqlite3.ProgrammingError:
        return False
