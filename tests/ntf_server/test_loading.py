"""What a daemon carries: only what it was configured to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ntf_server.test_cli import ANY_PORT, TIMEOUT, init

NEVER = {
    "ntf_demo",
    "agent",
    "smp_router",
    "analytics",
    "bench",
    "tests",
    "rich",
    "pyspark",
    "numpy",
    "pytest",
}
PROVIDERS = {"aioapns", "h2", "hpack", "pycurl", "jwt"}
JOURNAL = {"pyarrow"}
STATEMENTS = {"aiohttp", "sr25519", "wallycore"}
NOTHING = {"NTF_WEBPUSH_ENABLED": "off"}
GATEWAY = {
    "NTF_STATEMENTS_ENABLED": "on",
    "NTF_STATEMENTS_PORT": "0",
    "NTF_STATEMENTS_NODE": "ws://127.0.0.1:1",
}
APNS = {"NTF_APNS_ALLOW_TEST_PROVIDER": "on"}


def loaded(folder: Path, env: dict[str, str]) -> set[str]:
    """Top-level names of what a daemon has imported when it is ready: Python itself reports each import."""
    command = [sys.executable, "-X", "importtime", "-m", "ntf_server", "start"]
    command += ["--config-dir", str(folder / "c")]
    with (folder / "imports").open("w") as imports:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=imports, text=True, env=os.environ | ANY_PORT | env
        )
    assert process.stdout is not None
    try:
        assert "Server address: " in process.stdout.readline(), (folder / "imports").read_text()
        assert "Listening on" in process.stdout.readline()
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT)
    lines = [line.split("|") for line in (folder / "imports").read_text().splitlines()]
    return {line[2].strip().partition(".")[0] for line in lines if len(line) == 3}


@pytest.mark.parametrize(
    ("env", "extra"),
    [
        (NOTHING, set()),
        ({}, {"pycurl"}),
        (NOTHING | APNS, {"pycurl"}),
        (NOTHING | APNS | {"NTF_APNS_CLIENT": "aioapns"}, PROVIDERS),
        (NOTHING | {"NTF_JOURNAL_ENABLED": "on"}, JOURNAL),
        (NOTHING | GATEWAY, STATEMENTS),
    ],
    ids=["nothing", "Web Push", "APNs", "APNs with aioapns", "journal", "statements"],
)
def test_only_what_is_configured(tmp_path: Path, env: dict[str, str], extra: set[str]) -> None:
    assert init(tmp_path).returncode == 0
    names = loaded(tmp_path, env)
    assert {"ntf_server", "protocol", "transport", "smp_client", "store"} <= names
    assert names & NEVER <= ({"numpy"} if extra == JOURNAL else set())  # pyarrow takes it where it is
    assert names & (PROVIDERS | STATEMENTS | JOURNAL) == extra
