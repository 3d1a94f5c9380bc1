"""Which tests come by a line, and what they cost: found out once for each test file."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant


@dataclass(frozen=True, slots=True)
class Passed:
    """A test that passed without a mutant."""

    cpu: float
    wall: float
    lines: Mapping[str, Mapping[str, list[int]]]
    "By module and function, counted from the function's first line: they stay right when others change."


class Records:
    """By test file; on the disk after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def is_new(self, file: Path) -> bool:
        return bool(self._files.get(str(file), {}).get("version") != _version(file))

    def add(self, file: Path, tests: Mapping[str, Mapping[str, Any]]) -> None:
        self._files[str(file)] = {"version": _version(file), "tests": tests}
        self._path.write_text(json.dumps(self._files) + "\n")

    def of(self, files: Iterable[Path]) -> dict[str, Passed]:
        return {
            name: Passed(**test)
            for file in files
            for name, test in self._files.get(str(file), {"tests": {}})["tests"].items()
        }


def _version(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


@dataclass(slots=True)
class Tests:
    """Those that may be run for mutants, the most promising ones first."""

    passed: Mapping[str, Passed]
    _by_place: dict[tuple[str, str, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    _by_function: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    _tries: Counter[str] = field(default_factory=Counter)
    _kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name, test in self.passed.items():
            for module, functions in test.lines.items():
                for function, offsets in functions.items():
                    self._by_function[module, function].add(name)
                    for offset in offsets:
                        self._by_place[module, function, offset].append(name)

    def of(self, module: str, mutant: Mutant, most_cpu: float) -> list[str]:
        """No more than there is CPU time for. What runs during the import belongs to all its tests."""
        place = mutant.place
        found = set(self._by_place.get((module, *place), ()))
        found = found or self._by_function.get((module, place[0]), set())
        if not found:
            found = set().union(*(names for (of, _), names in self._by_function.items() if of == module))
        refused = set(self._by_place.get((module, *mutant.refused), ())) if mutant.refused else set()
        if mutant.passed:
            refused |= found - set(self._by_place.get((module, *mutant.passed), ()))
        chosen: list[str] = []
        total = 0.0
        for name in sorted(found, key=lambda name: (name not in refused, self._promise(name))):
            total += self.passed[name].cpu
            if chosen and total > most_cpu:
                continue
            chosen.append(name)
        return chosen

    def come_by(self, module: str, mutant: Mutant) -> bool:
        """False for what runs during the import only, or never."""
        return bool(self._by_function.get((module, mutant.place[0])))

    def count(self, tried: Iterable[str], killer: str | None = None) -> None:
        self._tries.update(tried)
        if killer is not None:
            self._kills[killer] += 1

    def _promise(self, name: str) -> tuple[float, str]:
        """Kills to be expected for a second of CPU time, as a number that is smaller for more."""
        rate = (self._kills[name] + 0.3) / (self._tries[name] + 1.0)
        return -rate / (self.passed[name].cpu + 0.01), name
