"""A real Prometheus scrapes a real server: our rules load, alerts fire, every panel has something to show."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ntf_demo.fake_push.faults import Fault
from tests.drills.world import DEADLINE, world
from tests.ntf_server.test_metrics import DASHBOARD, RULES, alerts
from tests.ports import free_port

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian: apt install prometheus")
CONFIG = """
global: {{scrape_interval: 300ms, evaluation_interval: 300ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: ntf-server
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Prometheus:
    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, path: str, **arguments: str) -> Any:
        return await asyncio.to_thread(self._ask, f"{path}?{urllib.parse.urlencode(arguments)}")

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=DEADLINE) as answer:
            return json.load(answer)["data"]

    async def firing(self) -> set[str]:
        found = (await self.ask("/api/v1/alerts"))["alerts"]
        return {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}

    async def fires(self, name: str) -> None:
        async with asyncio.timeout(DEADLINE):
            while name not in await self.firing():
                await asyncio.sleep(0.1)

    async def without_values(self, queries: Iterable[str]) -> set[str]:
        """Those that show nothing, however long one waits."""
        missing = set(queries)
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                while missing:
                    missing -= {query for query in missing if await self._has_values(query)}
                    await asyncio.sleep(0.1)
        return missing

    async def _has_values(self, query: str) -> bool:
        series = (await self.ask("/api/v1/query", query=query))["result"]
        return any(each["value"][1] != "NaN" for each in series)


def _is_ready(port: int) -> bool:
    """It listens before it can answer queries."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=DEADLINE):
            return True
    except OSError:
        return False


@asynccontextmanager
async def prometheus(folder: Path, watched: int) -> AsyncIterator[Prometheus]:
    """With our rules, whose alerts fire after a second: the times are tested by promtool."""
    rules, port = folder / "rules.yml", free_port()
    rules.write_text(re.sub(r"for: \w+", "for: 1s", RULES.read_text()))
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=rules, port=watched))
    log = (folder / "prometheus.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
        stderr=log,
        stdout=log,
    )
    try:
        async with asyncio.timeout(DEADLINE):
            while not await asyncio.to_thread(_is_ready, port):
                await asyncio.sleep(0.05)
        yield Prometheus(port)
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def test_rules_alerts_and_dashboard(tmp_path: Path) -> None:
    board = json.loads(DASHBOARD.read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries = [query.replace("$instance", ".*") for query in shown]
    async with (
        world(tmp_path, seconds=10, env={"NTF_SUBSCRIBER_OWN_HOSTS": "127.0.0.1"}) as drill,
        prometheus(tmp_path, drill.daemon.metrics_port) as watching,
    ):
        assert (
            await watching.without_values(["simplex_ntf_clients"]) == set()
        )  # before there is anything to count
        drill.push.add_fault(Fault(api="apns", status=413, reason="PayloadTooLarge", count=1))
        await drill.notify(2)
        assert await watching.without_values(queries) == set()
        (group,) = (await watching.ask("/api/v1/rules"))["groups"]
        assert {rule["name"] for rule in group["rules"]} == alerts()
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        assert not await watching.firing() & {"NtfServerDown", "NtfOwnRouterDown"}
        drill.router.faults.refuse()
        drill.router.faults.drop_connections()
        await watching.fires("NtfOwnRouterDown")
        drill.daemon.process.kill()
        await watching.fires("NtfServerDown")
