"""`python -m tests.docs.screenshots`: makes the pictures of the status page and of the site's first page."""

from __future__ import annotations

import asyncio
import functools
import http.server
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ntf_demo.fake_push.faults import Fault
from smp_router.router import Router
from tests.drills.world import World, world
from tests.test_architecture import ROOT

IMAGES = ROOT / "docs" / "images"
WIDE, PHONE, SITE = 1100, 390, 1280
QUICK = (
    "-c",
    "import runpy, sys; from ntf_server import status_page; status_page.STEP = 1.0;"
    " sys.argv[0] = 'ntf-server'; runpy.run_module('ntf_server', run_name='__main__')",
)
"A server whose charts are full after half a minute."


async def shoot(url: str, name: str, width: int, height: int, scheme: str, text: str) -> None:
    """`height` 0: all of the page. When `text` is on it."""
    words = (url, IMAGES / f"{name}.webp", width, height, scheme, text)
    process = await asyncio.create_subprocess_exec(
        "node", "shoot.mjs", *map(str, words), cwd=ROOT / "tests" / "browser"
    )
    assert await process.wait() == 0, name


async def status_page(folder: Path) -> None:
    """A provider was down for a while; one of two own routers is down now."""
    env = {"NTF_SUBSCRIBER_OWN_HOSTS": "127.0.0.1"}
    async with (
        world(folder, seconds=35, env=env, program=QUICK) as drill,
        Router.start(host="127.0.0.1") as other,
    ):
        await World(drill.daemon, other, drill.push).add_devices(1, 5)
        await drill.notify(10)
        drill.push.add_fault(Fault(api="apns", status=503, reason="ServiceUnavailable"))
        await drill.notify(6)
        drill.push.clear_faults()
        await drill.notify(12)
        other.faults.refuse()
        other.faults.drop_connections()
        await drill.notify(5)
        url, down = f"http://127.0.0.1:{drill.daemon.metrics_port}/", f"{other.address.host_port} is down"
        await shoot(url, "status-light", WIDE, 0, "light", down)
        await shoot(url, "status-dark", WIDE, 0, "dark", down)
        await shoot(url, "status-phone", PHONE, 1000, "dark", down)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *words: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


async def site(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True)
    with served(folder) as url:
        await shoot(url, "site-light", SITE, 800, "light", "Phones cannot keep connections open")
        await shoot(url, "site-dark", SITE, 800, "dark", "Phones cannot keep connections open")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (there := Path(folder, "status")).mkdir()
        await status_page(there)
        await site(Path(folder, "site"))


if __name__ == "__main__":
    asyncio.run(main())
