"""The examples of the agent's API do what the page says."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path

import pytest

from agent.duplex import events
from ntf_demo.demo import playground
from tests.agent.notifications.world import DEVICE
from tests.docs.pages import blocks, code_words
from tests.test_architecture import ROOT

PAGE = ROOT / "docs" / "agent-api.md"
DEADLINE = 60.0


async def test_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block by block in one namespace; a block of text is what the examples before it have printed."""
    monkeypatch.chdir(tmp_path)
    async with playground(tmp_path / "servers") as world, asyncio.timeout(DEADLINE):
        taken = 0

        async def next_push() -> str:
            nonlocal taken
            while len(world.accepted()) <= taken:  # the provider signals nobody here
                await asyncio.sleep(0.01)
            taken += 1
            return world.accepted()[taken - 1].body

        names = {
            "router": world.router.address,
            "ntf_server": world.server.address,
            "device_token": DEVICE,
            "next_push": next_push,
        }
        for block in blocks(PAGE):
            if block.language == "text":
                assert capsys.readouterr().out == block.text, block.where
                continue
            code = compile(block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.isawaitable(result):
                await result


def test_every_event_is_named() -> None:
    written = {word for words in code_words(PAGE) for word in words.replace("`", " ").split()}
    kinds = [
        kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)
    ]
    classes = {kind.__name__ for kind in kinds if not kind.__subclasses__()}
    assert len(classes) > 15
    assert classes <= written
