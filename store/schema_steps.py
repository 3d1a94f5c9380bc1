"""Schema versions: numbered SQL files, up and down, of one kind of database."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from store.interface import SchemaError

_FILE_NAME = re.compile(r"(\d{4})_(\w+)\.(up|down)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration in one direction; `version` is the schema's after it."""

    version: int
    name: str
    is_down: bool
    sql: str = field(repr=False)

    def __str__(self) -> str:
        return f"{'undo' if self.is_down else 'apply'} {self.name} -> version {self.version}"


class SchemaSteps:
    """The files of the package `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @property
    def latest(self) -> int:
        return max(number for number, _ in _files(self._folder))

    def check(self, version: int) -> None:
        """SchemaError for a database of a later program."""
        if version > self.latest:
            raise SchemaError(
                f"the database has schema version {version}, this program knows versions up to"
                f" {self.latest}: install the later program again or migrate down with it"
            )

    def plan(self, current: int, to: int) -> list[Migration]:
        """The steps from one version to another, in order."""
        if not 0 <= to <= self.latest:
            raise SchemaError(f"there is no schema version {to}: choose 0 to {self.latest}")
        if to >= current:
            return [self._step(number, number, "up") for number in range(current + 1, to + 1)]
        return [self._step(number - 1, number, "down") for number in range(current, to, -1)]

    def _step(self, version: int, number: int, direction: str) -> Migration:
        name, sql = _files(self._folder)[number, direction]
        return Migration(version, name, direction == "down", sql)


@cache
def _files(folder: str) -> dict[tuple[int, str], tuple[str, str]]:
    """(number, up or down) to (name, SQL)."""
    found = {}
    for file in resources.files(folder).iterdir():
        if match := _FILE_NAME.fullmatch(file.name):
            found[int(match[1]), match[3]] = (f"{match[1]}_{match[2]}", file.read_text(encoding="utf-8"))
    return found
