"""Which routers a client may name in SNEW, and that one router is one however it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ntf_server.app import running
from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.encoding import NO_ENTITY, EntityId
from protocol.errors import CMD_PROHIBITED, QUOTA
from protocol.ntf_commands import Err, IdSub, NtfResponse, Snew
from smp_router.router import Router
from tests import builders
from tests.ntf_server.conftest import active_device, make_app, make_config
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.waiting import until

KEY = bytes(32)


def snew(device: Device, server: SmpServer) -> Snew:
    return Snew(device.token_id, SmpQueueNtf(server, EntityId(os.urandom(24))), builders.ed25519())


async def ask(client: NtfClient, device: Device, server: SmpServer) -> NtfResponse:
    return await client.ask(snew(device, server), NO_ENTITY, device.key)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "0x7f000001",
        "10.1.2.3",
        "169.254.169.254",
        "[::1]",
        "[::ffff:10.0.0.1]",
        "LOCALHOST.",
    ],
)
async def test_routers_in_our_own_network_are_refused_by_default(tmp_path: Path, host: str) -> None:
    config = make_config(tmp_path, SUBSCRIBER={"allow_private_routers": False})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        mixed = SmpServer(("smp.example.org", host), "", KEY)
        assert await ask(client, device, SmpServer((host,), "", KEY)) == Err(CMD_PROHIBITED)
        assert await ask(client, device, mixed) == Err(CMD_PROHIBITED)
        assert app.subscriber.status() == []
        assert (await app.store.counts()).servers == 0
        client.close()


async def test_new_routers_are_limited_per_address_and_known_ones_are_not(tmp_path: Path) -> None:
    config = make_config(tmp_path, SUBSCRIBER={"routers_per_address": 2})
    async with running(make_app(tmp_path, config)) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        first, second, third = (SmpServer(("127.0.0.1",), str(port), KEY) for port in (1, 2, 3))
        for server in (first, second, first):
            assert isinstance(await ask(client, device, server), IdSub)
        assert await ask(client, device, third) == Err(QUOTA)
        commands = [(snew(device, server), NO_ENTITY, device.key) for server in (third, second, third)]
        answers = await client.ask_many(commands)
        assert [isinstance(answer, IdSub) for answer in answers] == [False, True, False]
        assert len(app.subscriber.status()) == 2
        assert (await app.store.counts()).servers == 2
        client.close()


async def test_one_router_however_it_is_written(tmp_path: Path) -> None:
    async with Router.start() as router, running(make_app(tmp_path, make_config(tmp_path))) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        address = router.address
        spellings = [
            address,
            SmpServer(("127.0.0.1.",), address.port, address.key_hash),
            SmpServer(("[::ffff:127.0.0.1]",), f"0{address.port}"[-5:], address.key_hash),
        ]
        for server in spellings:
            assert isinstance(await ask(client, device, server), IdSub)
        await until(lambda: router.connections == 1)
        assert len(app.subscriber.status()) == 1
        assert (await app.store.counts()).servers == 1
        client.close()


async def test_a_push_tells_the_address_as_the_client_wrote_it(tmp_path: Path) -> None:
    async with Router.start() as router, running(make_app(tmp_path, make_config(tmp_path))) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        (queue,) = router.load.create_queues(1)
        named = SmpServer(("127.0.0.1.",), router.address.port, router.address.key_hash)
        command = Snew(device.token_id, SmpQueueNtf(named, queue.notifier_id), queue.notifier_key)
        assert isinstance(await client.ask(command, NO_ENTITY, device.key), IdSub)
        await until(lambda: router.subscribed_notifiers())
        await router.load.emit([queue], 1)
        record = await app.store.token_by_device(device.token, device.key.public.der)
        assert record is not None

        async def pushed() -> bool:
            return any(push.entries for push in await app.store.pushes([record.key]))

        await until(pushed)
        (push,) = await app.store.pushes([record.key])
        assert [entry.server for entry in push.entries] == [named]
        client.close()
