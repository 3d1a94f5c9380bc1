"""The client that docs/statements.md shows, run against a gateway."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from ntf_demo.statement_gateway import gateway_world, key_pair, signed_statement
from tests.test_architecture import ROOT
from tests.waiting import until

PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ALICE = key_pair("alice")


async def test_the_client(tmp_path: Path) -> None:
    (program,) = PROGRAM.findall((ROOT / "docs" / "statements.md").read_text())
    async with gateway_world(tmp_path) as world:
        for shown, here in (
            ("http://127.0.0.1:8443", f"http://127.0.0.1:{world.server.gateway_port}"),
            ('SENDER, TOPIC = "b2" * 32', f'SENDER, TOPIC = "{ALICE[0].hex()}"'),
        ):
            assert shown in program
            program = program.replace(shown, here)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"statements of {ALICE[0].hex()}")
        await world.node.submit(signed_statement(ALICE, bytes.fromhex("c3" * 32), data=b"hello"))
        await until(lambda: [push.token for push in world.accepted] == ["a1" * 32])
