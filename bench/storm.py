"""From NMSG to push while thousands of clients connect at once."""

from __future__ import annotations

from pathlib import Path

from bench.measure import Row, figure
from bench.part import Part
from tests.drills.test_handshakes import storm
from tests.drills.world import Service, world

PUSH_P99_MS = 250


async def measure(folder: Path, *, seconds: float = 5.0) -> list[Row]:
    """Without and with the storm."""
    async with world(folder, seconds=2 * seconds) as drill:
        calm = await drill.measure(seconds)
        stormy = await drill.measure(seconds, attack=storm)
    return [*rows("calm", calm), *rows("storm", stormy, PUSH_P99_MS)]


def rows(name: str, service: Service, aim: float | None = None) -> list[Row]:
    return [
        figure(f"{name}: NMSG to push, p50", "ms", service.pushes.p50 * 1000),
        figure(f"{name}: NMSG to push, p99", "ms", service.pushes.p99 * 1000, aim=aim),
        figure(f"{name}: PING, p99", "ms", service.commands.p99 * 1000),
        figure(f"{name}: liveness, p99", "ms", service.liveness.p99 * 1000),
        figure(f"{name}: a new client, p99", "ms", service.newcomers.p99 * 1000),
        figure(f"{name}: pushes", "lost", service.lost, aim=0),
    ]


STORM = Part(
    name="storm",
    title="A storm of TLS handshakes",
    measure=measure,
    quick={"seconds": 3.0},
    repeats=2,
    seconds=30,
    quick_seconds=10,
    why="When a network comes back, all clients connect at once; those who are connected should not notice.",
    how="The daemon and 2,000 clients that connect again and again are processes of their own; an"
    " honest router, provider and client measure what they get, first without the storm."
    " [Reliability](reliability.md) has the other drills.",
    bound="the arithmetic of 2,000 handshakes takes seconds of one core. The daemon spends a"
    " millisecond of each turn of its event loop on them, so newcomers wait for each other and"
    " nobody else does.",
)
