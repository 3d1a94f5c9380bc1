"""The Debian package on a machine of its own, under a real systemd.

Not part of the test suite: it needs root, minutes, and Debian's `mmdebstrap` and `systemd-container`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.docs.pages import blocks
from tests.packaging.test_debian import package  # noqa: F401
from tests.packaging.test_distribution import run
from tests.test_architecture import ROOT

TIMEOUT = 300
PACKAGES = "systemd-sysv,dbus,python3,ca-certificates"
UNIT = """[Service]
Type=oneshot
ExecStart=/machine.sh
StandardOutput=append:/said
StandardError=append:/said
"""


def test_the_package_under_systemd(tmp_path: Path, package: Path) -> None:  # noqa: F811
    root = tmp_path / "root"
    run("mmdebstrap", "--variant=apt", f"--include={PACKAGES}", "bookworm", root, cwd=tmp_path)
    (root / package.name).write_bytes(package.read_bytes())
    (root / "install.sh").write_text(documented().replace("apt-get install", "apt-get install -y"))
    (root / "etc/systemd/system/operator.service").write_text(UNIT)
    script = root / "machine.sh"
    script.write_bytes((ROOT / "tests/packaging/machine.sh").read_bytes())
    script.chmod(0o755)
    machine = ("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "-D", root)
    console = subprocess.run(
        [*map(str, machine), "--boot", "systemd.wants=operator.service"],
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    ).stdout.decode(errors="replace")
    said = (root / "said").read_text() if (root / "said").exists() else console
    assert "\nall is well\n" in said, said


def documented() -> str:
    """What docs/install.md tells to do on the server."""
    (text,) = [b.text for b in blocks(ROOT / "docs/install.md") if b.text.startswith("apt-get install")]
    assert re.search(r"^systemctl start ntf-server$", text, re.MULTILINE)
    return text
