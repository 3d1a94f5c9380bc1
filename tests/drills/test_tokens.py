"""Attacks with plain commands: a stranger's device taken over, a token too large to delete at once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import IdSub, Ok, Snew, Tchk, Tdel, Tkn, Trpl, Tvfy
from protocol.statuses import TokenStatus
from tests.drills.world import World, world
from tests.ntf_server.ntf_client import Device, NtfClient

SECONDS = 5.0
TRIES_PER_VICTIM = 3
"Fewer than the verification pushes that a device may get in an hour."
LARGE = 10_000
BATCH = 200


def _own_device() -> Device:
    return Device.make(ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode()))


async def _try_to_take(drill: World, victim: str, clients: tuple[NtfClient, NtfClient], first: int) -> bool:
    """Register an own device, learn its code, then TRPL(the victim's device) beside TVFY(the old code)."""
    one, other = clients
    own = _own_device()
    await own.register(one)
    code = await drill.code(own)
    asked = [
        own.ask(one, Trpl(ApnsToken(Provider.APNS_TEST, victim.encode()))),
        own.ask(other, Tvfy(code)),
    ]
    answers = await asyncio.gather(*(asked[first:] + asked[:first]))
    replaced = answers[(2 - first) % 2] == Ok()
    status = await own.ask(one, Tchk())
    assert isinstance(status, Tkn)
    return replaced and status.status is TokenStatus.ACTIVE


async def test_a_stranger_cannot_take_a_device(tmp_path: Path) -> None:
    taken: list[bool] = []

    async def attack(drill: World) -> None:
        clients = await NtfClient.open(drill.daemon.address), await NtfClient.open(drill.daemon.address)
        for number, victim in enumerate(victims * TRIES_PER_VICTIM):
            taken.append(await _try_to_take(drill, victim, clients, number % 2))

    async with world(tmp_path, seconds=SECONDS) as drill:
        victims = sorted(drill.known_devices)
        service = await drill.measure(SECONDS, beside=attack(drill))
    print(service.row(f"TVFY races TRPL, {len(taken)} tries"))
    assert taken
    assert not any(taken)
    assert service.lost == 0  # a device that was taken has lost its queues
    assert service.commands.answered == service.commands.asked


async def _large_token(drill: World) -> tuple[NtfClient, Device]:
    """Subscribed at a router that is not there."""
    client = await NtfClient.open(drill.daemon.address)
    device = _own_device()
    await device.register(client)
    await device.verify(client, await drill.code(device))
    nowhere = SmpServer(("127.0.0.1",), "1", bytes(32))
    for _ in range(LARGE // BATCH):
        snews = [
            Snew(
                device.token_id,
                SmpQueueNtf(nowhere, EntityId(os.urandom(24))),
                Ed25519PrivateKey(os.urandom(32)),
            )
            for _ in range(BATCH)
        ]
        answers = await client.ask_many([(snew, NO_ENTITY, device.key) for snew in snews])
        assert all(isinstance(answer, IdSub) for answer in answers)
    return client, device


async def test_a_large_token_is_deleted_while_others_are_served(tmp_path: Path) -> None:
    env = {"NTF_LIMITS_COMMANDS_BURST": str(2 * LARGE), "NTF_LIMITS_ADDRESS_COMMANDS_BURST": str(4 * LARGE)}
    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        client, device = await _large_token(drill)
        answers = []

        async def attack() -> None:
            answers.append(await device.ask(client, Tdel()))

        service = await drill.measure(SECONDS, beside=attack())
    print(service.row(f"TDEL of {LARGE} subscriptions"))
    assert answers == [Ok()]
    assert service.lost == 0
    assert service.commands.answered == service.commands.asked
    assert service.newcomers.answered == service.newcomers.asked
