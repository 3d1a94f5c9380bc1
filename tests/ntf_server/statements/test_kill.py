"""kill -9 at the worst moments: nothing reaches a device twice, late or unwanted; what was not sent is."""

from __future__ import annotations

import signal
import sqlite3
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import asyncpg

from ntf_demo.fake_push.faults import Fault
from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.stores import make_store
from store.statement_rate import LIMIT
from store.statement_records import Outcome, PushRecord
from tests.ntf_server.statements.process import ALICE, DEVICES, TOPIC, daemon, of, register
from tests.waiting import until

LEASE = 10.0
"Seconds after which another daemon goes on."
CALL_AGE, ANY_AGE = 3.0, 600.0
"Seconds after which a call is late: in a test that makes it so, and where a busy machine must not."
BOB, CAROL, DAVE, ERIN = (key_pair(name) for name in ("sender bob", "carol", "dave", "erin"))
_WAITING = "SELECT count(*), count(*) FILTER (WHERE attempted) FROM"


@asynccontextmanager
async def prepared(folder: Path, postgres_url: str) -> AsyncIterator[GatewayWorld]:
    async with gateway_parts(folder, postgres_url=postgres_url, call_max_age=ANY_AGE) as world:
        world.config = replace(world.config, STORE=replace(world.config.STORE, lease_seconds=LEASE))
        yield world


def let_calls_wait(world: GatewayWorld, seconds: float) -> None:
    """From the next start of the server on."""
    world.config = replace(world.config, STATEMENTS=replace(world.config.STATEMENTS, call_max_age=seconds))


class Pending(NamedTuple):
    pushes: int
    "To be made."
    unknown: int
    "Of these, handed to a provider."


@asynccontextmanager
async def database(world: GatewayWorld) -> AsyncIterator[Callable[[], Awaitable[Pending]]]:
    """What is in it now. One connection: one that is closed takes a lock, and SQLite's server would wait for
    it again and again."""
    if url := world.config.STORE.url:
        db = await asyncpg.connect(url)

        async def in_postgres() -> Pending:
            return Pending(*await db.fetchrow(f"{_WAITING} ntf.pending_statements"))

        try:
            yield in_postgres
        finally:
            await db.close()
        return
    with closing(sqlite3.connect(world.folder / "data" / "ntf-server.db")) as file:

        async def in_sqlite() -> Pending:
            return Pending(*file.execute(f"{_WAITING} pending_statements").fetchone())

        yield in_sqlite


async def waiting_are(world: GatewayWorld, pushes: int, unknown: int) -> None:
    async with database(world) as pending:

        async def are_waiting() -> bool:
            return await pending() == (pushes, unknown)

        await until(are_waiting)


async def kill_between_pushes(world: GatewayWorld, process: Process) -> None:
    """While none is under way: what becomes of one that is would not be known."""
    async with database(world) as pending:

        async def is_stopped() -> bool:
            process.send_signal(signal.SIGSTOP)
            if (await pending()).unknown:
                process.send_signal(signal.SIGCONT)
                return False
            return True

        await until(is_stopped)
    process.kill()
    await process.wait()


async def test_a_push_without_an_answer_is_not_made_twice(tmp_path: Path, postgres_url: str) -> None:
    async with prepared(tmp_path, postgres_url) as world:
        for api in ("apns", "fcm"):
            world.push.add_fault(Fault(api=api, action="silence", processed=True))
        async with daemon(world) as running:
            await register(world, running.port)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"first"))
            await until(lambda: len(of(world, b"first")) == 3)
        await waiting_are(world, 3, 3)
        world.push.clear_faults()
        async with daemon(world):
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"second"))
            await until(lambda: len(of(world, b"second")) == 3)
            await waiting_are(world, 0, 0)
    assert Counter(push.token for push in of(world, b"first")) == Counter(DEVICES.values())


async def test_what_a_provider_refused_is_pushed_after_a_kill(tmp_path: Path, postgres_url: str) -> None:
    async with prepared(tmp_path, postgres_url) as world:
        for api in ("apns", "fcm"):
            world.push.add_fault(Fault(api=api, status=503, reason="Shutdown"))
        async with daemon(world) as running:
            await register(world, running.port)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"first"))
            await until(lambda: len(world.push.pushes) >= 3)
            await waiting_are(world, 3, 0)
        world.push.clear_faults()
        async with daemon(world):
            await until(lambda: len(of(world, b"first")) == 3)
    assert Counter(push.token for push in of(world, b"first")) == Counter(DEVICES.values())


async def test_what_was_decided_before_a_kill_stays_so(tmp_path: Path, postgres_url: str) -> None:
    """Old, limited, revoked, late and expired statements, and a device that is registered again."""
    async with prepared(tmp_path, postgres_url) as world:
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"old"))
        async with daemon(world) as running:
            ids = await subscribe(world, running.port, ALICE, BOB, CAROL, DAVE, ERIN)
            for number in range(LIMIT + 1):
                await world.node.submit(signed_statement(ALICE, TOPIC, data=b"loud %d." % number))
            await until(lambda: len(of(world, b"loud")) == 3 * LIMIT)
            world.push.add_fault(Fault(status=503, reason="Shutdown"))
            soon = int(SystemClock().now()) + 10
            await world.node.submit(signed_statement(DAVE, TOPIC, data=b"expired", expires_at=soon))
            for pair, data in ((BOB, b"revoked"), (CAROL, b"allowed")):
                await world.node.submit(signed_statement(pair, TOPIC, data=data))
            await outcomes_are(world, DAVE, *[Outcome.WAITING] * 3)
            await until(lambda: {b"revoked".hex(), b"allowed".hex()} <= tried(world))
            for one in ids.values():
                await world.client("bob", running.port).replace_rules(
                    one, *allowing(ALICE, CAROL, DAVE, ERIN)
                )
            await kill_between_pushes(world, running.process)
        await world.node.submit(signed_statement(DAVE, TOPIC, data=b"missed"))
        let_calls_wait(world, CALL_AGE)
        over = max(SystemClock().now() + CALL_AGE, soon)
        await until(lambda: SystemClock().now() > over)
        async with daemon(world) as running:
            await until(lambda: len(tried(world) & {b"missed".hex()}) == 1)
            await outcomes_are(world, BOB, Outcome.REVOKED, Outcome.REVOKED, Outcome.REVOKED)
            await outcomes_are(world, CAROL, Outcome.LATE, *[Outcome.WAITING] * 2)
            await outcomes_are(world, DAVE, *[Outcome.EXPIRED] * 3, Outcome.LATE, *[Outcome.WAITING] * 2)
            bob = world.client("bob", running.port)
            await bob.ask("DELETE", "/v1/subscriptions", {"subscription_ids": [ids["voip"]]})
            await subscribe(world, running.port, ALICE, CAROL, DAVE, ERIN, kinds=("voip",))
            await kill_between_pushes(world, running.process)
        world.push.clear_faults()
        let_calls_wait(world, ANY_AGE)
        async with daemon(world):
            await outcomes_are(world, CAROL, Outcome.LATE, Outcome.SENT, Outcome.SENT)
            await world.node.submit(signed_statement(ERIN, TOPIC, data=b"new"))
            await until(lambda: len(of(world, b"new")) == 3)
            await outcomes_are(world, ERIN, *[Outcome.SENT] * 3)
        await waiting_are(world, 0, 0)
    alerts = [DEVICES["apns"], DEVICES["fcm"]]
    wanted = {b"new": list(DEVICES.values()), b"allowed": alerts, b"missed": alerts}
    wanted |= {b"loud %d." % number: list(DEVICES.values()) for number in range(LIMIT)}
    wanted |= {data: [] for data in (b"old", b"revoked", b"expired", b"loud %d." % LIMIT)}
    for data, devices in wanted.items():
        assert Counter(push.token for push in of(world, data)) == Counter(devices), data


def allowing(*senders: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [(pair[0], TOPIC) for pair in senders]


async def subscribe(
    world: GatewayWorld, port: int, *senders: tuple[bytes, bytes], kinds: tuple[str, ...] = tuple(DEVICES)
) -> dict[str, str]:
    """The ids of the subscriptions, by type."""
    bob, ids = world.client("bob", port), {}
    for kind in kinds:
        ids[kind] = await bob.register(kind, DEVICES[kind])
        await bob.allow(ids[kind], *allowing(*senders))
    return ids


def tried(world: GatewayWorld) -> set[str]:
    """Data of which the provider has refused a push."""
    known = {data.hex() for data in (b"revoked", b"allowed", b"missed")}
    return {data for data in known if any(data in push.body for push in world.push.pushes)}


async def outcomes_are(world: GatewayWorld, pair: tuple[bytes, bytes], *outcomes: Outcome) -> None:
    """Of the statements of a sender, in the end."""

    async def are_so() -> bool:
        return Counter(record.outcome for record in await records(world, pair[0])) == Counter(outcomes)

    await until(are_so)


async def records(world: GatewayWorld, sender: bytes) -> list[PushRecord]:
    store = make_store(world.folder / "etc", world.config, read_only=True)
    await store.open()
    try:
        return await store.push_records_of_sender(sender)
    finally:
        await store.close()
