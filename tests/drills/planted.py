"""Faults planted around a real daemon, and whether the report names each of them.

    python -m tests.drills.planted [--keep FOLDER]

One daemon, three routers, six agents and a provider. The report of the time before the faults must say that
there are no problems; that of the entire period must name every fault with its size and time to heal, the
worst first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from agent.duplex.agent import open_duplex
from agent.duplex.events import Confirmed, Connected
from agent.notifications.records import Mode
from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId
from protocol.errors import SERVICE
from smp_router.router import Router
from tests.agent.duplex.world import Person, config
from tests.drills.world import Daemon, provider, push_settings, running_daemon
from tests.ports import free_port

ROUTERS, AGENTS = 3, 6
HOST = "127.0.0.1"
JOURNAL, GOOD_DAY = "d/journal", "good-day"
DEAD_TOKENS = 3
PROVIDER = re.escape("Apple's stand-in (AT)")
DEADLINE = 120.0
REPORT_DEADLINE = 400.0
LOOK_AGAIN = 0.02
SLACK = 20.0
"Seconds by which a busy machine may be late."
BEAT = 60.0
"Seconds between two signs of life: a daemon that is killed may have been silent for so long."
FLUSHED = 2.0
"Seconds after which the journal is on disk: what a kill may cost is no part of this drill."
MASS_APART = 130.0
"Seconds after which disconnections are not of the same moment any more."


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a drill is; seconds."""

    queues: int
    "Of each agent at each router."
    away: float
    "Of a router, of the provider."
    down: float
    "Of the daemon."
    settings: str = ""
    "The section ANALYTICS: when the report calls something a problem."
    with_mass: bool = True


SMALL = Size(queues=5, away=2.5, down=1.0, settings="outage_seconds = 2\nmass_servers = 4\n", with_mass=False)
WHOLE = Size(queues=40, away=65.0, down=10.0)


@dataclass(frozen=True)
class Planted:
    """A fault: what its sentence says, how many it touched and for how long at least and at most."""

    pattern: str
    size: int
    seconds: tuple[float, float] | None
    "None: it has not healed."


@dataclass(frozen=True)
class Told:
    """A sentence of the report."""

    text: str
    size: int
    seconds: float | None

    @property
    def rank(self) -> tuple[bool, float]:
        """The worse, the higher: what has not healed, then what many waited long for."""
        return self.seconds is None, self.size * (60 + (self.seconds or 0.0))


@dataclass
class Drill:
    """All that takes part, and what was done to it."""

    size: Size
    routers: list[Router]
    push: FakePushServer
    daemon: Daemon
    agents: list[Person]
    bob: Person
    start_again: Callable[[], Awaitable[Daemon]]
    to_agents: list[int] = field(default_factory=list)
    "Bob's connections."
    planted: list[Planted] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Subscriptions of each router."""
        return self.size.queues * AGENTS

    def accepted(self) -> list[str]:
        return [push.body for push in self.push.pushes if push.status < 300]

    async def subscribed(self) -> None:
        """Until every router has all that it knows."""
        wanted = [known_notifiers(router) for router in self.routers]
        pairs = list(zip(self.routers, wanted, strict=True))
        await until(lambda: all(known <= router.subscribed_notifiers() for router, known in pairs))
        async with asyncio.timeout(DEADLINE):
            while await self.daemon.metric("subscriptions_active") != sum(map(len, wanted)):
                await asyncio.sleep(LOOK_AGAIN)

    async def say(self, agents: Iterable[int]) -> None:
        """Bob writes to some agents."""
        for number in agents:
            await self.bob.agent.send(self.to_agents[number], b"hello")

    async def hear(self, agents: Sequence[int]) -> None:
        """The same, until they were pushed to."""
        before = len(self.accepted())
        await self.say(agents)
        await until(lambda: len(self.accepted()) >= before + len(agents))

    async def stop_daemon(self, how: signal.Signals) -> None:
        self.daemon.process.send_signal(how)
        await until(lambda: not self.daemon.is_alive())

    async def metric(self, name: str, least: float) -> None:
        async with asyncio.timeout(DEADLINE):
            while await self.daemon.metric(name) < least:
                await asyncio.sleep(LOOK_AGAIN)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(LOOK_AGAIN)


def known_notifiers(router: Router) -> set[EntityId]:
    return {queue.notifier.notifier_id for queue in router.state.queues if queue.notifier is not None}


def clock() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def drill(folder: Path, size: Size) -> AsyncIterator[Drill]:
    """Everything runs, every agent is registered and has its queues at every router."""
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(Router.start(host=HOST)) for _ in range(ROUTERS)]
        push = await stack.enter_async_context(provider(folder))
        env = {
            "NTF_TRANSPORT_PORT": str(free_port()),
            "NTF_JOURNAL_ENABLED": "on",
            "NTF_JOURNAL_SEGMENT_SECONDS": "1",
            **push_settings(push),
        }
        running = await stack.enter_async_context(AsyncExitStack())

        async def start() -> Daemon:
            await running.aclose()
            return await running.enter_async_context(running_daemon(folder, env))

        daemon = await start()
        addresses = [router.address for router in routers]
        opened = [
            Person(await stack.enter_async_context(open_duplex(config(folder / f"{number}.db", *addresses))))
            for number in range(AGENTS + 1)
        ]
        made = Drill(size, routers, push, daemon, opened[:-1], opened[-1], start)
        for number, person in enumerate(made.agents):
            await connect(made, person, friend_at=routers[number % ROUTERS])
            await register(made, person)
        await made.subscribed()
        yield made


async def register(drill: Drill, person: Person) -> None:
    """A device token that proves that pushes reach it; every queue gets a notifier."""
    before = len(drill.accepted())
    device = ApnsToken(Provider.APNS_TEST, secrets.token_hex(32).encode())
    await person.agent.notifications.register(device, Mode.INSTANT, drill.daemon.address)
    await until(lambda: len(drill.accepted()) > before)
    await person.agent.notifications.on_push(drill.accepted()[-1])
    await person.agent.settled()


async def connect(drill: Drill, person: Person, friend_at: Router) -> None:
    """Queues at every router; Bob joins one of them. Nobody is notified of that yet."""
    for router in drill.routers:
        made = [
            await person.agent.create_invitation(server=router.address, pq=False)
            for _ in range(drill.size.queues)
        ]
        if router is friend_at:
            hers, link = made[0]
            drill.to_agents.append(await drill.bob.agent.join(link, b"Bob", pq=False))
            await person.event(Confirmed)
            await person.agent.allow(hers, b"friend")
            await person.event(Connected)
            await drill.bob.event(Connected)


# What is done to them


async def healthy(drill: Drill, folder: Path) -> None:
    """A good day: messages, and orderly restarts. Its journal is copied before anything else happens."""
    for _ in range(2):
        await drill.hear(range(AGENTS))
        await drill.stop_daemon(signal.SIGTERM)
        shutil.copytree(folder / JOURNAL, folder / GOOD_DAY, dirs_exist_ok=True)
        drill.daemon = await drill.start_again()
        await drill.subscribed()


async def router_goes_away(drill: Drill) -> None:
    router, away = drill.routers[0], drill.size.away
    at = clock()
    await router.stop()
    await asyncio.sleep(away)
    await router.listen(HOST, router.port)
    await drill.subscribed()
    pattern = f"{router.address.host_port} was away from .* with {{size}} of {drill.held} subscriptions"
    drill.planted.append(Planted(pattern, drill.held, (0.9 * away, clock() - at + SLACK)))


async def router_forgets_half(drill: Drill) -> None:
    router, at = drill.routers[1], clock()
    lost = router.faults.lose_associations(0.5)
    router.faults.drop_connections()
    await drill.subscribed()
    pattern = f"{router.address.host_port} lost {{size}} of {drill.held} subscriptions"
    drill.planted.append(Planted(pattern, len(lost), (0, clock() - at + SLACK)))


async def router_refuses_the_service(drill: Drill) -> None:
    router, at = drill.routers[2], clock()
    router.faults.answer_errors("NSUBS", SERVICE, count=1)
    router.faults.drop_connections()
    await until(lambda: not router.subscribed_notifiers())
    await drill.subscribed()
    pattern = f"{router.address.host_port} refused our service on .* {{size}} of {drill.held} subscriptions"
    drill.planted.append(Planted(pattern, drill.held, (0, clock() - at + SLACK)))


async def router_loses_queues(drill: Drill) -> None:
    """For ever: nobody can heal that."""
    router, count = drill.routers[2], drill.held // 5
    router.faults.delete_queues(sorted(known_notifiers(router))[:count])
    router.faults.drop_connections()
    await drill.subscribed()
    healed = f"{router.address.host_port}: has {drill.held - count} queues of this service now"
    await until(lambda: healed in drill.daemon.log.read_text())
    pattern = f"{router.address.host_port} refused {{size}} of {drill.held} subscriptions \\(AUTH\\)"
    drill.planted.append(Planted(pattern, count, None))


async def provider_is_down(drill: Drill) -> None:
    everybody, away = range(AGENTS), drill.size.away
    drill.push.add_fault(Fault(status=503, reason="ServiceUnavailable"))
    await drill.say(everybody)
    await drill.metric('push_breaker_state{provider="AT"}', 1)
    at, before = clock(), len(drill.accepted())
    await asyncio.sleep(away)
    drill.push.clear_faults()
    await until(lambda: len(drill.accepted()) >= before + AGENTS)
    pattern = f"{PROVIDER} was down on .*, {{size}} pushes waited"
    told = Planted(pattern, AGENTS, (0.9 * away, clock() - at + SLACK))
    drill.planted.append(told)


async def tokens_die(drill: Drill) -> None:
    """The devices get new tokens soon after."""
    at, people = clock(), drill.agents[:DEAD_TOKENS]
    for person in people:
        token = await person.agent.notifications.token()
        assert token is not None
        assert isinstance(token.device_token, ApnsToken)
        gone = Fault(status=410, reason="Unregistered", token=token.device_token.token.decode())
        drill.push.add_fault(gone)
    await drill.say(range(DEAD_TOKENS))
    await drill.metric('push_tokens_invalid_total{reason="UNREGISTERED"}', DEAD_TOKENS)
    drill.push.clear_faults()
    for person in people:
        await register(drill, person)
    pattern = f"{PROVIDER} called {DEAD_TOKENS} of {AGENTS} tokens invalid"
    pattern += r" \(UNREGISTERED\) on .*, they hold {size} "
    held = DEAD_TOKENS * ROUTERS * drill.size.queues
    drill.planted.append(Planted(pattern, held, (0, clock() - at + SLACK)))


async def daemon_is_killed(drill: Drill) -> None:
    await asyncio.sleep(FLUSHED)
    at = clock()
    await drill.stop_daemon(signal.SIGKILL)
    await asyncio.sleep(drill.size.down)
    drill.daemon = await drill.start_again()
    seconds = (0.9 * drill.size.down, clock() - at + BEAT + SLACK)
    await drill.subscribed()
    pattern = f".*:{drill.daemon.address.port_number} died and was back on .*"
    drill.planted.append(Planted(f"{pattern} with {{size}} subscriptions", ROUTERS * drill.held, seconds))


async def network_fails(drill: Drill) -> None:
    """All routers at once, for a moment."""
    await asyncio.sleep(MASS_APART)
    at, size = clock(), sum(len(router.subscribed_notifiers()) for router in drill.routers)
    for router in drill.routers:
        router.faults.refuse()
        router.faults.drop_connections()
    await asyncio.sleep(drill.size.down)
    for router in drill.routers:
        router.faults.refuse(False)
    await drill.subscribed()
    pattern = f"{ROUTERS} of {ROUTERS} routers went away at once on .* with {{size}} subscriptions"
    drill.planted.append(Planted(pattern, size, (0.9 * drill.size.down, clock() - at + SLACK)))


FAULTS: Sequence[Callable[[Drill], Awaitable[None]]] = (
    router_goes_away,
    provider_is_down,
    router_forgets_half,
    tokens_die,
    router_refuses_the_service,
    daemon_is_killed,
    router_loses_queues,
)


async def carry_out(
    folder: Path, size: Size, tell: Callable[[str], None] = lambda text: None
) -> list[Planted]:
    """The faults; journals are in `folder`."""
    async with drill(folder, size) as made:
        tell(f"{ROUTERS * made.held} subscriptions; a good day")
        await healthy(made, folder)
        for fault in (*FAULTS, *([network_fails] if size.with_mass else [])):
            tell(fault.__name__.replace("_", " "))
            await fault(made)
        await made.stop_daemon(signal.SIGTERM)
    return made.planted


# What the report says


def report(folder: Path, journal: str, settings: str) -> tuple[int, Path]:
    """`ntf-analytics report all --check`: how it ended, and where its results are."""
    config, out = folder / "analytics.ini", folder / f"report-{Path(journal).name}"
    config.write_text(f"[ANALYTICS]\n{settings}")
    command = [sys.executable, "-m", "analytics", "report", "all", "--check", "--config", str(config)]
    command += ["--journal", str(folder / journal), "--out", str(out)]
    # An archive of Spark's classes costs as much as a report, and the user's cache is not ours.
    env = os.environ | {"XDG_CACHE_HOME": os.devnull}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=REPORT_DEADLINE, check=False, env=env
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, out


def check_healthy(folder: Path, settings: str) -> None:
    code, out = report(folder, GOOD_DAY, settings)
    summary = json.loads((out / "summary.json").read_text())
    assert (code, summary["problems"], summary["notes"]) == (0, [], [])
    assert "No problems found" in (out / "report.html").read_text()


def check_faults(folder: Path, planted: Sequence[Planted], settings: str) -> list[str]:
    """Every fault is told once, with its size and how long it took; the worst first. The sentences."""
    code, out = report(folder, JOURNAL, settings)
    assert code == 3
    problems = json.loads((out / "summary.json").read_text())["problems"]
    texts = [problem["text"] for problem in problems]
    told = {fault: find(fault, texts) for fault in planted}
    for fault, sentence in told.items():
        assert sentence.size == fault.size, sentence.text
        if fault.seconds is None:
            assert sentence.text.endswith("and has not healed.")
        else:
            assert sentence.seconds is not None, sentence.text
            assert fault.seconds[0] <= sentence.seconds <= fault.seconds[1], sentence.text
    in_order = sorted(told.values(), key=lambda sentence: texts.index(sentence.text))
    for worse, better in pairwise(in_order):
        assert better.rank <= (worse.rank[0], worse.rank[1] * ROUNDING), (worse.text, better.text)
    others = [p for p in problems if p["text"] not in {sentence.text for sentence in told.values()}]
    assert {problem["kind"] for problem in others} <= CONSEQUENCES, others
    return texts


ROUNDING = 1.02
"Sentences round."
CONSEQUENCES = {"latency", "push", "health"}
"What else a report may tell of these faults: late and failed pushes, a bad score."
UNITS: Mapping[str, float] = {"ms": 0.001, "s": 1, "min": 60, "h": 3600}
SPAN = re.compile(r"after ([\d.]+) (ms|s|min|h)\b")


def find(fault: Planted, texts: Sequence[str]) -> Told:
    pattern = re.compile(fault.pattern.replace("{size}", r"([\d,]+)"))
    found = [(text, match) for text in texts if (match := pattern.match(text))]
    assert len(found) == 1, (fault, texts)
    text, match = found[0]
    span = SPAN.search(text)
    seconds = None if span is None else float(span[1]) * UNITS[span[2]]
    return Told(text, int(match[1].replace(",", "")), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="leave journal and reports in this folder")
    kept: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="ntf-drill-") as temporary:
        folder = Path(temporary) if kept is None else kept
        folder.mkdir(parents=True, exist_ok=True)
        planted = asyncio.run(carry_out(folder, WHOLE, print))
        sentences = check_faults(folder, planted, WHOLE.settings)
        check_healthy(folder, WHOLE.settings)
    print(f"All {len(planted)} faults are named:")
    print("\n".join(f"- {sentence}" for sentence in sentences))
    return 0


if __name__ == "__main__":
    sys.exit(main())
