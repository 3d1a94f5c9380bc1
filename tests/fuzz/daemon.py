"""A live daemon against changed blocks, while an honest client goes on asking."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer
from protocol.blocks import pack_batches
from protocol.crypto import Ed25519PrivateKey
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_ENTITY, CorrId, EntityId, short
from protocol.ntf_commands import (
    NTF_COMMANDS,
    NtfCommand,
    Ping,
    Pong,
    Schk,
    Sdel,
    Snew,
    Tchk,
    Tcrn,
    Tdel,
    Trpl,
    Tvfy,
)
from protocol.transmission import authorize, body, encode_transmission
from protocol.versions import NTF_BLOCK_SIZE, NTF_VERSIONS, VersionRange
from tests.drills.world import Daemon, running_daemon
from tests.fuzz.mutation import Mutator
from tests.ntf_server.ntf_client import Device, NtfClient
from transport.errors import TransportError

ENV = {
    "NTF_LIMITS_ADDRESS_COMMANDS_PER_SECOND": "0",
    "NTF_LIMITS_ADDRESS_CPU_PERCENT": "0",
    "NTF_LIMITS_ADDRESS_FAILURES_BURST": "10000000",
}
"The honest client has the address of the others: what they use of a shared limit is no finding."
ATTACKERS = 3
BLOCKS_PER_SESSION = 60
PINGS_PER_SECOND = 10.0
NEWCOMER_EVERY = 10
"Pings between two new connections."
CONTENT = NTF_BLOCK_SIZE - 2
BATCH = CONTENT - 17
DRAIN_TIMEOUT = 5.0
ENDED = (TransportError, OSError, TimeoutError, AssertionError)
"How a session ends that the server had enough of; assertions are those of a client that expects sense."


@dataclass
class DaemonRun:
    """What came of it; nothing in `wrong` is good."""

    sessions: int = 0
    blocks: int = 0
    asked: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)


async def fuzz_daemon(folder: Path, seconds: float, seed: int) -> DaemonRun:
    run = DaemonRun()
    async with running_daemon(folder, ENV) as daemon:
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_stay_honest(daemon.address, run, deadline), name="honest client")
            for number in range(ATTACKERS):
                attacker = Attacker(daemon.address, Mutator(seed + number), run)
                tasks.create_task(attacker.attack(deadline), name=f"attacker {number}")
        run.wrong += complaints(daemon, run)
    return run


def complaints(daemon: Daemon, run: DaemonRun) -> list[str]:
    log = daemon.log.read_text(errors="replace")
    found = []
    if not daemon.is_alive():
        found.append(f"the daemon ended:\n{log[-4000:]}")
    if "Traceback" in log:
        found.append(f"a traceback in the log:\n{log[log.index('Traceback') :][:4000]}")
    if run.answered < run.asked:
        found.append(f"{run.asked - run.answered} of {run.asked} honest requests were not answered")
    return found


async def _stay_honest(address: NtfServer, run: DaemonRun, deadline: float) -> None:
    old = await NtfClient.open(address)
    while time.monotonic() < deadline:
        run.asked += 1
        client = old if run.asked % NEWCOMER_EVERY else None
        with suppress(*ENDED):
            asking = client or await NtfClient.open(address)
            run.answered += await asking.ask(Ping()) == Pong()
            if client is None:
                asking.close()
        await asyncio.sleep(1 / PINGS_PER_SECOND)
    old.close()


async def _read(client: NtfClient) -> None:
    with suppress(*ENDED):
        await client.is_closed_by_server()


class Attacker:
    """A client that finished its handshake and has a token, and then sends what it likes."""

    def __init__(self, address: NtfServer, mutator: Mutator, run: DaemonRun) -> None:
        self._address = address
        self._mutator = mutator
        self._run = run
        self._device = Device.make(ApnsToken(Provider.APNS_NULL, b"00"), Ed25519PrivateKey(os.urandom(32)))

    async def attack(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self._run.sessions += 1
            with suppress(*ENDED):
                if self._mutator.chance(0.1):
                    await self._before_tls()
                else:
                    await self._session(deadline)

    async def _before_tls(self) -> None:
        _, writer = await asyncio.open_connection(self._address.hosts[0], self._address.port_number)
        writer.write(self._mutator.changed(self._mutator.example()))
        await asyncio.wait_for(writer.drain(), 1)
        writer.close()

    async def _session(self, deadline: float) -> None:
        version = self._mutator.pick(range(NTF_VERSIONS.min, NTF_VERSIONS.max + 1))
        client = await NtfClient.open(self._address, versions=VersionRange(version, version))
        try:
            if self._device.token_id == NO_ENTITY:
                await self._device.register(client)
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(_read(client))
                with suppress(*ENDED):
                    await self._write(client, deadline)
                reading.cancel()
        finally:
            client.stream.abort()

    async def _write(self, client: NtfClient, deadline: float) -> None:
        for _ in range(BLOCKS_PER_SESSION):
            if time.monotonic() > deadline:
                return
            self._run.blocks += 1
            self._send(client)
            await asyncio.wait_for(client.stream.drain(), DRAIN_TIMEOUT)
            await asyncio.sleep(0)

    def _send(self, client: NtfClient) -> None:
        make: Callable[[NtfClient], bytes] = self._mutator.pick(
            (self._signed, self._signed, self._changed_batch, self._noise)
        )
        content = make(client)[:CONTENT]
        if self._mutator.chance(0.02):
            client.stream.write(self._mutator.noise(700))  # no whole block, no padding
        else:
            client.send_content(content)

    def _noise(self, client: NtfClient) -> bytes:
        return self._mutator.changed(self._mutator.example())

    def _changed_batch(self, client: NtfClient) -> bytes:
        return self._mutator.changed(self._signed(client))

    def _signed(self, client: NtfClient) -> bytes:
        """Rightly signed, with parameters that may be wrong: as far in as a client gets."""
        entity, command = self._mutator.pick(self._commands())
        words = NTF_COMMANDS.encode(command, client.params.version)
        if self._mutator.chance(0.7):
            words = self._mutator.changed(words)
        corr_id = CorrId(self._mutator.noise(24))
        text = body(corr_id, entity, words)
        signature = authorize(
            client.params, self._device.key, corr_id, short(client.params.session_id) + text
        )
        sent = encode_transmission(client.params, signature, b"", text)
        if not client.params.batch:
            return sent
        copies = self._mutator.pick((1, 1, 2, 3))
        return pack_batches([sent] * copies, BATCH)[0] if len(sent) < 400 else b"\1" + sent

    def _commands(self) -> list[tuple[EntityId, NtfCommand]]:
        device, token = self._device, self._device.token_id
        router = SmpServer(("localhost",), "1", b"k" * 32)
        queue = SmpQueueNtf(router, EntityId(self._mutator.noise(24)))
        return [
            (NO_ENTITY, device.tnew),
            (NO_ENTITY, Snew(token, queue, device.key)),
            (NO_ENTITY, Ping()),
            (token, Tchk()),
            (token, Tcrn(20)),
            (token, Tvfy(b"code")),
            (token, Trpl(device.token)),
            (EntityId(self._mutator.noise(24)), Tdel()),
            (EntityId(self._mutator.noise(24)), Schk()),
            (EntityId(self._mutator.noise(24)), Sdel()),
        ]
