"""Two servers, here the same one, are attacked in turn."""

from __future__ import annotations

import sys

import pytest

from tests.drills.compare import main


def test_both_are_attacked(capsys: pytest.CaptureFixture[str]) -> None:
    main(sys.executable, "tests/drills/test_calm.py")
    test, *rows = capsys.readouterr().out.splitlines()
    assert test == "tests/drills/test_calm.py::test_everybody_is_served"
    assert [row.split()[1] for row in rows] == ["before:", "after:"]
    assert all(row.count("p99") == 4 for row in rows)
