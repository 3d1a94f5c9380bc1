"""The control port, as an operator with netcat sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ntf_server import control
from ntf_server.app import running
from tests import builders
from tests.ntf_server.conftest import active_device, make_app, make_config
from tests.ntf_server.ntf_client import DEADLINE, NtfClient


class Talk:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def line(self) -> str:
        async with asyncio.timeout(DEADLINE):
            return (await self.reader.readline()).decode().rstrip("\n")

    async def say(self, text: str) -> str:
        self.writer.write(text.encode() + b"\n")
        return await self.line()


@asynccontextmanager
async def talking(
    folder: Path, port: int, admin: str = "root pass", user: str = "look"
) -> AsyncIterator[Talk]:
    passwords = {"control_port_admin_password": admin, "control_port_user_password": user}
    config = make_config(folder, TRANSPORT={"control_port": port}, AUTH=passwords)
    async with running(make_app(folder, config)) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        await device.subscribe(client, builders.queue_ntf(1), builders.ed25519())
        async with another_talk(port) as talk:
            yield talk
        client.close()


@asynccontextmanager
async def another_talk(port: int) -> AsyncIterator[Talk]:
    talk = Talk(*await asyncio.open_connection("127.0.0.1", port))
    assert "help" in await talk.line()
    yield talk
    talk.writer.close()


async def test_roles(tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FAILED_LOGIN_PAUSE", 0.0)
    async with talking(tmp_path, unused_tcp_port) as talk:
        for command in ("stats", "subs", "server-info", "resubscribe localhost", "auth", "auth wrong"):
            assert await talk.say(command) == "AUTH"
        assert await talk.say("auth look") == "role: user"
        assert json.loads(await talk.say("stats"))["active_tokens"] == 1
        assert await talk.say("resubscribe localhost") == "AUTH"
        assert await talk.say("auth root pass") == "role: admin"
        assert await talk.say("resubscribe localhost") == "ok"
        assert await talk.say("resubscribe elsewhere") == "no such router"
        status = json.loads(await talk.say("subs localhost"))
        assert status["connected"] is False
        assert await talk.say("subs elsewhere") == "no such router"
        assert json.loads(await talk.say("subs"))["connected"] is False
        assert await talk.say("daemons") == "this one alone"
        assert json.loads(await talk.say("server-info"))["routers"] == 1
        assert await talk.say("help") == control.HELP.partition("\n")[0]


async def test_unset_passwords_let_nobody_in(tmp_path: Path, unused_tcp_port: int) -> None:
    async with talking(tmp_path, unused_tcp_port, admin="", user="") as talk:
        assert await talk.say("auth") == "AUTH"
        assert await talk.say("stats") == "AUTH"


async def test_only_a_failed_login_is_slow(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FAILED_LOGIN_PAUSE", DEADLINE)
    async with talking(tmp_path, unused_tcp_port) as talk, another_talk(unused_tcp_port) as guessing:
        assert await talk.say("auth look") == "role: user"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guessing.say("auth wrong"), 0.3)


@pytest.mark.parametrize("farewell", [b"quit\n", b""], ids=["quit", "end"])
async def test_farewell(tmp_path: Path, unused_tcp_port: int, farewell: bytes) -> None:
    async with talking(tmp_path, unused_tcp_port) as talk:
        talk.writer.write(farewell)
        talk.writer.write_eof()
        assert await talk.line() == ""


async def test_an_unknown_command_ends_the_talk(tmp_path: Path, unused_tcp_port: int) -> None:
    async with talking(tmp_path, unused_tcp_port) as talk:
        assert "unknown command" in await talk.say("drop tables")
        assert await talk.line() == ""


async def test_endless_line_ends_the_talk(tmp_path: Path, unused_tcp_port: int) -> None:
    async with talking(tmp_path, unused_tcp_port) as talk:
        talk.writer.write(b"x" * 10_000)
        assert await talk.line() == ""


async def test_a_browser_is_disconnected_at_its_first_line(tmp_path: Path, unused_tcp_port: int) -> None:
    """A page could make it send commands, password included, in the body of a request."""
    async with talking(tmp_path, unused_tcp_port) as talk:
        talk.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n\r\nauth root pass\nresubscribe localhost\n")
        async with asyncio.timeout(DEADLINE):
            answer = (await talk.reader.read()).decode()
        assert answer.startswith("unknown command 'POST'")
        assert answer.count("\n") == 1
