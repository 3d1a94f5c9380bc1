"""The served document against the served API: whatever schemathesis can think of, for a short while."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ntf_demo.statement_gateway import gateway_world
from ntf_server.config import LOCALHOST
from ntf_server.statements.openapi import SPEC_PATH

EXAMPLES = 10
"Requests of each kind for each operation."


async def test_the_api_is_as_documented(tmp_path: Path) -> None:
    async with gateway_world(
        tmp_path,
        client_header="X-Client",
        requests_per_minute=1_000_000,
        subscriptions_per_client=100_000,
        rules_per_subscription=5,
    ) as world:
        url = f"http://{LOCALHOST}:{world.server.gateway_port}{SPEC_PATH}"
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", url, "--header", f"X-Client: {'ab' * 32}"),
            *("--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing,stateful"),
            *("--seed", "1", "--generation-database", "none"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
