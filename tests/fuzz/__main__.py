"""`python -m tests.fuzz`: parsers, gateway bodies, agents and a live daemon against changed bytes.

For a given time; or with `--inputs` a given number, in parts: the next call goes on where this one ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from pathlib import Path

from tests.fuzz.agents import fuzz_agents
from tests.fuzz.campaign import Campaign
from tests.fuzz.daemon import fuzz_daemon
from tests.fuzz.parsers import fuzz_parsers

AGENT_MESSAGES = 200
"To agents, in a run for a given time: they are as many as a few seconds allow."


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="to repeat a run")
    parser.add_argument("--inputs", type=int, help="for parsers and agents, instead of half of the time")
    parser.add_argument("--state", type=Path, default=Path("fuzz.json"), help="of such a run (%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="for such a run (%(default)s)")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    findings = _campaign(args) if args.inputs else _for_some_time(args.seconds / 2, args.seed)
    for finding in findings:
        print(finding)
    with tempfile.TemporaryDirectory(prefix="ntf-fuzz-") as folder:
        daemon = asyncio.run(fuzz_daemon(Path(folder), args.seconds / 2, args.seed))
    for complaint in daemon.wrong:
        print(complaint)
    print(
        f"daemon: {daemon.blocks:,} blocks in {daemon.sessions:,} sessions,"
        f" {daemon.answered} of {daemon.asked} honest requests answered, {len(daemon.wrong)} findings"
    )
    return 1 if findings or daemon.wrong else 0


def _campaign(args: argparse.Namespace) -> list[str]:
    campaign = Campaign.load(args.state, args.seed, args.inputs)
    campaign.run(args.processes)
    print(f"{campaign.total:,} inputs, seed {campaign.seed}, {len(campaign.findings)} findings", flush=True)
    return campaign.findings


def _for_some_time(seconds: float, seed: int) -> list[str]:
    agents = fuzz_agents(AGENT_MESSAGES, seed)
    parsers = fuzz_parsers(seconds, seed)
    findings = [*map(str, agents.findings), *map(str, parsers.findings)]
    inputs = agents.inputs + parsers.inputs
    print(f"parsers and agents: {inputs:,} inputs, {len(findings)} findings", flush=True)
    return findings


if __name__ == "__main__":
    sys.exit(main())
