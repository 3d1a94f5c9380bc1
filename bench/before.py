"""Before and after: what was aimed at, measured with an earlier daemon and today's in turn, in one run.

Clients, routers and the push service are today's in both cases, and so is the measuring code.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import load
from bench.earlier import HERE, ROOT, Version, build
from bench.measure import Cores, Peer, Row, figure, run_on
from bench.part import Measure
from bench.push_clients import AIM_US, make_key
from bench.results import PartResult, Results, joined, load_average
from bench.runner import gathered, in_own_process, say
from bench.server import (
    VERIFICATION_SHARE,
    Daemon,
    checks,
    daemon,
    database,
    fill,
    fit_schema,
    idle,
    init,
    loads,
    measure_checks,
    measured,
    sqlite_store,
)
from bench.store import make_database
from bench.tls import SHARES, SMP_BLOCK
from ntf_demo.fake_push.program import fake_push_process
from ntf_demo.fake_push.server import wall_clock
from tests.ntf_server.ntf_client import NtfClient
from tests.packaging.test_distribution import run

COMMIT = "96b99c5"
"What the aims were set for."
INSIDE = ROOT / "bench" / "inside.py"
REPEATS = 2
LIMIT = 180.0
"Seconds for one measurement; one that hangs is ended."
RATE, P99_MS = 1000, 10.0
KILL_RATE, KILL_AFTER = 2000, 0.3
STILL, LOOK = 5.0, 0.25
"Seconds without a new push after which what is missing is lost; and between looks."


async def burst(folder: Path, *, tokens: int = 4000) -> list[Row]:
    """As `load`, with fewer queues."""
    rows = await load.measure(folder, tokens=tokens, queues=2)
    return [replace(row, name=f"NMSG to push, {row.name}") for row in rows if row.aim is not None]


async def steady(folder: Path, *, tokens: int = 3000, routers: int = 20) -> list[Row]:
    """From NMSG to the request at a steady rate, and a kill."""
    record = folder / "pushes"
    async with AsyncExitStack() as stack:
        ready = await load.world(folder, stack, 50, routers, tokens, 1, ("--record", str(record)))
        p99 = await latency(ready.queues, record, range(tokens // 2))
        lost = await killed(folder, ready.server, record, ready.queues[tokens // 2 :])
    return [
        figure(f"NMSG to request at {RATE:,}/s, p99", "ms", p99, aim=P99_MS),
        figure(f"NMSGs lost by a kill -9 at {KILL_RATE:,}/s", "lost", lost),
    ]


async def emit(queues: load.Queues, rate: float) -> list[float]:
    """One NMSG of each, when it is due; when that was."""
    started, sent = time.perf_counter(), []
    for number, (router, queue) in enumerate(queues):
        await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
        sent.append(wall_clock())
        await router.load.emit([queue], 1)
    return sent


async def latency(queues: load.Queues, record: Path, numbers: range) -> float:
    """Milliseconds, p99."""
    before = len(pushed(record))
    sent = await emit(queues[numbers.start : numbers.stop], RATE)
    await still(record, before + len(sent))
    asked = pushed(record)
    delays = [asked[f"{number:064x}"] - at for number, at in zip(numbers, sent, strict=True)]
    return statistics.quantiles(delays, n=100)[98] * 1000


async def killed(folder: Path, server: Daemon, record: Path, queues: load.Queues) -> int:
    """Of the NMSGs that routers gave out, how many neither this daemon nor the next one pushed."""
    before, environment = len(pushed(record)), server.process.environ()
    emitting = asyncio.ensure_future(emit(queues, KILL_RATE))
    await asyncio.sleep(KILL_AFTER)
    server.process.send_signal(signal.SIGKILL)
    await emitting
    async with daemon(folder, {name: environment[name] for name in environment if name.startswith("NTF_")}):
        return len(queues) + before - await still(record, before + len(queues))


def pushed(record: Path) -> dict[str, float]:
    """When each device's first push that was accepted arrived."""
    found: dict[str, float] = {}
    for push in map(json.loads, record.read_text().splitlines()):
        if push["status"] < 300:
            found.setdefault(push["token"], push["received"])
    return found


async def still(record: Path, wanted: int) -> int:
    """How many devices were pushed to, once these are so many or no more come."""
    count, since = 0, time.monotonic()
    while count < wanted and time.monotonic() - since < STILL:
        if (found := len(pushed(record))) > count:
            count, since = found, time.monotonic()
        await asyncio.sleep(LOOK)
    return count


async def clients(
    folder: Path, *, connections: int = 200, in_flight: int = 4, windows: int = 15
) -> list[Row]:
    """What commands and connections of clients cost the daemon."""
    cores = Cores.divide()
    run_on(cores.daemon)
    init(folder)
    device, ids = await fill(sqlite_store(folder), 1000)
    async with daemon(folder) as server:
        run_on(cores.others)
        opened = [await NtfClient.open(server.address) for _ in range(connections)]
        asked = [checks(device, ids, windows * in_flight) for _ in opened]
        _, cpu, verify = await measure_checks([server], loads(opened, asked, in_flight), 3)
        for client in opened:
            client.close()
    memory = (await idle(folder / "idle", connections=1000))[-1]
    shape = f"{connections} connections with {in_flight} in flight"
    return [
        figure(f"a SCHK, {shape}, in verifications", "times", cpu / verify, aim=1 / VERIFICATION_SHARE),
        memory,
    ]


async def push_client(folder: Path, *, pushes: int = 2000) -> list[Row]:
    rows, key = [], make_key(folder)
    async with fake_push_process(folder / "fake", "--record-limit", "0") as fake:
        for delay in (0, 50, 200):
            await fake.control(delay=delay / 1000)
            arguments = (fake.host, fake.port, fake.ca_file, str(key), pushes)
            cpu = await asyncio.to_thread(inside, "push", *arguments)
            rows.append(
                figure(f"a push in the HTTP/2 client, answers after {delay} ms", "us CPU", cpu, aim=AIM_US)
            )
    return rows


def tls(_: Path, *, rounds: int = 3) -> list[Row]:
    ours, bare = inside("tls", SMP_BLOCK, rounds)
    return [figure("TLS, 16 kB, in bare loops over sockets", "times", ours / bare, aim=1 / SHARES[SMP_BLOCK])]


def disconnect(folder: Path, *, sizes: tuple[int, ...] = (1_000, 100_000)) -> list[Row]:
    rows = []
    for size in sizes:
        place = folder / str(size)
        place.mkdir()
        init(place)
        make_database(database(place), size)
        fit_schema(place)
        spent = inside("disconnect", str(database(place)))
        rows.append(figure(f"mark {size:,} queues of a router disconnected", "ms CPU", spent))
    return rows


def inside(function: str, *arguments: object) -> Any:
    command = (measured.get().python, "-P", INSIDE, function, *map(json.dumps, arguments))
    return json.loads(run(*command, cwd=ROOT))


MEASURES: Sequence[Measure] = (burst, steady, clients, push_client, tls, disconnect)


def compare(commit: str, given: Mapping[str, Mapping[str, Any]]) -> Iterator[Results]:
    """What is known after each measurement; `given` are its options by name."""
    with tempfile.TemporaryDirectory(prefix="ntf-earlier-") as folder:
        earlier = build(commit, Path(folder))
        yield from gathered(
            in_turn(measure, given.get(measure.__name__, {}), earlier, commit) for measure in MEASURES
        )


def in_turn(measure: Measure, options: Mapping[str, Any], earlier: Version, commit: str) -> PartResult:
    """Both versions, several times; today's rows, the earlier ones beside them."""
    say(f"{measure.__name__}: {commit} and today's in turn")
    began, loaded, speeds, error = time.monotonic(), load_average(), list[float](), ""
    rows: dict[Version, list[Sequence[Row]]] = {earlier: [], HERE: []}
    for version in (earlier, HERE) * REPEATS:
        outcome = in_own_process(partial(of_version, measure, version), options, LIMIT)
        if isinstance(outcome, str):
            error = outcome
            say(f"    FAILED\n{error}")
            break
        rows[version].append(outcome[0])
        speeds.append(outcome[1])
    pairs = () if error else zip(joined(rows[earlier]), joined(rows[HERE]), strict=True)
    return PartResult(
        name=measure.__name__,
        options=options,
        rows=[replace(new, peer=Peer(commit, old.values)) for old, new in pairs],
        repeats=REPEATS,
        seconds=time.monotonic() - began,
        load=(loaded, load_average()),
        yardstick=speeds,
        error=error,
    )


def of_version(measure: Measure, version: Version, folder: Path, **options: Any) -> Any:
    measured.set(version)
    return measure(folder, **options)
