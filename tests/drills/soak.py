"""Mixed traffic for a long time, and everything goes wrong now and then.

python -m tests.drills.soak [--minutes 30] [--rate 30] [--probe]

Routers notify, clients come and go, and between restarts, outages, reloads and backups an auditor compares
what the routers emitted with what the provider received. At the end nothing is lost, and memory, descriptors
and tasks of the daemon are flat: once the first third has warmed it up, the line through all samples rises by
less than `RISE` until the end, and the median of the last third is less than `MORE` above the first third.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushServer, wall_clock
from protocol.addresses import SmpQueueNtf
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import IdSub, Ok, Schk, Sdel, Snew, Sub, Tdel
from smp_router.router import Router
from tests.drills.memory_probe import PROBED, SOCKET, ask
from tests.drills.world import (
    DEADLINE,
    PROGRAM,
    Daemon,
    World,
    provider,
    push_settings,
    repeated_pushes,
    running_daemon,
)
from tests.ntf_server.ntf_client import Device, NtfClient
from transport.cancellation import TaskGroup
from transport.errors import TransportError

ROUTERS = 3
DEVICES = 20
"Of each router."
CHURN_PAUSE = 2.0
"Seconds between clients that register, subscribe, check, delete all of it and leave."
CROWD = 200
"Clients that connect at the same moment."
OUTAGE = 5.0
"Seconds that a router or the provider is away."
SAMPLE = 2.0
CUT = 1.0
"Seconds before a connection was cut: an NMSG has no acknowledgement, so one on its way then may be gone."
TENTHS = 10
RISE = 0.02
"Of the median: what the line through the last two thirds may rise in that time, besides `SLACK`."
MORE = 0.05
"Of the first third's highest tenth: how much more there may be in the end, besides `SLACK`."
SLACK = {"memory": 5e6, "descriptors": 8.0, "tasks": 64.0}
"What a misfortune needs while it lasts: so many pushes, one to each device, may be under way."
WARM_UP, FIRST_TIME = 600.0, 15e6
"In a soak shorter than so many seconds all goes wrong for the first time: so many more bytes are no sign."


@dataclass
class Sample:
    at: float
    memory: float
    descriptors: float
    tasks: float


@dataclass
class Course:
    """How much of something the daemon had, sample by sample."""

    values: list[float]
    slack: float

    @property
    def tenths(self) -> list[float]:
        """Medians of each tenth of the time."""
        count = len(self.values)
        parts = (self.values[count * n // TENTHS : count * (n + 1) // TENTHS] for n in range(TENTHS))
        return [statistics.median(part) for part in parts if part]

    @property
    def rise(self) -> float:
        """Of the line through the last two thirds. Its slope is the median of those between any two samples:
        a crowd that comes late does not tilt it."""
        later = self.values[len(self.values) // 3 :]
        pairs = itertools.combinations(enumerate(later), 2)
        return len(later) * statistics.median((y - x) / (j - i) for (i, x), (j, y) in pairs)

    @property
    def is_flat(self) -> bool:
        first = max(self.tenths[: TENTHS // 3])
        last = statistics.median(self.values[len(self.values) * 2 // 3 :])
        may_rise = RISE * statistics.median(self.values) + self.slack
        return self.rise <= may_rise and last <= first * (1 + MORE) + self.slack

    def __str__(self) -> str:
        tenths = ", ".join(f"{value:,.0f}" for value in self.tenths)
        said = "flat" if self.is_flat else "GROWS"
        return f"in tenths of the time: {tenths}; {self.rise:+,.0f} over the last two thirds: {said}"


@dataclass
class Verdict:
    """What the auditor found."""

    emitted: int
    cut: int
    "Emitted in the second before their connection was cut, and never received."
    lost: int
    repeated: int
    "Pushes that the provider accepted twice."
    events: Counter[str]
    failures: list[str]
    courses: dict[str, Course]

    @property
    def passed(self) -> bool:
        return not self.lost and not self.failures and all(course.is_flat for course in self.courses.values())

    def __str__(self) -> str:
        events = ", ".join(f"{count} {name}" for name, count in self.events.items())
        lines = [
            f"emitted {self.emitted}, lost {self.lost}, cut with their connection {self.cut},"
            f" repeated {self.repeated}",
            f"events: {events}",
            *self.failures,
        ]
        return "\n".join(lines + [f"{name} {course}" for name, course in self.courses.items()])


@dataclass
class Soak:
    daemon: Daemon
    push: FakePushServer
    worlds: list[World]
    folder: Path
    sent: dict[EntityId, float] = field(default_factory=dict)
    cuts: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    "When the connections of each router were cut: from, until."
    router_of: dict[EntityId, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    diary: list[tuple[float, str]] = field(default_factory=list)
    "When each misfortune began."
    failures: list[str] = field(default_factory=list)
    is_over: bool = False
    probe: Path | None = None
    "Where the daemon says who holds its memory, if it does."

    async def run(self, seconds: float, rate: float) -> Verdict:
        async with TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._churn(), name="churn"),
                tasks.create_task(self._sample(), name="samples"),
            ]
            sending = [
                tasks.create_task(self._emit(number, rate / len(self.worlds)))
                for number in range(len(self.worlds))
            ]
            await self._misfortunes(seconds)
            self.is_over = True
            await asyncio.wait(sending)
            for task in beside:
                task.cancel()
        await self._probe("the end, malloc trimmed", "trim")
        return await self._audit()

    async def _emit(self, number: int, rate: float) -> None:
        world, clock = self.worlds[number], asyncio.get_running_loop().time
        started, count = clock(), 0
        while not self.is_over and world.unused:
            queue = world.unused.pop()
            self.sent[queue.notifier_id] = wall_clock()
            self.router_of[queue.notifier_id] = number
            await world.router.load.emit([queue], 1, fresh=True)
            count += 1
            await asyncio.sleep(max(0.0, started + count / rate - clock()))

    # Clients

    async def _churn(self) -> None:
        for world in itertools.cycle(self.worlds):
            with suppress(TransportError, OSError):
                await self._one_client(world)
            self.events["clients came and went"] += 1
            await asyncio.sleep(CHURN_PAUSE)

    async def _one_client(self, world: World) -> None:
        client = await NtfClient.open(self.daemon.address)
        try:
            device = Device.make(ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode()))
            await device.register(client)
            await device.verify(client, await world.code(device))
            (queue,) = world.router.load.create_queues(1)
            new = Snew(
                device.token_id, SmpQueueNtf(world.router.address, queue.notifier_id), queue.notifier_key
            )
            made = await client.ask(new, NO_ENTITY, device.key)
            assert isinstance(made, IdSub), made
            assert isinstance(await client.ask(Schk(), made.subscription_id, device.key), Sub)
            assert await client.ask(Sdel(), made.subscription_id, device.key) == Ok()
            assert await client.ask(Tdel(), device.token_id, device.key) == Ok()
        finally:
            client.close()

    # What goes wrong

    async def _misfortunes(self, seconds: float) -> None:
        """In turn, for so long but at least once each; the traffic goes on a little longer."""
        misfortunes: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("router restarts", self._restart_router),
            ("provider failures", lambda: self._provider(Fault(api="apns", status=503))),
            ("backups", self._back_up),
            ("provider silences", lambda: self._provider(Fault(api="apns", action="silence"))),
            ("certificate reloads", self._renew_certificate),
            ("half-open routers", self._half_open),
            ("provider resets", lambda: self._provider(Fault(api="apns", action="reset"))),
            ("crowds", self._crowd),
            ("provider refusals", lambda: self._provider(Fault(api="apns", status=403, reason="Forbidden"))),
            ("cut routers", self._cut_router),
            ("cut providers", self._cut_provider),
        ]
        clock = asyncio.get_running_loop().time
        end = clock() + seconds - 2 * OUTAGE
        pause = max(1.0, min(20.0, seconds / len(misfortunes) - OUTAGE))
        for number, (name, misfortune) in enumerate(itertools.cycle(misfortunes)):
            await asyncio.sleep(pause)
            if clock() > end and number >= len(misfortunes):
                break
            self.events[name] += 1
            self.diary.append((wall_clock(), name))
            await misfortune()
            await self._probe(name)
            assert self.daemon.is_alive(), self.daemon.log.read_text()[-4000:]
        await asyncio.sleep(OUTAGE)

    def _some_router(self) -> int:
        return sum(self.events.values()) % len(self.worlds)

    async def _cut(self, number: int, cut: Callable[[], Awaitable[object]]) -> None:
        began = wall_clock()
        await cut()
        self.cuts.setdefault(number, []).append((began, wall_clock()))

    async def _restart_router(self) -> None:
        number = self._some_router()
        router = self.worlds[number].router
        port = router.port
        await self._cut(number, router.stop)
        await asyncio.sleep(OUTAGE)
        await router.listen("127.0.0.1", port)

    async def _cut_router(self) -> None:
        number = self._some_router()

        async def drop() -> None:
            self.worlds[number].router.faults.drop_connections()

        await self._cut(number, drop)

    async def _half_open(self) -> None:
        faults = self.worlds[self._some_router()].router.faults
        faults.black_hole()
        await asyncio.sleep(OUTAGE)
        faults.black_hole(False)

    async def _provider(self, fault: Fault) -> None:
        self.push.add_fault(fault)
        await asyncio.sleep(OUTAGE)
        self.push.clear_faults()

    async def _cut_provider(self) -> None:
        self.push.drop_connections()

    async def _renew_certificate(self) -> None:
        await self._command("cert")
        self.daemon.process.send_signal(signal.SIGHUP)

    async def _back_up(self) -> None:
        await self._command("backup", str(self.folder / f"backup-{self.events['backups']}"))

    async def _command(self, *words: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "ntf_server",
                words[0],
                "--config-dir",
                str(self.folder / "c"),
                *words[1:],
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        if process.returncode:
            self.failures.append(f"{words[0]} failed: {said.decode()[-300:]}")

    async def _crowd(self) -> None:
        async def come() -> None:
            with suppress(TransportError, OSError, TimeoutError):
                (await NtfClient.open(self.daemon.address)).close()

        await asyncio.gather(*(come() for _ in range(CROWD)))

    # What is measured

    async def _sample(self) -> None:
        while True:
            process = self.daemon.process
            tasks = await self.daemon.metric("loop_tasks")
            sample = Sample(time.monotonic(), self.daemon.memory(), process.num_fds(), tasks)
            self.samples.append(sample)
            await asyncio.sleep(SAMPLE)

    async def _probe(self, after: str, word: str = "") -> None:
        if self.probe is None:
            return
        found = await ask(self.probe, word)
        sizes = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in found.items() if isinstance(size, int))
        print(f"{wall_clock() - self.diary[0][0]:6.0f} s, after {after}: {sizes}", flush=True)
        for line in (line for name, lines in found.items() if isinstance(lines, list) for line in lines):
            print(f"         {line}")

    async def _audit(self) -> Verdict:
        read, missing = 0, set(self.sent)
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                while missing:
                    pushes = self.push.pushes[read:]
                    read += len(pushes)
                    for recorded in pushes:
                        missing.difference_update(*(world.notifiers(recorded) for world in self.worlds))
                    await asyncio.sleep(0.2)
        cut = {notifier_id for notifier_id in missing if self._was_cut(notifier_id)}
        self.failures += [self._what_happened(notifier_id) for notifier_id in missing - cut]
        return Verdict(
            emitted=len(self.sent),
            cut=len(cut),
            lost=len(missing - cut),
            repeated=repeated_pushes(self.push),
            events=self.events,
            failures=self.failures,
            courses={name: self._course(name) for name in SLACK},
        )

    def _course(self, name: str) -> Course:
        is_short = self.samples[-1].at - self.samples[0].at < WARM_UP
        more = FIRST_TIME if is_short and name == "memory" else 0.0
        return Course([getattr(sample, name) for sample in self.samples], SLACK[name] + more)

    def _was_cut(self, notifier_id: EntityId) -> bool:
        at = self.sent[notifier_id]
        cuts = self.cuts.get(self.router_of[notifier_id], ())
        return any(began - CUT < at <= ended for began, ended in cuts)

    def _what_happened(self, notifier_id: EntityId) -> str:
        """For whoever looks for the reason of a loss."""
        at = self.sent[notifier_id]
        began, name = max((entry for entry in self.diary if entry[0] <= at), default=(at, "the start"))
        return f"lost: of router {self.router_of[notifier_id]}, {at - began:.2f} s after {name}"


@asynccontextmanager
async def soaking(folder: Path, queues: int, *, probe: bool = False) -> AsyncIterator[Soak]:
    """A daemon with its journal on, routers and a provider; `queues` of each router."""
    answers = folder / "probe"
    async with AsyncExitStack() as stack:
        push = await stack.enter_async_context(provider(folder))
        env = {
            **push_settings(push),
            "NTF_JOURNAL_ENABLED": "on",
            "NTF_LIMITS_COMMANDS_PER_SECOND": "0",  # all clients are this one process
            "NTF_LIMITS_ADDRESS_COMMANDS_PER_SECOND": "0",
            "NTF_LIMITS_ADDRESS_CPU_PERCENT": "0",
            "NTF_LIMITS_ADDRESS_VERIFICATIONS_PER_HOUR": "0",
            SOCKET: str(answers),
        }
        program = PROBED if probe else PROGRAM
        daemon = await stack.enter_async_context(running_daemon(folder, env, program=program))
        routers = [await stack.enter_async_context(Router.start(host="127.0.0.1")) for _ in range(ROUTERS)]
        worlds = [World(daemon, router, push) for router in routers]
        for world in worlds:
            await world.add_devices(DEVICES, queues)
        yield Soak(daemon, push, worlds, folder, probe=answers if probe else None)


async def soak(folder: Path, minutes: float, rate: float, *, probe: bool = False) -> Verdict:
    seconds = minutes * 60
    async with soaking(folder, int(seconds * rate / ROUTERS) + 2, probe=probe) as made:
        return await made.run(seconds, rate)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=30.0, help="notifications a second")
    parser.add_argument("--probe", action="store_true", help="say who holds the daemon's memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ntf-soak-") as name:
        verdict = asyncio.run(soak(Path(name), args.minutes, args.rate, probe=args.probe))
    print(verdict)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
