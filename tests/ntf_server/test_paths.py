"""Which files run for a subscription and for a notification: what docs/architecture.md says."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server.app import running
from ntf_server.commands import Commands
from ntf_server.push import dispatcher, scheduler
from ntf_server.push.dispatcher import Dispatcher
from ntf_server.push.outcomes import ProviderWatch
from ntf_server.setup import DATABASE
from protocol.connection import Connection
from smp_client.requests import RequestSession
from smp_router.router import Router
from tests.ntf_server.conftest import make_app
from tests.ntf_server.life import Life, journal_config
from tests.ntf_server.ntf_client import NtfClient
from tests.waiting import until
from transport.streams import TlsStream

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
OURS = tuple(f"{ROOT}/{name}/" for name in ("ntf_server", "store", "smp_client", "protocol", "transport"))
FILES_TOLD = re.compile(r"\n\| our files that run(?:, `(\w+)/`)? \| \d+ \| (\d+)")
TIMES = 3
ONCE_FOR_ALL = {"sweep_due", "next_deadline"}
"Not asked for each push."


class Trail:
    """What runs from a call of `start` to a call of `end` by `caller`."""

    def __init__(
        self, start: Callable[..., Any], end: Callable[..., Any], caller: Callable[..., Any]
    ) -> None:
        self._start = start.__code__
        self._end = end.__code__, caller.__code__
        self._is_open = False
        self.is_complete = False
        self.files: set[str] = set()
        self.crossings: Counter[str] = Counter()
        "Calls of the scheduler by the dispatcher."

    def look(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or self.is_complete or not code.co_filename.startswith(OURS):
            return
        self._is_open |= code is self._start
        if not self._is_open or frame.f_back is None:
            return
        caller = frame.f_back.f_code
        self.files.add(Path(code.co_filename).relative_to(ROOT).as_posix())
        if (code.co_filename, caller.co_filename) == (scheduler.__file__, dispatcher.__file__):
            self.crossings[code.co_name] += 1
        self.is_complete = (code, caller) == self._end


class Watch:
    """Threads are watched from their start on, this one while there is a trail to follow."""

    def __init__(self) -> None:
        self.trail: Trail | None = None

    def look(self, frame: FrameType, event: str, argument: object) -> None:
        if self.trail is not None:
            self.trail.look(frame, event, argument)

    @contextmanager
    def following(self, trail: Trail) -> Iterator[Trail]:
        self.trail = trail
        sys.setprofile(self.look)
        try:
            yield trail
        finally:
            sys.setprofile(None)
            self.trail = None


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    threading.setprofile(watch.look)
    yield watch
    threading.setprofile(None)


@pytest.fixture
async def life(tmp_path: Path, watch: Watch) -> AsyncIterator[Life]:
    async with (
        Router.start() as smp,
        FakePushServer(FakePushConfig(folder=tmp_path / "push")) as push,
        running(make_app(tmp_path, journal_config(tmp_path, push))) as app,
    ):
        client = await NtfClient.open(app.address)
        yield Life(app, client, smp, push, tmp_path / "data" / DATABASE)
        client.close()


def assert_as_told(heading: str, trails: Sequence[Trail]) -> None:
    """The files that a section names run, and no more of them than it says; a name alone is one of the push
    side. What ran by chance, and not each time, is no part of the path."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = set(re.findall(r"`([\w/]+\.py)`", section))
    assert len(names) > 5
    files = set.intersection(*(trail.files for trail in trails))
    assert {name if "/" in name else f"ntf_server/push/{name}" for name in names} <= files
    for package, told in FILES_TOLD.findall(section):
        ran = sorted(name for name in files if name.startswith(package))
        assert len(ran) <= int(told), f"{package or 'all'}: {ran}"
    assert "| our files that run | " in section


async def test_the_files_that_are_named_run(life: Life, watch: Watch) -> None:
    device = await life.active()
    first, *queues = life.router.load.create_queues(1 + TIMES)
    await life.subscribe(device, first)
    await until(lambda: life.count("ACTIVE") == 1)
    (router,) = life.app.subscriber._routers.values()
    snews: list[Trail] = []
    for number, queue in enumerate(queues, 2):
        # Until it rests, what it does belongs to the one before.
        await until(lambda: router._session is not None and bool(router._session._wake._waiters))
        snew = Trail(Commands._new_subscription, TlsStream.write, RequestSession._write)
        with watch.following(snew):
            await life.subscribe(device, queue)
            await until(lambda: snew.is_complete)  # noqa: B023  # this one, now
        await until(lambda: life.count("ACTIVE") == number)  # noqa: B023
        snews.append(snew)
    assert_as_told("One subscription, file by file", snews)

    await life.router.load.emit([first], 1)
    await until(lambda: len(life.push.pushes) > 1)  # beside the verification
    nmsgs: list[Trail] = []
    for queue in queues:
        await until(lambda: life.app.dispatcher.jobs_in_memory == 0)
        nmsg = Trail(Connection.receive_data, ProviderWatch.ended, Dispatcher._ended)
        with watch.following(nmsg):
            await life.router.load.emit([queue], 1, fresh=True)
            await until(lambda: nmsg.is_complete)  # noqa: B023
        assert set(nmsg.crossings) - ONCE_FOR_ALL == {"add", "take", "loaded", "ended"}
        nmsgs.append(nmsg)
    assert_as_told("One notification, file by file", nmsgs)


def test_the_dispatchers_methods_are_counted() -> None:
    methods = [
        name for name, value in vars(Dispatcher).items() if callable(value) or isinstance(value, property)
    ]
    assert f"| methods of `Dispatcher` | 37 | {len(methods)};" in PAGE
