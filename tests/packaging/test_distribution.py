"""What others get: the wheel and the source distribution, used outside the repository."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.ntf_server.test_cli import ANY_PORT
from tests.test_architecture import ALLOWED, ROOT

TIMEOUT = 500
NOT_SOURCE = (
    ".*_cache",
    ".coverage*",
    ".git",
    ".hypothesis",
    ".venv*",
    "*.egg-info",
    "__pycache__",
    "build",
    "dist",
)
UV = Path(sys.executable).with_name("uv")


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean_environment() | (env or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Nothing that would lead Python back to the repository or a tool to a cache of the caller's choice."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "UV_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in left_out}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel made from it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(
        UV,
        "build",
        "--no-cache",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "-o",
        folder,
        cwd=folder / "source",
    )
    return folder


def new_environment(folder: Path) -> Path:
    """Its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def pip_install(python: Path, *arguments: object) -> None:
    """By pip, which is what users install with: the package index is the one that its configuration names."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python)
    run(*pip, "install", *arguments, cwd=python.parent)


def test_the_source_distribution_is_complete(built: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "CHANGELOG.md", "SECURITY.md", "scripts/test", "requirements/base.txt"):
        assert name in names
    for folder, kind in (("tests", ".py"), ("docs", ".md"), ("bench", ".py")):
        for path in (ROOT / folder).rglob(f"*{kind}"):
            assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_has_the_packages_and_nothing_else(built: Path) -> None:
    (file,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(file).namelist())
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(ALLOWED)
    for package in ALLOWED:
        assert f"{package}/py.typed" in names
    for path in (ROOT / "store" / "migrations").glob("*.sql"):
        assert path.relative_to(ROOT).as_posix() in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_the_wheel_runs_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = new_environment(tmp_path / "venv")
    locked = ROOT / "requirements" / "base.txt"
    pip_install(python, "--require-hashes", "-r", locked)
    pip_install(python, "--no-deps", wheel)
    command = python.with_name("ntf-server")
    use_server(command, tmp_path)
    assert "nothing is left behind" in run(command, "demo", cwd=tmp_path)
    for name in ("ntf-agent", "ntf-analytics", "smp-router"):
        assert "0.1.0" in run(command.with_name(name), "--version", cwd=tmp_path)


def test_pipx_installs_a_copy_of_the_repository(built: Path, tmp_path: Path) -> None:
    """As docs/install.md says; libraries are the newest that are allowed."""
    pip_install(new_environment(tmp_path / "venv"), "pipx")
    # By pip even where uv is on the path: uv does not read the package index of pip's configuration.
    settings = {
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "PIPX_DEFAULT_BACKEND": "pip",
    }
    run(tmp_path / "venv/bin/pipx", "install", ".", cwd=built / "source", env=settings)
    use_server(tmp_path / "bin/ntf-server", tmp_path)


def use_server(command: Path, folder: Path) -> None:
    """Version, `init`, `start`, stop."""
    assert re.fullmatch(r"ntf-server [\d.]+\n", run(command, "--version", cwd=folder))
    where = ("--config-dir", folder / "c")
    made = run(command, "init", "--ip", "127.0.0.1", *where, "--data-dir", folder / "d", cwd=folder)
    assert "Server address: ntf://" in made
    process = subprocess.Popen(
        list(map(str, (command, "start", *where))),
        cwd=folder,
        env=clean_environment() | ANY_PORT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Server address: ntf://")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.communicate()
