"""The attacks of the security review one after the other, and what honest clients get during each.

    python -m tests.drills.table [words]

Prints a row for each attack, and what was over the limits; ends with 1 if anything was. A drill that cannot
be run is a row that says why, and the next one begins. Words choose rows that have all of them in their
names. Takes five minutes. The limits are for two cores with nothing else to do; the last column says how
many times longer the server's work took because it waited for a processor.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.drills import test_gateway_devices, test_reach
from tests.drills.attacker import Attack
from tests.drills.test_gateway import stall, storm
from tests.drills.test_gateway_http import (
    gateway_world,
    many_names,
    many_rules,
    measured,
    requests,
    stalls,
    updates,
)
from tests.drills.test_router_clients import (
    LOCAL,
    SMALL,
    ask_for_unknown,
    ask_for_unknown_notifiers,
    fill,
    forward,
    measure,
    running_router,
    try_many_keys,
)
from tests.drills.test_signatures import replay_own, replay_unknown
from tests.drills.world import Asked, Service, world
from transport.cancellation import first_cause, raise_if_cancelled

SECONDS = 8.0
LONGEST = 90.0
"Seconds for a drill with its preparations."
COMMAND_LIMIT, NEWCOMER_LIMIT, PUSH_LIMIT = 0.150, 0.500, 0.250
"Seconds."
HEAD = ("item", "attack", "commands", "newcomers", "NMSG to push", "others", "lost", "over", "busy")


class Row(NamedTuple):
    """What honest clients got."""

    commands: Asked
    newcomers: Asked
    pushes: Asked
    "From a router's NMSG to the provider; at the router, from SEND to MSG."
    others: str = ""
    "What else the drill measured."
    lost: int = 0
    failed: bool = False
    busy: float = 1.0

    @property
    def over(self) -> list[str]:
        """What does not hold."""
        limits = ((self.commands, COMMAND_LIMIT), (self.newcomers, NEWCOMER_LIMIT), (self.pushes, PUSH_LIMIT))
        names = ("commands", "newcomers", "pushes")
        slow = [name for name, (asked, limit) in zip(names, limits, strict=True) if asked.p99 > limit]
        unanswered = [
            f"unanswered {name}"
            for name, (asked, _) in zip(names, limits, strict=True)
            if asked.answered < asked.asked
        ]
        return [*slow, *unanswered, *["lost"] * bool(self.lost), *["failed"] * self.failed]


Run = Callable[[Path], Awaitable[Row]]


@dataclass(frozen=True)
class Drill:
    item: str
    name: str
    run: Run


def _row(service: Service, others: str = "", failed: bool = False) -> Row:
    return Row(
        service.commands,
        service.newcomers,
        service.pushes,
        others,
        service.lost,
        failed or not service.survived or bool(service.tracebacks),
        service.busy,
    )


def server(attack: Attack | None = None) -> Run:
    """Against the notification server."""

    async def run(folder: Path) -> Row:
        async with world(folder, seconds=SECONDS) as drill:
            return _row(await drill.measure(SECONDS, attack=attack))

    return run


def gateway(attack: Attack | None = None) -> Run:
    """Against the statement gateway of the same process."""

    async def run(folder: Path) -> Row:
        async with gateway_world(folder, SECONDS) as (drill, port):
            service, asked = await measured(drill, port, SECONDS, attack)
        return _row(service, f"gateway {asked}", asked.answered < asked.asked - 1)

    return run


def router(attack: Attack | None = None, settings: dict[str, str] | None = None) -> Run:
    """Against our SMP router."""

    async def run(folder: Path) -> Row:
        async with running_router(folder, settings) as address:
            served = await measure(address, SECONDS, attack)
        return Row(served.pings, served.newcomers, served.messages)

    return run


async def _foreign_project(folder: Path) -> Row:
    service, asked = await test_gateway_devices.foreign_project(folder, SECONDS)
    return _row(service, f"{asked} pushes to them", asked > test_gateway_devices.FOREIGN)


async def _rings(folder: Path) -> Row:
    service, rang = await test_gateway_devices.rings(folder, SECONDS)
    return _row(service, f"{rang} rings", rang > 2 * test_gateway_devices.PER_MINUTE)


async def _many_addresses(folder: Path) -> Row:
    service, reached = await test_reach.many_addresses(folder, SECONDS)
    return _row(service, f"{reached} connections")


async def _own_hosts(folder: Path) -> Row:
    service, seen = await test_reach.own_hosts(folder, SECONDS)
    return _row(service, f"{', '.join(sorted(seen))!r}", seen != {test_reach.READY})


async def _unknown_queues(folder: Path) -> Row:
    service, seen, sessions = await test_reach.unknown_queues(folder, SECONDS)
    failed = seen != {test_reach.READY} or sessions > 1
    return _row(service, f"{', '.join(sorted(seen))!r}; {sessions} sessions", failed)


DRILLS = (
    Drill("-", "nobody attacks", server()),
    Drill("-", "nobody attacks, gateway on", gateway()),
    Drill("-", "nobody attacks the router", router()),
    Drill("1", "devices of a foreign Firebase project", _foreign_project),
    Drill("2", "12 senders ring one device", _rings),
    Drill("3", "Ed448 signatures for unknown tokens", server(replay_unknown)),
    Drill("3", "valid Ed448 signatures", server(replay_own)),
    Drill("4", "router: unknown queues", router(ask_for_unknown)),
    Drill("4", "router: unknown notifiers, of subscribed clients", router(ask_for_unknown_notifiers)),
    Drill("4", "router: many recipient keys", router(try_many_keys)),
    Drill("4", "router: commands forwarded to itself", router(forward, LOCAL)),
    Drill("5", "gateway: a body with 200,000 names", gateway(many_names)),
    Drill("5", "gateway: a body with 9,000 rules", gateway(many_rules)),
    Drill("6", "gateway: key updates", gateway(updates)),
    Drill("6", "gateway: two addresses stall handshakes", gateway(stalls)),
    Drill("6", "gateway: 1,000 stalled handshakes", gateway(stall)),
    Drill("6", "gateway: a storm of handshakes", gateway(storm)),
    Drill("6", "gateway: short requests without end", gateway(requests)),
    Drill("7", "router: storage filled", router(fill, SMALL)),
    Drill("8", "names with 4,000 addresses", _many_addresses),
    Drill("9", "routers named at an own host", _own_hosts),
    Drill("9", "queues that an own router does not have", _unknown_queues),
)


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cells(drill: Drill, row: Row) -> tuple[object, ...]:
    over = ", ".join(row.over) or "-"
    return (
        *(drill.item, drill.name, row.commands, row.newcomers, row.pushes, row.others or "-", row.lost),
        *(over, f"{row.busy:.1f}"),
    )


async def _run(drill: Drill) -> tuple[tuple[object, ...], bool]:
    """Its cells, and whether everything holds."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with asyncio.timeout(LONGEST):
                row = await drill.run(Path(folder))
    except Exception as error:
        raise_if_cancelled()
        cause = first_cause(error)
        what = " ".join(f"{type(cause).__name__} {cause}".split()).replace("|", "/")
        return (drill.item, drill.name, "-", "-", "-", what, "-", "failed", "-"), False
    return _cells(drill, row), not row.over


async def main(*words: str, drills: Sequence[Drill] = DRILLS) -> int:
    """The number of rows with anything over its limit."""
    print(_line(HEAD), _line(["---"] * len(HEAD)), sep="\n", flush=True)
    bad = 0
    for drill in drills:
        if not all(word.lower() in drill.name.lower() for word in words):
            continue
        cells, holds = await _run(drill)
        print(_line(cells), flush=True)
        bad += not holds
    print(
        f"\n{bad or 'no'} {'row' if bad == 1 else 'rows'} over the limits: commands p99"
        f" {COMMAND_LIMIT * 1000:.0f} ms, newcomers p99 {NEWCOMER_LIMIT * 1000:.0f} ms, pushes p99"
        f" {PUSH_LIMIT * 1000:.0f} ms, everybody answered, nothing lost"
    )
    return bad


if __name__ == "__main__":
    sys.exit(bool(asyncio.run(main(*sys.argv[1:]))))
