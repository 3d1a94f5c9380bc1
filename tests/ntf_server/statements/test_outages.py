"""Statements over outages, replays and kills: new ones are pushed once; old, revoked and late ones never."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ntf_demo.fake_node.server import FakeNode
from ntf_demo.fake_push.faults import Fault
from ntf_demo.statement_gateway import HOUR, GatewayWorld, gateway_parts, key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.push.composing import STATEMENTS_DROPPED
from ntf_server.statements import api, node_client, service
from ntf_server.statements.openapi import SUBSCRIPTIONS
from ntf_server.statements.pipeline import REPEATED, STORED_BEFORE
from ntf_server.statements.watcher import CONNECTED
from store.statement_rate import LIMIT
from store.statement_records import Outcome
from tests.ntf_server.statements.process import ALICE, TOPIC, daemon, of
from tests.ntf_server.statements.test_sequences import Hand
from tests.waiting import DEADLINE, until

OLD = 40
SLOW = 600.0
"Seconds: a server starts on a busy machine, and calls that it missed still count."
VOIP, APNS = "b2" * 32, "a1" * 32


def dropped(outcome: Outcome) -> float:
    return float(STATEMENTS_DROPPED.labels(outcome.value)._value.get())


def datas(world: GatewayWorld) -> Counter[str]:
    """How often each statement reached a device, by its first byte and the device."""
    return Counter(f"{push.token[:2]} {bytes.fromhex(_data(push.body)).decode()}" for push in world.accepted)


def _data(body: str) -> str:
    return body.partition('"data":"')[2].partition('"')[0]


async def test_old_statements_do_not_ring(tmp_path: Path) -> None:
    """Also not after replays, changes of other rules, a kill and a restart."""
    async with gateway_parts(tmp_path, call_max_age=SLOW) as world:
        for number in range(OLD):
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"old %d" % number))
        async with daemon(world) as running:
            bob = world.client("bob", running.port)
            one = await bob.register("voip", VOIP)
            await bob.allow(one, (ALICE[0], TOPIC))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new 1"))
            await until(lambda: len(world.accepted) == 1)
            subscribed = world.node.subscribed
            await world.node.drop_clients()
            await until(lambda: world.node.subscribed > subscribed)
            await bob.allow(one, (ALICE[0], TOPIC), (ALICE[0], b"2" * 32))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new 2"))
            await until(lambda: len(world.accepted) == 2)
        async with daemon(world) as running:
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new 3"))
            await until(lambda: len(world.accepted) == 3)
            bob = world.client("bob", running.port)
            await bob.ask("DELETE", "/v1/subscriptions", {"subscription_ids": [one]})
            again = await bob.register("voip", VOIP)
            await bob.allow(again, (ALICE[0], TOPIC))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new 4"))
            await until(lambda: len(world.accepted) == 4)
    assert datas(world) == {f"b2 new {number}": 1 for number in range(1, 5)}


async def test_a_node_that_does_not_say_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends before it is silent was stored; after that, all is new."""
    monkeypatch.setattr(node_client, "REPLAY_SILENCE", 1.0)
    async with gateway_parts(tmp_path, call_max_age=SLOW) as world:
        world.node.says_remaining = False
        for number in range(OLD):
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"old %d" % number))
        async with world.serving():
            bob = world.client("bob")
            one = await bob.register("voip", VOIP)
            await bob.allow(one, (ALICE[0], TOPIC))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new 1"))
            await until(lambda: len(world.accepted) == 1)
            await world.node.stop()
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"missed"))
            await world.node.start()
            await until(lambda: len(world.accepted) == 2)
            await bob.allow(one, (ALICE[0], TOPIC), (ALICE[0], b"2" * 32))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new 2"))
            await until(lambda: len(world.accepted) == 3)
    assert datas(world) == {"b2 new 1": 1, "b2 missed": 1, "b2 new 2": 1}


async def test_a_watched_topic_is_old_for_a_new_rule(tmp_path: Path) -> None:
    """Statements that the gateway saw, for others or for nobody, before the rule was made."""
    async with gateway_parts(tmp_path, call_max_age=SLOW) as world:
        async with daemon(world) as running:
            carol, bob = world.client("carol", running.port), world.client("bob", running.port)
            await carol.allow(await carol.register("apns", APNS), (key_pair("other")[0], TOPIC))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"before"))
            one = await bob.register("voip", VOIP)
            await bob.allow(one, (ALICE[0], TOPIC))
        async with daemon(world):
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"after"))
            await until(lambda: len(world.accepted) == 1)
    assert datas(world) == {"b2 after": 1}


async def test_what_came_while_the_connection_was_lost_is_pushed_once(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path, call_max_age=SLOW) as world:
        async with daemon(world) as running:
            bob = world.client("bob", running.port)
            for kind, token in (("voip", VOIP), ("apns", APNS)):
                await bob.allow(await bob.register(kind, token), (ALICE[0], TOPIC))
            await world.node.stop()
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"missed"))
            await world.node.start()
            await until(lambda: len(world.accepted) == 2)
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"killed"))
        async with daemon(world):
            await until(lambda: len(world.accepted) == 4)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"live"))
            await until(lambda: len(world.accepted) == 6)
    assert datas(world) == {
        f"{token} {what}": 1 for token in ("a1", "b2") for what in ("missed", "killed", "live")
    }


async def test_a_call_that_was_missed_right_after_its_rule_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway did not note yet that it hears the node, but a new statement is not older than its rule."""
    monkeypatch.setattr(service, "LISTENING_INTERVAL", SLOW)
    async with gateway_parts(tmp_path, call_max_age=SLOW) as world, world.serving():
        bob = world.client("bob")
        await bob.allow(await bob.register("voip", VOIP), (ALICE[0], TOPIC))
        await world.node.stop()
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"missed"))
        await world.node.start()
        await until(lambda: len(world.accepted) == 1)


async def test_what_the_limit_dropped_is_never_pushed(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        async with daemon(world) as running:
            bob = world.client("bob", running.port)
            one = await bob.register("apns", APNS)
            await bob.allow(one, (ALICE[0], TOPIC))
            for number in range(LIMIT + 5):
                await world.node.submit(signed_statement(ALICE, TOPIC, data=b"%d" % number))
            await until(lambda: len(world.accepted) == LIMIT)
            await bob.allow(one, (ALICE[0], TOPIC), (ALICE[0], b"2" * 32), (key_pair("carol")[0], TOPIC))
        async with daemon(world):
            await world.node.submit(signed_statement(key_pair("carol"), TOPIC, data=b"carol"))
            await until(lambda: len(of(world, b"carol")) == 1)
    assert len(world.accepted) == LIMIT + 1


async def test_rules_made_while_the_gateway_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answer waits until what comes next is new for them."""
    monkeypatch.setattr(api, "RULES_WAIT", DEADLINE)
    async with gateway_parts(tmp_path) as world:
        world.node.lets_in.clear()
        async with world.serving():
            bob = world.client("bob")
            one = await bob.register("apns", APNS)
            putting = asyncio.create_task(bob.replace_rules(one, (ALICE[0], TOPIC)))

            async def is_listed() -> bool:
                (shown,) = (await bob.ask("GET", SUBSCRIPTIONS)).body
                return [rule["state"] for rule in shown["rules"]] == ["pending"]

            await until(is_listed)
            assert await is_listed()
            assert not putting.done()
            world.node.lets_in.set()
            await putting
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new"))
            await until(lambda: len(world.accepted) == 1)


async def test_a_rule_taken_back_during_an_outage(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world, world.serving():
        bob, carol = world.client("bob"), key_pair("carol")
        one = await bob.register("apns", APNS)
        await bob.allow(one, (ALICE[0], TOPIC), (carol[0], TOPIC))
        world.push.add_fault(Fault(status=503, reason="Shutdown"))
        revoked = dropped(Outcome.REVOKED)
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"revoked"))
        await world.node.submit(signed_statement(carol, TOPIC, data=b"allowed"))
        await until(lambda: len({push.body for push in world.push.pushes}) == 2)
        await bob.allow(one, (carol[0], TOPIC))
        world.push.clear_faults()
        await until(lambda: len(world.accepted) == 1)
        await until(lambda: dropped(Outcome.REVOKED) == revoked + 1)
        assert datas(world) == {"a1 allowed": 1}


async def test_a_call_does_not_ring_late(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path, call_max_age=3.0) as world, world.serving():
        bob = world.client("bob")
        for kind, token in (("voip", VOIP), ("apns", APNS)):
            await bob.allow(await bob.register(kind, token), (ALICE[0], TOPIC))
        world.push.add_fault(Fault(status=503, reason="Shutdown"))
        late = dropped(Outcome.LATE)
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"ring"))
        await until(lambda: dropped(Outcome.LATE) == late + 1)
        world.push.clear_faults()
        await until(lambda: len(world.accepted) == 1)
        assert datas(world) == {"a1 ring": 1}


class Wire:
    """Between the gateway and its node."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self.passes = asyncio.Event()
        "While it is not set, nothing does, and nobody is told."
        self.passes.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The address."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._node.port)
        with suppress(OSError):
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        writer.transport.abort()
        back.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.passes.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


async def test_a_call_during_the_silence_of_the_node_does_not_ring_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection seemed to be there long after the statement was made."""
    age = 5.0
    monkeypatch.setattr(node_client, "HEARTBEAT", 4.0)
    async with gateway_parts(tmp_path, call_max_age=age) as world:
        wire = Wire(world.node)
        async with wire.running() as url:
            world.config = replace(world.config, STATEMENTS=replace(world.config.STATEMENTS, node=url))
            async with world.serving():
                bob = world.client("bob")
                for kind, token in (("voip", VOIP), ("apns", APNS)):
                    await bob.allow(await bob.register(kind, token), (ALICE[0], TOPIC))
                await until(lambda: CONNECTED._value.get() == 1)
                allowed_at = SystemClock().now()
                wire.passes.clear()
                await world.node.submit(signed_statement(ALICE, TOPIC, data=b"ring"))
                late = dropped(Outcome.LATE)
                await until(lambda: CONNECTED._value.get() == 0)
                await until(lambda: SystemClock().now() > allowed_at + age)
                wire.passes.set()
                await until(lambda: dropped(Outcome.LATE) == late + 1)
                await until(lambda: len(world.accepted) == 1)
    assert datas(world) == {"a1 ring": 1}


async def test_a_call_without_an_answer_is_cut_off(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path, call_max_age=1.0) as world, world.serving():
        bob = world.client("bob")
        await bob.allow(await bob.register("voip", VOIP), (ALICE[0], TOPIC))
        world.push.add_fault(Fault(action="silence"))
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"ring"))
        records = world.server.store.push_records_of_sender

        async def failed() -> bool:
            return [record.outcome for record in await records(ALICE[0])] == [Outcome.FAILED]

        await until(failed)


async def test_what_expires_during_an_outage_is_not_pushed(tmp_path: Path) -> None:
    clock = Hand()
    async with gateway_parts(tmp_path) as world, world.serving(clock):
        bob = world.client("bob")
        await bob.allow(await bob.register("apns", APNS), (ALICE[0], TOPIC))
        world.push.add_fault(Fault(status=503, reason="Shutdown"))
        expired, soon = dropped(Outcome.EXPIRED), int(clock.at) + 3
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"short", expires_at=soon))
        await until(lambda: len(world.push.pushes) > 0)
        clock.at = float(soon)
        await until(lambda: dropped(Outcome.EXPIRED) == expired + 1)
        world.push.clear_faults()
        await world.node.submit(signed_statement(ALICE, TOPIC, data=b"long", expires_at=soon + HOUR))
        await until(lambda: len(world.accepted) == 1)
        assert datas(world) == {"a1 long": 1}


async def test_a_node_that_is_away_does_not_keep_clients_waiting(tmp_path: Path) -> None:
    """What it stores when it is back is old for rules that were made meanwhile: nobody can know better."""
    async with gateway_parts(tmp_path) as world:
        await world.node.stop()
        async with world.serving():
            bob = world.client("bob")
            await bob.replace_rules(await bob.register("apns", APNS), (ALICE[0], TOPIC))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"meanwhile"))
            stored = STORED_BEFORE._value.get()
            await world.node.start()
            await until(lambda: STORED_BEFORE._value.get() == stored + 1)
            await until(lambda: world.node.subscriptions == 1)
            repeated = REPEATED._value.get()
            await world.node.drop_clients()
            await until(lambda: REPEATED._value.get() > repeated)
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"new"))
            await until(lambda: len(world.accepted) == 1)
            assert datas(world) == {"a1 new": 1}
