"""The status page in a real browser: an incident shows while it is open; light and dark, wide and narrow."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from ntf_server import own_routers, status_page, store_watch
from ntf_server.app import running
from ntf_server.status_page import MAX_INCIDENTS, SAMPLES, STEP, History
from smp_router.router import Router
from tests.drills.world import DEADLINE
from tests.http import get
from tests.ntf_server.conftest import make_app, make_config
from tests.ntf_server.dispatch.clock import SimulatedClock
from tests.ntf_server.test_health import answers, figures, subscribe
from tests.ports import free_port
from tests.test_architecture import ROOT

BROWSER = ROOT / "tests" / "browser"
needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None or not (BROWSER / "node_modules").is_dir(),
    reason="scripts/setup dev installs Chromium and what drives it",
)


@needs_browser
async def test_an_incident_appears_on_the_open_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "INTERVAL", 0.1)
    monkeypatch.setattr(own_routers, "COUNT_INTERVAL", 0.1)
    monkeypatch.setattr(own_routers, "SHOW_INTERVAL", 0.1)
    monkeypatch.setattr(status_page, "LOOK_INTERVAL", 0.1)
    monkeypatch.setattr(status_page, "STEP", 0.3)
    port = free_port()
    own = {"own_hosts": ("127.0.0.1",), "allow_private_routers": True}
    config = make_config(tmp_path, METRICS={"port": port}, SUBSCRIBER=own)
    async with running(make_app(tmp_path, config)) as app:
        async with Router.start(host="127.0.0.1") as router:
            await subscribe(app, router, 3)
            name = router.address.host_port
            await figures(port, name, up=1, queues=3, pending=0)
            await answers(port, "HTTP/1.1 200")
            looking = await asyncio.create_subprocess_exec(
                *("node", "look.mjs", f"http://127.0.0.1:{port}/", str(tmp_path), f"router {name} is down"),
                cwd=BROWSER,
                stdout=asyncio.subprocess.PIPE,
            )
            assert looking.stdout is not None
            async with asyncio.timeout(DEADLINE):
                assert await looking.stdout.readline() == b"open\n"
        async with asyncio.timeout(2 * DEADLINE):
            seen = json.loads(await looking.stdout.readline())
            assert await looking.wait() == 0
    assert seen["errors"] == []
    assert seen["loads"] == 1
    assert {url.partition("/status")[0] for url in seen["fetched"]} <= {
        f"http://127.0.0.1:{port}",
        f"http://127.0.0.1:{port}/",
        "data:,",
    }
    for look in seen["looks"]:
        assert look["violations"] == [], look["name"]
        assert look["wider"] <= 0, look["name"]


async def test_other_sites_can_neither_show_nor_read_it(tmp_path: Path) -> None:
    port = free_port()
    async with running(make_app(tmp_path, make_config(tmp_path, METRICS={"port": port}))):
        for path in ("/", "/status.json", "/metrics", "/health/ready", "/nothing"):
            head = (await get(port, path)).partition("\r\n\r\n")[0]
            assert "Content-Security-Policy: default-src 'none'; frame-ancestors 'none'" in head, path
            assert "X-Content-Type-Options: nosniff\r\n" in head, path
            assert "Cross-Origin-Resource-Policy: same-origin\r\n" in head, path
            assert "unsafe" not in head, path


async def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    port = free_port()
    async with running(make_app(tmp_path, make_config(tmp_path, METRICS={"port": port}))):
        page = await get(port, "/")
        data = json.loads((await get(port, "/status.json")).partition("\r\n\r\n")[2])
        for link in re.findall(r'<a href="(.*?)">', page):
            assert (await get(port, f"/{link}")).startswith("HTTP/1.1 200"), link
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in page
    assert data["providers"][0]["name"] == "Web Push (WP)"
    assert data["name"] == "127.0.0.1"
    assert {"Queues in the store", "Queues subscribed"} < data["figures"].keys()


def test_what_is_kept_is_bounded() -> None:
    clock = SimulatedClock()
    kept = History(clock, lambda: [f"router {clock.now():.0f} is down " + "x" * 1000])
    for _ in range(SAMPLES + 10):
        clock.advance(STEP)
        kept.look()
    assert len(kept.samples) == SAMPLES
    assert len(kept.incidents) == MAX_INCIDENTS
    assert max(len(incident.text) for incident in kept.incidents) <= 300
    assert [incident.ended is None for incident in kept.incidents] == [False] * (MAX_INCIDENTS - 1) + [True]
