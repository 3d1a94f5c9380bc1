"""Results of a run, as data: written as JSON, read back, and described with the machine they come from."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import ssl
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from bench.measure import Peer, Row

SCHEMA = 1
LIBRARIES = (
    "PyNaCl",
    "cryptography",
    "pyOpenSSL",
    "pycurl",
    "aioapns",
    "aiosqlite",
    "asyncpg",
    "pyarrow",
    "pyspark",
    "duckdb",
)
"Whose versions change figures."


@dataclass(frozen=True, kw_only=True)
class Machine:
    cpu: str
    cores: int
    memory_gb: int
    system: str
    python: str
    sqlite: str
    openssl: str
    libraries: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """What one part measured, and on how busy a machine: load averages of a minute."""

    name: str
    options: Mapping[str, Any]
    rows: Sequence[Row]
    repeats: int
    seconds: float
    load: tuple[float, float]
    "Before and after."
    yardstick: Sequence[float]
    "Microseconds of CPU of a bare Ed25519 verification, before each repeat."
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Results:
    started: str
    commit: str
    quick: bool
    machine: Machine
    load: tuple[float, float]
    seconds: float
    parts: Sequence[PartResult] = field(default_factory=tuple)

    def part(self, name: str) -> PartResult | None:
        return next((part for part in self.parts if part.name == name), None)


def joined(repeats: Iterable[Sequence[Row]]) -> list[Row]:
    """The rows of all repeats as one, with all their values."""
    rows: dict[str, Row] = {}
    for row in (row for repeat in repeats for row in repeat):
        if (before := rows.get(row.name)) is None:
            rows[row.name] = row
            continue
        peer = row.peer
        if peer is not None and before.peer is not None:
            peer = Peer(peer.name, before.peer.values + peer.values, peer.aim)
        rows[row.name] = Row(row.name, row.unit, before.values + row.values, row.aim, peer)
    return list(rows.values())


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(psutil.virtual_memory().total / 1e9),
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        openssl=ssl.OPENSSL_VERSION.split()[1],
        libraries={name: found for name in LIBRARIES if (found := _version(name))},
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def this_commit() -> str:
    """Empty where there is no repository; a plus where files differ from the commit."""
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty=+"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


class UnreadableResults(Exception):
    """The file holds no results that this program can read; the message says why."""


def write(results: Results, path: Path) -> None:
    """As a whole, or not at all."""
    data = {"schema": SCHEMA, **asdict(results)}
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(_rounded(data), indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read(path: Path) -> Results:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (schema := data.pop("schema", None)) != SCHEMA:
            raise UnreadableResults(f"{path}: schema {schema}, this program reads {SCHEMA}")
        parts = [_part(part) for part in data.pop("parts")]
        machine = Machine(**data.pop("machine"))
        return Results(**data | {"load": tuple(data["load"])}, machine=machine, parts=parts)
    except OSError as error:
        raise UnreadableResults(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UnreadableResults(f"{path} holds no results of a run") from None


def _part(data: dict[str, Any]) -> PartResult:
    rows = [_row(row) for row in data.pop("rows")]
    return PartResult(**data | {"load": tuple(data["load"])}, rows=rows)


def _row(data: dict[str, Any]) -> Row:
    peer = data["peer"]
    if peer is not None:
        peer = Peer(peer["name"], tuple(peer["values"]), peer["aim"])
    return Row(data["name"], data["unit"], tuple(data["values"]), data["aim"], peer)


def _rounded(value: Any) -> Any:
    """Four digits are more than any of these figures is good for."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
