"""From NMSG to push while thousands of clients connect at once.

python -m bench.storm [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from bench.measure import Row, at_most, print_rows
from tests.drills.test_handshakes import storm
from tests.drills.world import Service, world

PUSH_P99 = 0.25


async def measure(folder: Path, seconds: float) -> tuple[Service, Service]:
    """Without and with the storm."""
    async with world(folder, seconds=2 * seconds) as drill:
        calm = await drill.measure(seconds)
        return calm, await drill.measure(seconds, attack=storm)


def rows(name: str, service: Service) -> list[Row]:
    return [
        Row(f"{name}: NMSG to push, p50", service.pushes.p50 * 1000, "ms"),
        Row(f"{name}: NMSG to push, p99", service.pushes.p99 * 1000, "ms"),
        Row(f"{name}: PING, p99", service.commands.p99 * 1000, "ms"),
        Row(f"{name}: liveness, p99", service.liveness.p99 * 1000, "ms"),
        Row(f"{name}: a new client, p99", service.newcomers.p99 * 1000, "ms"),
        at_most(f"{name}: pushes lost", service.lost, "", 0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ntf-bench-") as name:
        calm, stormy = asyncio.run(measure(Path(name), args.seconds))
    goal = at_most("NMSG to push in the storm, p99", stormy.pushes.p99 * 1000, "ms", PUSH_P99 * 1000)
    met = print_rows("A storm of TLS handshakes", [*rows("calm", calm), *rows("storm", stormy), goal])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
