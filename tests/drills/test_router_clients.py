"""Clients of the SMP router that make it check signatures, or keep what nobody wants."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from protocol.addresses import SmpServer, parse_smp_server
from protocol.connection import Outgoing
from protocol.crypto import Ed448PrivateKey, X25519PrivateKey
from protocol.encoding import CorrId, EntityId
from protocol.errors import HandshakeError
from protocol.smp_messages import (
    Ack,
    Msg,
    Nsub,
    Ok,
    Pfwd,
    Ping,
    Pkey,
    Pong,
    Prxy,
    QueueMode,
    Rkey,
    Send,
    SmpCommand,
    Sok,
    Sub,
)
from protocol.versions import SMP_VERSIONS
from tests.drills.attacker import Attack, attacking, persist
from tests.drills.world import DEADLINE, HONEST_ADDRESS, Asked
from tests.smp_router.wire import TestQueue, WireClient, add_notifier, connected, create_queue
from transport.errors import TransportError

CALM_SECONDS, SECONDS = 3.0, 8.0
ATTACKERS = 10
PER_BLOCK = 70
MOST_KEYS = (215, 32)
"Recipient keys of a queue: what fits a block, or what the router takes."
SLOWER, ALWAYS_FINE = 8, 1.0
ENDED = (TransportError, OSError, HandshakeError, AssertionError, TimeoutError)
LOCAL = {"private_relays": "on"}
FORWARDED = 16 * 1000
"Bytes of a forwarded command."
Target = Callable[[WireClient], Awaitable[EntityId]]
"Prepares a client, and returns what its commands are about."
SMALL = {"max_message_bytes": "3000000", "max_queues": "400"}


@dataclass
class Served:
    """What an honest client gets."""

    pings: Asked = field(default_factory=Asked)
    newcomers: Asked = field(default_factory=Asked)
    "A new connection with its first PING."
    messages: Asked = field(default_factory=Asked)
    "From SEND to MSG."

    def row(self, name: str) -> str:
        """A line of the tables in docs/reliability.md."""
        pings = f"{self.pings}, p50 {self.pings.p50 * 1000:.0f} ms"
        return f"| {name} | {pings} | {self.newcomers} | {self.messages} |"


@asynccontextmanager
async def running_router(folder: Path, settings: dict[str, str] | None = None) -> AsyncIterator[SmpServer]:
    """In a process of its own; its address is printed when it is ready."""
    program = (sys.executable, "-P", "-m", "smp_router")
    made = await asyncio.create_subprocess_exec(
        *(*program, "init", "--ip", "127.0.0.1", "-a", "ED25519", "--config-dir", str(folder / "r")),
        stdout=subprocess.DEVNULL,
    )
    assert await made.wait() == 0
    lines = "".join(f"{key} = {value}\n" for key, value in (settings or {}).items())
    (folder / "r" / "smp-router.ini").write_text(f"[router]\nhost = 127.0.0.1\nport = 0\n{lines}")
    process = await asyncio.create_subprocess_exec(
        *program, "start", "--config-dir", str(folder / "r"), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await process.stdout.readline()
        yield parse_smp_server(line.decode().strip())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _repeat(asked: Asked, rate: float, seconds: float, request: Callable[[], Awaitable[None]]) -> None:
    clock = asyncio.get_running_loop().time
    started = clock()
    while clock() - started < seconds:
        asked.asked += 1
        at = clock()
        with suppress(*ENDED):
            await request()
            asked.seconds.append(clock() - at)
        await asyncio.sleep(max(0.0, at + 1 / rate - clock()))


async def measure(server: SmpServer, seconds: float, attack: Attack | None = None) -> Served:
    served = Served()
    async with AsyncExitStack() as stack:
        client, sender, recipient = [
            await stack.enter_async_context(connected(server, source=HONEST_ADDRESS)) for _ in range(3)
        ]
        queue = await create_queue(recipient, subscribe=True)

        async def ping() -> None:
            assert await client.ask(Ping()) == Pong()

        async def newcomer() -> None:
            async with connected(server, source=HONEST_ADDRESS) as new:
                assert await new.ask(Ping()) == Pong()

        if attack is not None:
            await stack.enter_async_context(attacking(attack, server, seconds))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(served.pings, 10, seconds, ping))
            tasks.create_task(_repeat(served.newcomers, 2, seconds, newcomer))
            work = _repeat(served.messages, 5, seconds, lambda: _deliver(sender, recipient, queue))
            tasks.create_task(work)
    return served


async def _deliver(sender: WireClient, recipient: WireClient, queue: TestQueue) -> None:
    assert await sender.ask(Send(False, b"message"), queue.sender_id) == Ok()
    _, message = await recipient.event()
    assert isinstance(message, Msg)
    assert await recipient.ask(Ack(message.message_id), queue.recipient_id, queue.key) == Ok()


async def ask_for_unknown(server: SmpServer, seconds: float) -> None:
    """Subscribe queues that do not exist."""

    async def target(_: WireClient) -> EntityId:
        return EntityId(os.urandom(24))

    await _flood(server, target)


async def ask_for_unknown_notifiers(server: SmpServer, seconds: float) -> None:
    """The same as a notification server, which is subscribed to a queue that exists."""

    async def target(client: WireClient) -> EntityId:
        queue = await create_queue(client)
        await add_notifier(client, queue)
        assert isinstance(await client.ask(Nsub(), queue.notifier_id, queue.notifier_key), Sok)
        return EntityId(os.urandom(24))

    await _flood(server, target, Nsub())


async def try_many_keys(server: SmpServer, seconds: float) -> None:
    """Subscribe a queue of many recipients with a key of none of them."""

    async def target(client: WireClient) -> EntityId:
        queue = await create_queue(client, mode=QueueMode.CONTACT)
        for count in MOST_KEYS:
            keys = tuple(Ed448PrivateKey(os.urandom(57)).public for _ in range(count))
            if await client.ask(Rkey(keys), queue.recipient_id, queue.key) == Ok():
                break
        return queue.recipient_id

    await _flood(server, target)


async def _flood(server: SmpServer, target: Target, message: SmpCommand | None = None) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(ATTACKERS):
            tasks.create_task(_flooder(server, target, message or Sub()))


async def _flooder(server: SmpServer, target: Target, message: SmpCommand) -> None:
    """Without encryption of blocks, the same bytes can be sent again."""
    key = Ed448PrivateKey(os.urandom(57))

    async def flood() -> None:
        async with connected(server, encrypt=False) as client:
            entity = await target(client)
            command = Outgoing[SmpCommand](CorrId(secrets.token_bytes(24)), entity, message, key)
            data = client.connection.send([command] * PER_BLOCK)
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(_read(client))
                while not reading.done():
                    client.stream.write(data)
                    await client.stream.drain()
                    await asyncio.sleep(0)

    await persist(flood)


async def _read(client: WireClient) -> None:
    with suppress(*ENDED):
        while await client.stream.receive():
            pass


async def forward(server: SmpServer, seconds: float) -> None:
    """Commands that the router forwards, as fast as it takes them: to itself, where they do not open."""

    async def flood() -> None:
        async with connected(server, encrypt=False) as client:
            key = await client.ask(Prxy(server))
            assert isinstance(key, Pkey)
            command = Pfwd(SMP_VERSIONS.max, X25519PrivateKey(os.urandom(32)).public, bytes(FORWARDED))
            outgoing = Outgoing[SmpCommand](
                CorrId(secrets.token_bytes(24)), EntityId(key.session_id), command
            )
            data = client.connection.send([outgoing])
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(_read(client))
                while not reading.done():
                    client.stream.write(data)
                    await client.stream.drain()
                    await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(ATTACKERS):
            tasks.create_task(persist(flood))


async def fill(server: SmpServer, seconds: float) -> None:
    """Queues, and messages of one byte in them, until there is no room for more."""
    async with connected(server) as client:
        while True:
            with suppress(AssertionError):  # there is no room for a queue
                queue = await create_queue(client)
                corr_ids = [CorrId(secrets.token_bytes(24)) for _ in range(64)]
                client.write(*(Outgoing(c, queue.sender_id, Send(False, b"x")) for c in corr_ids))
                for corr_id in corr_ids:
                    await client.answer(corr_id)
            await asyncio.sleep(0)


async def _attacked(
    folder: Path, attack: Attack, name: str, settings: dict[str, str] | None = None
) -> Served:
    async with running_router(folder, settings) as server:
        calm = await measure(server, CALM_SECONDS)
        served = await measure(server, SECONDS, attack)
        async with connected(server, source=HONEST_ADDRESS) as client:
            await create_queue(client)
    print(calm.row("before the attack"))
    print(served.row(name))
    for mine, usual in (
        (served.pings, calm.pings),
        (served.newcomers, calm.newcomers),
        (served.messages, calm.messages),
    ):
        assert mine.answered == mine.asked > 0
        assert mine.p99 < max(ALWAYS_FINE, SLOWER * usual.p99)
    return served


async def test_subscriptions_of_unknown_queues_delay_nobody(tmp_path: Path) -> None:
    await _attacked(tmp_path, ask_for_unknown, f"{ATTACKERS} connections subscribe unknown queues")


async def test_subscriptions_of_unknown_notifiers_delay_nobody(tmp_path: Path) -> None:
    name = f"{ATTACKERS} connections with a notifier each subscribe unknown ones"
    await _attacked(tmp_path, ask_for_unknown_notifiers, name)


async def test_many_recipient_keys_delay_nobody(tmp_path: Path) -> None:
    await _attacked(
        tmp_path, try_many_keys, f"{ATTACKERS} connections, a queue with many recipient keys each"
    )


async def test_forwarded_commands_delay_nobody(tmp_path: Path) -> None:
    await _attacked(tmp_path, forward, f"{ATTACKERS} connections forward commands without end", LOCAL)


async def test_messages_that_nobody_takes_leave_room_for_others(tmp_path: Path) -> None:
    await _attacked(tmp_path, fill, "queues and messages until there is no room", SMALL)
