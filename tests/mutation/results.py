"""What became of the mutants of an area, and what nobody has explained yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNDETECTED = ("survived", "uncovered")


class Results:
    """By mutant; on the disk after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, entry: dict[str, Any]) -> None:
        self.entries[name] = entry
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.entries, indent=1, sort_keys=True) + "\n")
        partial.replace(self._path)

    def is_open(self, name: str, version: str, again: bool) -> bool:
        """No result yet, or one that may have become another."""
        entry = self.entries.get(name)
        if entry is None or entry["version"] != version:
            return True
        return again and entry["outcome"] in UNDETECTED


def unexplained(results: Mapping[str, Mapping[str, Any]], equivalent: Mapping[str, str]) -> list[str]:
    """Mutants that no test notices and nobody explained, and explanations of what is no survivor."""
    survivors = {name for name, entry in results.items() if entry["outcome"] in UNDETECTED}
    wrong = [
        f"explained, but noticed by a test or gone: {name}" for name in sorted({*equivalent} - survivors)
    ]
    return wrong + sorted(survivors - {*equivalent})
