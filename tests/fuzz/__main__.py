"""`python -m tests.fuzz`: parsers and a live daemon against changed bytes, for a given time."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from tests.fuzz.daemon import fuzz_daemon
from tests.fuzz.parsers import fuzz_parsers


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="to repeat a run")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    parsers = fuzz_parsers(args.seconds / 2, args.seed)
    for finding in parsers.findings:
        print(finding)
    print(f"parsers: {parsers.inputs:,} inputs, {len(parsers.findings)} findings", flush=True)
    with tempfile.TemporaryDirectory(prefix="ntf-fuzz-") as folder:
        daemon = asyncio.run(fuzz_daemon(Path(folder), args.seconds / 2, args.seed))
    for complaint in daemon.wrong:
        print(complaint)
    print(
        f"daemon: {daemon.blocks:,} blocks in {daemon.sessions:,} sessions,"
        f" {daemon.answered} of {daemon.asked} honest requests answered, {len(daemon.wrong)} findings"
    )
    return 1 if parsers.findings or daemon.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
