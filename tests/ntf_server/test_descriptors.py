"""The shares of open files."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntf_server.config import ConfigError, PushConfig
from ntf_server.descriptors import MINIMUM, descriptor_budget
from ntf_server.push.lanes import URGENT_CONCURRENCY, Shared
from tests.ntf_server.test_cli import init


@given(st.integers(MINIMUM, 1 << 30), st.integers(0, 100_000))
def test_everybody_has_a_share_and_none_has_anothers(limit: int, max_clients: int) -> None:
    budget = descriptor_budget(limit, max_clients)
    parts = (budget.own, budget.pushes, budget.routers, budget.clients)
    assert sum(parts) <= limit
    assert all(part > 0 for part in parts)
    assert not max_clients or budget.clients <= max_clients
    assert 0 < budget.idle_pushes + budget.web_pushes < budget.pushes
    pools = Shared(PushConfig(), budget.web_pushes).pools.values()
    assert sum(pool.limit for pool in pools) <= budget.web_pushes
    assert all(pool.limit > 0 for pool in pools)


@pytest.mark.parametrize(
    ("limit", "clients", "routers"), [(256, 64, 64), (1024, 544, 256), (20_000, 12_404, 5000)]
)
def test_shares(limit: int, clients: int, routers: int) -> None:
    budget = descriptor_budget(limit, 50_000)
    assert (budget.clients, budget.routers) == (clients, routers)


def test_with_files_enough_nothing_is_held_back() -> None:
    config = PushConfig()
    pools = Shared(config, descriptor_budget(24_000).web_pushes).pools
    assert {urgent: pool.limit for (urgent, _), pool in pools.items()} == {
        True: URGENT_CONCURRENCY,
        False: config.concurrency,
    }


def test_far_too_few_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 100 files"):
        descriptor_budget(100)


def test_start_says_the_shares_or_refuses(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    refused = _start(tmp_path, 100)
    assert refused.returncode != 0
    assert refused.stderr.strip().splitlines()[-1].startswith("ntf-server: only 100 files may be open")
    assert "Traceback" not in refused.stderr
    checked = _start(tmp_path, 1024)
    assert checked.returncode == 0, checked.stderr
    assert "1024 open files allowed: 544 for clients" in checked.stderr


def _start(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "ntf_server", "start", "--maintenance", "--config-dir", folder / "c")
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
