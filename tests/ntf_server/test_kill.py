"""kill -9 during a storm of commands: what was acknowledged is still there after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from protocol.addresses import NtfServer, parse_ntf_server
from protocol.crypto import Ed25519PrivateKey
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import Err, IdSub, IdTkn, Ok, Schk, Sdel, Snew, Sub, Tchk, Tcrn, Tdel, Tkn
from protocol.statuses import TokenInput
from store.sqlite import SqliteStore
from tests import builders
from tests.ntf_server.conftest import null_token
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.ntf_server.test_cli import init
from transport.errors import TransportError

KILLS = 50
STORM_SECONDS = 0.25


@dataclass
class Acknowledged:
    """What the server said yes to. Entities whose last command was not answered are in no set."""

    tokens: dict[EntityId, Device] = field(default_factory=dict)
    gone_tokens: dict[EntityId, Device] = field(default_factory=dict)
    subscriptions: dict[EntityId, Device] = field(default_factory=dict)
    gone_subscriptions: dict[EntityId, Device] = field(default_factory=dict)


ENV = {
    "NTF_TRANSPORT_LISTEN": "127.0.0.1",
    "NTF_TRANSPORT_PORT": "0",
    "NTF_LIMITS_COMMANDS_PER_SECOND": "0",
    "NTF_SUBSCRIBER_ALLOW_PRIVATE_ROUTERS": "on",
}


class Server:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> NtfServer:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ntf_server", "start", "--config-dir", str(self._folder / "c"),
            "--log-level", "error",
            stdout=subprocess.PIPE,
            env=os.environ | ENV,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        return parse_ntf_server(line.removeprefix("Server address: ").strip())

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()


async def storm(client: NtfClient, acknowledged: Acknowledged, chance: random.Random) -> None:
    """Commands, one after the other, until the connection breaks."""
    with contextlib.suppress(TransportError, OSError, TimeoutError):  # killed
        while True:
            await _one_command(client, acknowledged, chance)


async def _one_command(client: NtfClient, acknowledged: Acknowledged, chance: random.Random) -> None:
    """A token is taken out of its set while a command on it is under way: if that is not answered, nothing
    is known of the token any more."""
    kind = chance.random()
    if kind < 0.3 or not acknowledged.tokens:
        device = Device.make(null_token())
        assert isinstance(await device.register(client), IdTkn)
        acknowledged.tokens[device.token_id] = device
        return
    device = acknowledged.tokens.pop(chance.choice(list(acknowledged.tokens)))
    if kind < 0.35:
        assert await device.ask(client, Tdel()) == Ok()
        acknowledged.gone_tokens[device.token_id] = device
        return
    if kind < 0.5:
        assert await device.ask(client, Tcrn(60)) == Ok()
    elif kind < 0.85:
        await _subscribe(client, device, acknowledged, chance)
    else:
        await _unsubscribe(client, device, acknowledged)
    acknowledged.tokens[device.token_id] = device


async def _subscribe(
    client: NtfClient, device: Device, acknowledged: Acknowledged, chance: random.Random
) -> None:
    """A burst of SNEW; refused as long as the token is not verified (see `activate`)."""
    key = Ed25519PrivateKey(os.urandom(32))
    queues = [builders.queue_ntf(chance.getrandbits(60)) for _ in range(chance.randint(1, 8))]
    snews = [Snew(device.token_id, queue, key) for queue in queues]
    for answer in await client.ask_many([(snew, NO_ENTITY, device.key) for snew in snews]):
        if isinstance(answer, IdSub):
            acknowledged.subscriptions[answer.subscription_id] = device


async def _unsubscribe(client: NtfClient, device: Device, acknowledged: Acknowledged) -> None:
    own = [id for id, owner in acknowledged.subscriptions.items() if owner is device]
    if own:
        del acknowledged.subscriptions[own[0]]
        assert await client.ask(Sdel(), own[0], device.key) == Ok()
        acknowledged.gone_subscriptions[own[0]] = device


async def check(client: NtfClient, acknowledged: Acknowledged) -> None:
    for device in acknowledged.tokens.values():
        assert isinstance(await device.ask(client, Tchk()), Tkn)
    for device in acknowledged.gone_tokens.values():
        assert isinstance(await device.ask(client, Tchk()), Err)
    for subscription, device in acknowledged.subscriptions.items():
        if device.token_id in acknowledged.tokens:
            assert isinstance(await client.ask(Schk(), subscription, device.key), Sub)
    for subscription, device in acknowledged.gone_subscriptions.items():
        assert isinstance(await client.ask(Schk(), subscription, device.key), Err)


async def activate(folder: Path, acknowledged: Acknowledged) -> None:
    """Between two runs, as if their owners had sent the codes: SNEW needs ACTIVE tokens."""
    store = SqliteStore(folder / "d" / "ntf-server.db")
    await store.open()
    for record in await store.tokens(list(acknowledged.tokens)):
        assert record is not None
        await store.move_token(record, TokenInput.CODE_MATCHED, record.updated_on)
    await store.close()


async def test_no_acknowledged_command_is_lost(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    server, chance = Server(tmp_path), random.Random(4)
    acknowledged = Acknowledged()
    total = 0
    for _ in range(KILLS):
        address = await server.start()
        client = await NtfClient.open(address)
        await check(client, acknowledged)
        total += len(acknowledged.subscriptions)
        if len(acknowledged.tokens) > 40:  # keeps the check of each round short
            acknowledged = Acknowledged()
        others = [await NtfClient.open(address) for _ in range(3)]
        async with asyncio.TaskGroup() as tasks:
            for each in (client, *others):
                tasks.create_task(storm(each, acknowledged, chance))
            await asyncio.sleep(chance.uniform(0.02, STORM_SECONDS))
            await server.kill()
        await activate(tmp_path, acknowledged)
    assert total > KILLS
