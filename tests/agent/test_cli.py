"""`ntf-agent` as people use it: a process per command."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.__main__ import main
from agent.cli.output import Output
from agent.duplex.agent import DuplexConfig
from agent.duplex.events import Event, MessageFailed, MessageReceived, RatchetSync, ServerUp, ServiceDown
from agent.errors import AgentError
from ntf_demo.demo import Playground, playground
from protocol.addresses import parse_smp_server
from protocol.agent.integrity import Skipped
from protocol.agent.ratchet_sync import SyncState
from protocol.smp_messages import Ping, QueueSet
from smp_client.dialer import NetworkConfig
from smp_client.proxy import ProxyConfig, ProxyPolicy
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.agent.duplex.world import DEADLINE
from tests.agent.notifications.world import DEVICE, message_push, verification
from tests.ntf_server.subscriber.conftest import watch_commands
from tests.waiting import until

NOWHERE = "ntf://" + "A" * 43 + "=@127.0.0.1:1"
NO_ROUTER = "smp://" + "A" * 43 + "=@127.0.0.1:1"


class Terminal:
    """Runs commands for one person."""

    def __init__(self, folder: Path, router: object = None) -> None:
        self._options = ["--folder", str(folder), "--name", folder.name.title()]
        if router is not None:
            self._options += ["--router", str(router)]

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", *self._options, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        process = await self.start(*arguments)
        async with asyncio.timeout(DEADLINE):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode == code, err.decode()
        return (err if code else out).decode()

    async def lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in (await self.run(*arguments, "--json")).splitlines()]


@pytest.fixture
def pushes(tmp_path: Path) -> Path:
    return tmp_path / "pushes.jsonl"


@pytest.fixture
async def world(tmp_path: Path, pushes: Path) -> AsyncIterator[Playground]:
    async with playground(tmp_path / "servers", record_file=pushes) as running:
        yield running


@pytest.fixture
def alice(world: Playground, tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "alice", world.router.address)


@pytest.fixture
def bob(world: Playground, tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "bob", world.router.address)


@asynccontextmanager
async def staying(terminal: Terminal, *arguments: str) -> AsyncIterator[asyncio.StreamReader]:
    process = await terminal.start(*arguments)
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE):
            _, err = await process.communicate()
        assert process.returncode == 130
        assert err == b""


async def line_with(text: str, lines: asyncio.StreamReader) -> str:
    seen = []
    async with asyncio.timeout(DEADLINE):
        while True:
            seen.append((await lines.readline()).decode())
            assert seen[-1], seen
            if text in seen[-1]:
                return seen[-1]


async def test_a_conversation_as_json(alice: Terminal, bob: Terminal) -> None:
    [created] = await alice.lines("create", "--short")
    [joined] = await bob.lines("join", created["link"])
    events = await alice.lines("receive")
    assert [e["info"] for e in events if e["event"] == "Confirmed"] == ["Bob"]
    await bob.lines("send", str(joined["connection"]), "Hello Alice")
    events = await alice.lines("receive")
    assert [e["body"] for e in events if e["event"] == "MessageReceived"] == ["Hello Alice"]
    [token, status] = await alice.lines("status")
    assert token == {"token": None}
    assert (status["kind"], status["pq"]) == ("duplex", True)
    await alice.run("delete", str(created["connection"]))
    assert await alice.lines("status") == [token]
    assert "AUTH" in await bob.run("send", str(joined["connection"]), "Are you there?", code=1)


async def test_a_push_wakes_the_phone(
    world: Playground, pushes: Path, alice: Terminal, bob: Terminal
) -> None:
    device = DEVICE.token.decode()
    register = ("notifications", "register", str(world.server.address), device, "--provider", "test")
    assert "Token: ACTIVE" in await alice.run(*register, "--pushes", str(pushes))
    link = (await alice.run("create", "--short")).splitlines()[-1]
    await bob.run("join", link)
    async with staying(alice, "notifications", "listen", "--pushes", str(pushes)) as heard:
        await line_with("Listening", heard)
        await line_with("Bob joined", heard)
        await line_with("Connection 1 is made", heard)
        await bob.run("receive")
        await bob.run("send", "1", "hello \x1b[31mAlice")
        assert await line_with("hello", heard) == "Connection 1: hello \N{REPLACEMENT CHARACTER}[31mAlice\n"
    status = await alice.run("status")
    assert f"Token: ACTIVE, instant, at {world.server.address}\n" in status
    assert "Connection 1: duplex, post-quantum; notifications: NEW (next: NTF_CHECK)" in status
    await alice.run("notifications", "off", "1")
    assert "notifications: none" in await alice.run("status")


async def test_by_hand(world: Playground, alice: Terminal, bob: Terminal) -> None:
    told = await alice.run(
        "notifications", "register", str(world.server.address), DEVICE.token.decode(), "--provider", "test"
    )
    assert "ntf-agent notifications verify" in told
    data = json.loads((await verification(world)).body)["notificationData"]
    verify = ("notifications", "verify", "--", data["nonce"], data["verification"])
    assert await alice.run(*verify) == "Token: ACTIVE\n"
    link = (await alice.run("create", "--short")).splitlines()[-1]
    await bob.run("join", link)
    push = await message_push(world)
    assert "Bob joined" in await alice.run("notifications", "push", stdin=push.body)
    assert await alice.run("notifications", "push", stdin=json.dumps({"checkMessages": True})) == ""
    assert await alice.run("notifications", "unregister") == "Token given up.\n"
    assert (await world.server.store.counts()).tokens == 0


async def test_following(alice: Terminal, bob: Terminal) -> None:
    link = (await alice.run("create")).splitlines()[-1]
    async with staying(alice, "receive", "--follow") as shown:
        await bob.run("join", link)
        await line_with("Bob joined", shown)
        await line_with("is made", shown)
        await bob.run("receive")
        await bob.run("send", "1", "hello")
        await line_with("Connection 1: hello", shown)
        assert "Connection 1: duplex" in await alice.run("status")
        assert "in use by another agent" in await alice.run("send", "1", "hello", code=1)


async def test_a_new_ratchet_and_another_router(
    world: Playground, alice: Terminal, bob: Terminal, tmp_path: Path
) -> None:
    """What a user needs after a backup was restored, or when a move gets stuck."""
    link = (await alice.run("create")).splitlines()[-1]
    await bob.run("join", link)
    await alice.run("receive")
    assert "Connection 1: Alice lets us in\nConnection 1 is made\n" in await bob.run("receive")
    assert "no need" in await alice.run("sync", "1", code=1)
    await alice.run("sync", "1", "--force")
    assert "ratchet agreed" in await bob.run("receive")
    assert "ratchet agreed" in await alice.run("receive")
    await bob.run("receive")
    await alice.run("receive")
    assert (await alice.lines("status"))[1]["ratchet"] == "ok"
    assert "no other router" in await alice.run("switch", "1", code=1)
    async with Router.start() as another:
        await alice.run("switch", "1", "--router", str(another.address))
        assert "replaced already" in await alice.run("switch", "1", code=1)
        await alice.run("switch", "1", "--abort")
        assert len(another.state.queues) == 0
    await alice.run("send", "1", "not lost")
    assert "Connection 1: not lost\n" in await bob.run("receive", "--receipts")
    assert "Connection 1: received " in await alice.run("receive")


@pytest.mark.parametrize(
    ("event", "values", "text"),
    [
        (
            ServerUp(parse_smp_server(NO_ROUTER), (1, 2)),
            {"server": NO_ROUTER, "connection_ids": [1, 2]},
            None,
        ),
        (
            MessageReceived(1, 7, 5, 0, Skipped(3, 4), b"hi", pq=True),
            {
                "connection_id": 1,
                "message_id": 7,
                "sender_message_id": 5,
                "broker_ts": 0,
                "integrity": {"outcome": "Skipped", "first": 3, "last": 4},
                "body": "hi",
                "pq": True,
            },
            "Connection 1: hi [messages 3 to 4 are missing before it]",
        ),
        (
            RatchetSync(1, SyncState.REQUIRED),
            {"connection_id": 1, "state": "required", "error": None},
            "Connection 1: ratchet required",
        ),
        (
            ServiceDown(parse_smp_server(NO_ROUTER), QueueSet(2, b"\x01\xff")),
            {"server": NO_ROUTER, "queues": {"count": 2, "hash": "01ff"}},
            None,
        ),
        (
            MessageFailed(1, 7, "SMP AUTH"),
            {"connection_id": 1, "message_id": 7, "error": "SMP AUTH"},
            "Connection 1: message 7 is not sent: SMP AUTH",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_events(
    event: Event, values: dict[str, Any], text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Output(as_json=True).show(event)
    assert json.loads(capsys.readouterr().out) == {"event": type(event).__name__} | values
    Output(as_json=False).show(event)
    assert capsys.readouterr().out == ("" if text is None else f"{text}\n")


def config_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> DuplexConfig:
    """What a command asks of the agent."""
    seen = list[DuplexConfig]()

    def opened(config: DuplexConfig) -> None:
        seen.append(config)
        raise AgentError("so be it")

    monkeypatch.setattr("agent.cli.running.open_duplex", opened)
    assert main(["--folder", str(folder), "create", *arguments]) == 1
    (config,) = seen
    return config


@pytest.mark.parametrize("policy", list(ProxyPolicy))
def test_sending_through_a_proxy_is_for_the_user_to_decide(
    tmp_path: Path, policy: ProxyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--proxy", policy.value] if policy is not ProxyPolicy.UNKNOWN else []
    config, server = (
        config_of(monkeypatch, tmp_path, "--router", NO_ROUTER, *asked),
        parse_smp_server(NO_ROUTER),
    )
    assert config.proxy == ProxyConfig(policy=policy, proxies=(server,), known=(server,))


def test_the_password_of_a_router_is_for_queues_and_for_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the router is not named again."""
    passwords = {parse_smp_server(NO_ROUTER): b"sesame"}
    for named in (("--router", NO_ROUTER.replace("@", ":sesame@")), ()):
        config = config_of(monkeypatch, tmp_path, *named)
        assert config.passwords == passwords
        assert config.sending.passwords == passwords


@pytest.mark.parametrize("onion", [None, "prefer", "require"])
def test_the_way_to_servers_is_for_the_user_to_decide(
    tmp_path: Path, onion: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, asked = "socks5://127.0.0.1:9050", [] if onion is None else ["--onion", onion]
    config = config_of(monkeypatch, tmp_path, "--router", NO_ROUTER, "--socks-proxy", proxy, *asked)
    assert config.network == NetworkConfig(
        socks_proxy=proxy, proxy_all=True, prefer_onion=onion is not None, onion_only=onion == "require"
    )
    assert config_of(monkeypatch, tmp_path, "--router", NO_ROUTER).network == NetworkConfig()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["send", "1", "text"], "there is no such connection"),
        (["send", "1", "\udcff"], "there is no such connection"),
        (["join", "\udcff", "--router", NO_ROUTER], "A_LINK"),
        (["join", "simplex:/", "--router", NO_ROUTER, "--name", "\udcff"], "A_LINK"),
        (["notifications", "verify", "\udcff", "AAAA"], "base64url"),
        (["notifications", "register", NOWHERE, "\udcff", "--period", "3"], "20 to 65535"),
        (["switch", "1"], "there is no such connection"),
        (["accept", "7"], "there is no such request"),
        (["join", "nonsense", "--router", NO_ROUTER], "A_LINK"),
        (["create"], "name a router"),
        (["notifications", "verify", "AAAA", "AAAA"], "not registered"),
        (["notifications", "verify", "!", "AAAA"], "base64url"),
        (["notifications", "check"], "not registered"),
        (["notifications", "listen", "--pushes", "none"], "not registered"),
        (["notifications", "unregister"], "no token"),
        (["notifications", "off", "7"], "there is no such connection"),
        (["notifications", "register", NOWHERE, "x" * 300], "1 to 255"),
        (["--timeout", "1", "notifications", "register", NOWHERE, "aa"], "ConnectFailed|refused|Connect"),
        (["notifications", "register", NOWHERE, "aa", "--period", "3"], "20 to 65535"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    folder = ["--folder", str(tmp_path / "agent")]
    main([*folder, "notifications", "register", NOWHERE, "aa", "--period", "3"])  # makes the device
    capsys.readouterr()
    assert main([*folder, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("ntf-agent: ")
    assert captured.err.count("\n") == 1
    assert re.search(told, captured.err), captured.err


@pytest.mark.parametrize(
    "arguments",
    [["create", "--router", "http://x"], ["notifications", "register", "smp://x", "aa"], [], ["send", "x"]],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: ntf-agent" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["create", "--router", "smp://" + "A" * 43 + "=@h"]])
def test_folder_that_cannot_be_used(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--folder", str(tmp_path / "file" / "agent"), *command]) == 1
    assert capsys.readouterr().err.startswith("ntf-agent: ")


@pytest.mark.parametrize(
    "command", [["status"], ["receive"], ["send", "1", "text"], ["create"], ["notifications", "check"]]
)
def test_asking_a_device_that_is_not_there_makes_none(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path / "nobody"), *command]) == 1
    assert re.search("there is nothing in|name a router", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["status"], ["create", "--router", NO_ROUTER]])
def test_state_of_an_earlier_version_is_told_of(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.db").touch()
    assert main(["--folder", str(tmp_path), *command]) == 1
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"ntf-agent: {tmp_path / 'agent.db'} is of an earlier version")


async def test_an_encrypted_device(world: Playground, tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("first key\n")
    other.write_text("second key\n")
    alice = Terminal(tmp_path / "alice", world.router.address)
    await alice.run("create", "--key-file", str(key))
    await alice.run("create", "--services", "--key-file", str(key))
    assert "without a key" in await alice.run("status", code=1)
    await alice.run("rekey", "--key-file", str(key), "--new-key-file", str(other))
    wrong = await alice.run("status", "--key-file", str(key), code=1)
    assert wrong.count("\n") == 1
    assert "with this key" in wrong
    assert len(await alice.lines("status", "--key-file", str(other))) == 3


async def test_a_router_with_a_password(tmp_path: Path) -> None:
    """It is remembered, for nobody else to read, and never shown."""
    async with Router.start(RouterConfig(password=b"sesame")) as router:
        identity, where = str(router.address).split("@")
        alice = Terminal(tmp_path / "alice", f"{identity}:sesame@{where}")
        assert "sesame" not in await alice.run("create")
        file = tmp_path / "alice" / "routers"
        assert file.stat().st_mode & 0o077 == 0
        again = Terminal(tmp_path / "alice")
        assert "sesame" not in await again.run("create")
        assert "AUTH" in await Terminal(tmp_path / "bob", router.address).run("create", code=1)


async def test_links_and_several_connections(alice: Terminal, bob: Terminal) -> None:
    [created] = await alice.lines("create", "--short")
    await alice.run("set-link-data", str(created["connection"]), "another name")
    await bob.run("join", created["link"])
    await alice.run("receive")
    await bob.run("receive")
    sent = await alice.lines("send-many", "to all", str(created["connection"]), "77")
    assert ["message" in each for each in sent] == [True, False]
    assert "to all" in await bob.run("receive")
    [address] = await alice.lines("create", "--short", "--address")
    await alice.run("delete-link", str(address["connection"]))
    assert "no short link" in await alice.run("delete-link", str(address["connection"]), code=1)


@pytest.mark.parametrize("options", [("--onion", "require"), ("--socks-proxy", "gopher://x")])
async def test_options_for_onion_routers_that_make_no_sense(options: tuple[str, ...], tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "alice", NO_ROUTER)
    assert "SOCKS" in (await terminal.run(*options, "create", code=1)).upper()


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--separate-sessions", "--services"), "one session"), (("--cover-traffic", "0"), "positive")],
)
async def test_options_about_sessions_that_make_no_sense(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path / "alice", NO_ROUTER)
    assert message in await terminal.run(*options, "create", code=1)


async def test_separate_sessions_and_cover_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Router.start() as router:
        terminal, seen = Terminal(tmp_path / "alice", router.address), watch_commands(router, monkeypatch)
        for _ in range(2):
            await terminal.run("create")
        options = ("--separate-sessions", "--cover-traffic", "0.05", "receive", "--follow")
        process = await terminal.start(*options)
        await until(lambda: router.connections == 2 and seen.get(Ping, 0) >= 10)
        process.send_signal(signal.SIGINT)
        await process.communicate()


async def test_through_a_socks_proxy(tmp_path: Path) -> None:
    """Nothing goes around it: without the proxy the router cannot be reached."""
    async with Router.start() as router:
        terminal = Terminal(tmp_path / "alice", router.address)
        message = await terminal.run("--socks-proxy", "socks5://127.0.0.1:1", "create", code=1)
        assert "the proxy" in message
        assert router.connections == 0
