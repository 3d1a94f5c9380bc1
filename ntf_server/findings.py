"""What `ntf-server doctor` says, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ntf_server import checks


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    says: str


def ok(check: str, says: str) -> Finding:
    return Finding(check, Level.OK, says)


def warning(check: str, says: str) -> Finding:
    return Finding(check, Level.WARNING, says)


def problem(check: str, says: object) -> Finding:
    return Finding(check, Level.PROBLEM, checks.remedied(" ".join(str(says).split())))
