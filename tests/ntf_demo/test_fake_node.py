"""`ntf-server fake-node`: a statement store as a program of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import aiohttp

from ntf_demo.statement_gateway import key_pair, signed_statement
from tests.ntf_server.statements.builders import topic

DEADLINE = 60.0


async def call(socket: aiohttp.ClientWebSocketResponse, method: str, parameter: Any) -> Any:
    await socket.send_json({"jsonrpc": "2.0", "id": 1, "method": method, "params": [parameter]})
    return (await socket.receive_json())["result"]


def notification(name: str, *statements: str, **more: int) -> dict[str, Any]:
    result = {"event": "newStatements", "data": {"statements": [*statements], **more}}
    params = {"subscription": name, "result": result}
    return {"jsonrpc": "2.0", "method": "statement_statement", "params": params}


async def test_the_program() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ntf_server", "fake-node", "--port", "0"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    statement = "0x" + signed_statement(key_pair("alice"), topic(1)).hex()
    wanted = {"matchAny": ["0x" + topic(1).hex()]}
    try:
        async with asyncio.timeout(DEADLINE), aiohttp.ClientSession() as session:
            url = json.loads(await process.stdout.readline())["url"]
            async with session.ws_connect(url) as sender, session.ws_connect(url) as watcher:
                name = await call(watcher, "statement_subscribeStatement", wanted)
                assert await watcher.receive_json() == notification(name, remaining=0)
                for expected in ("new", "known"):
                    assert await call(sender, "statement_submit", statement) == {"status": expected}
                assert await call(sender, "statement_submit", "0x00") == {"status": "invalid"}
                assert await watcher.receive_json() == notification(name, statement)
                assert await call(watcher, "statement_unsubscribeStatement", name) is True
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_without_its_libraries_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None; from ntf_server.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "fake-node", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.stderr == "ntf-server: fake-node needs pip install 'ntf-server[statements]'\n"
    assert done.returncode != 0
