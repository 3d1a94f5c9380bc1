"""The container image: built by podman from `contrib/docker`, run as the compose file says.

Not part of the test suite: it needs root, minutes, and Debian's `mmdebstrap`, `podman` and `runc`. The base
image is not fetched: a Debian with Debian's Python stands in for it.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it comes with mkdocs

from tests.packaging.test_distribution import NOT_SOURCE, TIMEOUT
from tests.test_architecture import ROOT

COMPOSE = yaml.safe_load((ROOT / "contrib/docker/compose.yaml").read_text())["services"]["server"]
DOCKERFILE = (ROOT / "contrib/docker/Dockerfile").read_text()
BASE = DOCKERFILE.split("FROM ")[1].split()[0]
STAND_IN = "FROM scratch\nADD base.tar /\nRUN ln -s /usr/bin/python3 /usr/local/bin/python\n"
SEEN_FROM_INSIDE = ("/etc/ssl/certs", "/etc/pip.conf")
"How this machine reaches the package index, for the build."


class Podman:
    def __init__(self, folder: Path) -> None:
        storage = ("--root", folder / "store", "--runroot", folder / "run", "--storage-driver", "overlay")
        self._podman = ("podman", *storage, "--cgroup-manager", "cgroupfs", "--runtime", "runc")

    def __call__(self, *arguments: object, check: bool = True) -> str:
        command = list(map(str, (*self._podman, *arguments)))
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def build(self, folder: Path, file: Path, tag: str) -> None:
        seen = [f"--volume={path}:{path}:ro" for path in SEEN_FROM_INSIDE if Path(path).exists()]
        self(
            "build",
            "--isolation=chroot",
            "--pull=never",
            "--format=docker",
            *seen,
            "-f",
            file,
            "-t",
            tag,
            folder,
        )


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[Podman]:
    podman = Podman(tmp_path)
    yield podman
    podman("rm", "--all", "--force", check=False)
    podman("system", "reset", "--force", check=False)


def options() -> list[str]:
    """What the compose file says, without a network."""
    volumes = [f"--volume={volume}" for volume in COMPOSE["volumes"]]
    tmpfs = [f"--tmpfs={folder}" for folder in COMPOSE["tmpfs"]]
    added = [f"--cap-add={name}" for name in COMPOSE["cap_add"]]
    dropped = [f"--cap-drop={name}" for name in COMPOSE["cap_drop"]]
    security = [f"--security-opt={option.removesuffix(':true')}" for option in COMPOSE["security_opt"]]
    sysctls = [f"--sysctl={name}={value}" for name, value in COMPOSE["sysctls"].items()]
    files = min(COMPOSE["ulimits"]["nofile"], resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    limits = [f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096"]
    assert COMPOSE["read_only"] is True
    without = ("--read-only", "--network=none", "--health-interval=disable")
    return [*volumes, *tmpfs, *dropped, *added, *security, *sysctls, *limits, *without]


def test_the_image(tmp_path: Path, podman: Podman) -> None:
    base = tmp_path / "base"
    base.mkdir()
    included = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["mmdebstrap", "--variant=apt", included, "bookworm", "base.tar"], cwd=base, check=True)
    (base / "Dockerfile").write_text(STAND_IN)
    podman.build(base, base / "Dockerfile", f"docker.io/library/{BASE}")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE, "node_modules"))
    podman.build(source, source / "contrib/docker/Dockerfile", "localhost/ntf-server")

    made = podman("run", "--rm", *options(), "localhost/ntf-server", "init", "--fqdn", "ntf.example.org")
    assert "Server address: ntf://" in made
    podman("run", "--detach", "--name=server", *options(), "localhost/ntf-server")
    podman("exec", "server", "sh", "-c", "until ntf-server status; do sleep 0.2; done")
    podman("healthcheck", "run", "server")
    assert podman("exec", "server", "id", "-u", "-n") == "ntf-server\n"
    assert podman("exec", "server", "id", "-G") == "10001\n"
    podman("stop", "server")
    assert podman("inspect", "server", "--format={{.State.ExitCode}}") == "0\n"
