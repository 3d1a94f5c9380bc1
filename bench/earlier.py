"""Earlier versions of the server, built from the history of the repository."""

from __future__ import annotations

import sys
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
    run("git", "worktree", "add", "--detach", source, commit, cwd=ROOT)
    try:
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
    finally:
        run("git", "worktree", "remove", "--force", source, cwd=ROOT)


def schema_of(commit: str) -> int:
    try:
        names = run("git", "ls-tree", "--name-only", commit, "store/migrations/", cwd=ROOT).split()
    except (OSError, AssertionError) as error:
        raise NoHistory(f"no commit {commit} here: this needs a clone with the history") from error
    return max(int(PurePath(name).name[:4]) for name in names if name.endswith(".up.sql"))
