"""`ntf-agent talk` as people use it: a process per command."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from smp_router.router import Router

DEADLINE = 60.0


class Terminal:
    def __init__(self, folder: Path, router: str, name: str) -> None:
        self._folder, self._router, self._name = folder, router, name

    async def run(self, *arguments: str, code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", "--folder", str(self._folder)),
            *("talk", "--router", self._router, "--name", self._name, "--json", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(DEADLINE):
            out, err = await process.communicate()
        assert process.returncode == code, err.decode()
        return (err if code else out).decode()

    async def lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in (await self.run(*arguments)).splitlines()]


async def test_a_conversation(tmp_path: Path) -> None:
    async with Router.start() as router:
        alice, bob = (
            Terminal(tmp_path / name, str(router.address), name.title()) for name in ("alice", "bob")
        )
        [created] = await alice.lines("create", "--short")
        [joined] = await bob.lines("join", created["link"])
        events = await alice.lines("receive")
        assert [e["info"] for e in events if e["event"] == "Confirmed"] == ["Bob"]
        await bob.lines("send", str(joined["connection"]), "Hello Alice")
        events = await alice.lines("receive")
        assert [e["body"] for e in events if e["event"] == "MessageReceived"] == ["Hello Alice"]
        [status] = await alice.lines("status")
        assert (status["kind"], status["pq"]) == ("duplex", True)
        await alice.run("delete", str(created["connection"]))
        assert await alice.lines("status") == []
        assert "AUTH" in await bob.run("send", str(joined["connection"]), "Are you there?", code=1)


async def test_mistakes(tmp_path: Path) -> None:
    async with Router.start() as router:
        alice = Terminal(tmp_path / "alice", str(router.address), "Alice")
        for arguments, words in (
            (("send", "1", "x"), "there is no such connection"),
            (("accept", "7"), "there is no such request"),
            (("join", "rubbish"), "A_LINK"),
        ):
            error = await alice.run(*arguments, code=1)
            assert words in error
            assert len(error.splitlines()) == 1
