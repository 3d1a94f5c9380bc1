"""Earlier versions of the server, built from the history of the repository."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from store.migrate import STEPS
from tests.packaging.test_distribution import UV, run

ROOT = Path(__file__).parent.parent
PROGRAM = ("-P", "-m", "ntf_server")


class NoHistory(Exception):
    """The commit is not here: a source distribution, or a clone without depth."""


@dataclass(frozen=True)
class Version:
    """The Python of the environment that the server is installed in, and the newest schema it knows."""

    python: Path
    schema: int

    def run(self, *arguments: object) -> str:
        """One command of the server."""
        return run(self.python, *PROGRAM, *arguments, cwd=ROOT)


HERE = Version(Path(sys.executable), STEPS.latest)


def build(commit: str, folder: Path) -> Version:
    """A wheel of that commit in an environment of its own, with the libraries that it was locked to."""
    schema = schema_of(commit)
    source, python = folder / "source", folder / "venv/bin/python"
    with checked_out(commit, source):
        run(UV, "build", "--wheel", "--no-build-isolation", "--python", HERE.python, "-o", folder, cwd=source)
        run(UV, "venv", "--python", HERE.python, folder / "venv", cwd=folder)
        install, (wheel,) = (UV, "pip", "install", "--python", python), folder.glob("*.whl")
        lock = source / "requirements/base.txt"
        if lock.exists():
            run(*install, "--require-hashes", "-r", lock, cwd=folder)
            run(*install, "--no-deps", wheel, cwd=folder)
        else:
            run(*install, "-c", source / "constraints.txt", wheel, cwd=folder)
        return Version(python, schema)


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[None]:
    """The files of that commit, there and for a while."""
    _from_history(commit, "worktree", "add", "--detach", folder, commit)
    try:
        yield
    finally:
        run("git", "worktree", "remove", "--force", folder, cwd=ROOT)


def _from_history(commit: str, *command: object) -> str:
    try:
        return run("git", *command, cwd=ROOT)
    except (OSError, AssertionError) as error:
        raise NoHistory(f"no commit {commit} here: this needs a clone with the history") from error


def schema_of(commit: str) -> int:
    names = _from_history(commit, "ls-tree", "--name-only", commit, "store/migrations/").split()
    return max(int(PurePath(name).name[:4]) for name in names if name.endswith(".up.sql"))
