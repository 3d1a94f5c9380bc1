"""The Debian package and the systemd unit: built, installed by dpkg into a root of its own, used, removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.test_distribution import TIMEOUT, run, use_server
from tests.test_architecture import ROOT

UNIT = ROOT / "contrib" / "systemd" / "ntf-server.service"
MAX_EXPOSURE = 20  # of 100, by systemd's own measure

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd's tools")
DEBIAN = all(map(shutil.which, ("dpkg-deb", "systemd-sysusers", "systemd-tmpfiles", "/usr/bin/python3")))
needs_dpkg = pytest.mark.skipif(not DEBIAN, reason="needs Debian")


@needs_systemd
def test_the_unit_gives_away_little(tmp_path: Path) -> None:
    options = ("--offline=true", f"--threshold={MAX_EXPOSURE}", "--no-pager")
    shown = run("systemd-analyze", "security", *options, UNIT, cwd=tmp_path)
    assert re.search(r"Overall exposure level for ntf-server.service: [01]\.\d OK", shown), shown


def test_the_unit_allows_no_core_dumps() -> None:
    """They would hold keys and device tokens."""
    assert "LimitCORE=0" in UNIT.read_text().splitlines()


@needs_systemd
def test_the_unit_is_understood(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/bin/ntf-server", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    complaints = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert complaints == []


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deb")
    run(ROOT / "scripts" / "deb", folder, cwd=ROOT)
    (file,) = folder.glob("*.deb")
    return file


def dpkg(root: Path, *arguments: object) -> None:
    forced = ("--force-not-root", "--force-depends", "--force-script-chrootless")
    run("dpkg", f"--root={root}", f"--log={root}/dpkg.log", *forced, *arguments, cwd=root)


@needs_dpkg
def test_install_use_remove(tmp_path: Path, package: Path) -> None:
    root = tmp_path / "root"
    for folder in ("var/lib/dpkg/info", "var/lib/dpkg/updates", "etc"):
        (root / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    dpkg(root, "--install", package)
    assert "ntf-server:" in (root / "etc" / "passwd").read_text()
    assert (root / "usr/lib/systemd/system/ntf-server.service").exists()
    for name in ("ntf-server", "ntf-agent", "ntf-analytics"):
        assert os.access(root / "usr/bin" / name, os.X_OK)
    use_server(root / "opt/ntf-server/bin/ntf-server", tmp_path)
    dpkg(root, "--purge", "ntf-server")
    assert not (root / "usr/bin/ntf-server").exists()
    assert not list((root / "opt").rglob("*.py"))
