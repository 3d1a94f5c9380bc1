"""What an operator is shown of the gateway: by `statements`, `status`, `doctor`, status page and metrics."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntf_demo.statement_gateway import GatewayWorld, gateway_parts, key_pair, signed_statement
from ntf_server.config import CONFIG_FILE, StatementsConfig, render_config
from ntf_server.statements import service
from ntf_server.statements.summary import node_name
from protocol.statements import statement_hash
from store.statement_rate import LIMIT
from tests.http import get
from tests.ntf_server.statements.process import ALICE, DEVICES, TOPIC, of
from tests.ntf_server.test_cli import Finished, ntf_server
from tests.ports import free_port
from tests.waiting import until

CAROL = key_pair("carol")


async def command(world: GatewayWorld, *words: str) -> Finished:
    (world.folder / "etc" / CONFIG_FILE).write_text(render_config(world.config))
    return await asyncio.to_thread(ntf_server, *words, "--config-dir", world.folder / "etc")


async def busy(world: GatewayWorld) -> dict[str, str]:
    """Each device has a push, and a sender met the limit; subscriptions by type."""
    bob = world.client("bob")
    ids = {}
    for kind, token in DEVICES.items():
        ids[kind] = await bob.register(kind, token)
        await bob.allow(ids[kind], (ALICE[0], TOPIC))
    await world.node.submit(signed_statement(ALICE, TOPIC, data=b"hello"))
    await until(lambda: len(of(world, b"hello")) == 3)
    return ids


async def test_records_of_a_subscription_and_of_a_sender(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world, world.serving():
        ids = await busy(world)
        await world.node.submit(second := signed_statement(ALICE, TOPIC, data=b"again"))
        await until(lambda: len(world.accepted) == 6)

        async def all_sent() -> bool:
            records = await world.server.store.push_records_of_sender(ALICE[0])
            return [record.outcome.value for record in records] == ["sent"] * 6

        await until(all_sent)
        listed = await command(world, "statements", "records", "--subscription", ids["voip"], "--json")
        assert listed.returncode == 0, listed
        records: list[dict[str, Any]] = [json.loads(line) for line in listed.stdout.splitlines()]
        assert [record["outcome"] for record in records] == ["sent", "sent"]
        assert {record["subscription_id"] for record in records} == {ids["voip"]}
        assert {record["sender"] for record in records} == {ALICE[0].hex()}
        assert {record["topic"] for record in records} == {TOPIC.hex()}
        assert records[-1]["statement_hash"] == statement_hash(second).hex()
        assert all(record["sent_at"] >= record["accepted_at"] for record in records)
        of_sender = await command(world, "statements", "records", "--sender", ALICE[0].hex(), "--limit", "4")
        assert [line.split()[2] for line in of_sender.stdout.splitlines()] == ["sent"] * 4
        nobody = await command(world, "statements", "records", "--sender", CAROL[0].hex())
        assert nobody.stdout.startswith("no records")
    assert not any(token in listed.stdout + of_sender.stdout for token in DEVICES.values())


@pytest.mark.parametrize(
    "words", [["--sender", "ab"], ["--subscription", "7"], [], ["--sender", "ab" * 32, "--limit", "0"]]
)
async def test_wrong_questions(tmp_path: Path, words: list[str]) -> None:
    async with gateway_parts(tmp_path) as world:
        done = await command(world, "statements", "records", *words)
        assert done.returncode == 2
        assert "error:" in done.stderr


async def test_status_and_doctor_show_the_gateway(tmp_path: Path) -> None:
    async with gateway_parts(tmp_path) as world:
        async with world.serving():
            await busy(world)

            async def shown() -> bool:
                text = (await command(world, "status")).stdout
                return all(
                    line in text
                    for line in (
                        f"statements   {world.node.url}: last connected ",
                        "3 subscriptions (apns 1, fcm 1, voip 1), 3 rules, 1 topic",
                        "newest 3 statements with a rule: sent 3",
                        "sent by type: apns 1, fcm 1, voip 1",
                    )
                )

            await until(shown)
        found = await doctor(world)
        assert f"node {world.node.url} answers" in found["ok"]
        assert "3 subscriptions (apns 1, fcm 1, voip 1), 3 rules, 1 topic" in found["ok"]
        await world.node.stop()
        (unreachable,) = (await doctor(world))["problem"]
        assert unreachable.startswith(f"node {world.node.url}: ")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("wss://user:word@node.example/v1/0123key?token=word#word", "wss://node.example"),
        ("ws://[2001:db8::1]:9944/", "ws://[2001:db8::1]:9944"),
    ],
)
def test_what_is_secret_in_the_address_of_a_node_is_not_shown(url: str, shown: str) -> None:
    assert node_name(url) == shown
    assert "word" not in repr(StatementsConfig(node=url))


async def doctor(world: GatewayWorld) -> dict[str, list[str]]:
    """What it says about the gateway, by level."""
    done = await command(world, "doctor", "--json")
    said: dict[str, list[str]] = {"ok": [], "problem": []}
    for finding in json.loads(done.stdout):
        if finding["check"] == "statements":
            said[finding["level"]].append(finding["says"])
    return said


async def test_the_status_page_and_metrics_show_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PURGE_INTERVAL", 0.05)
    port = free_port()
    async with gateway_parts(tmp_path) as world:
        world.config = replace(world.config, METRICS=replace(world.config.METRICS, port=port))
        async with world.serving():

            async def page() -> dict[str, Any]:
                found: dict[str, Any] = json.loads((await get(port, "/status.json")).partition("\r\n\r\n")[2])
                return found

            async def shows(title: str, value: int) -> bool:
                return bool((await page())["figures"][title] == value)

            before = (await page())["figures"]
            await busy(world)
            await until(lambda: shows("Statement rules", 3))
            await until(lambda: shows("Statement topics watched", 1))
            for kind in ("APNs", "VoIP", "FCM"):
                title = f"Statement pushes, {kind}"
                await until(lambda: shows(title, before[title] + 1))  # noqa: B023
            for number in range(LIMIT):
                await world.node.submit(signed_statement(ALICE, TOPIC, data=b"%d" % number))
            limited = "Statements over a sender's limit"
            await until(lambda: shows(limited, before[limited] + 3))
            assert (await page())["worries"] == []
            await world.node.stop()
            unreachable = f"statement store {world.node.url} is unreachable: no statements are pushed"

            async def worries() -> bool:
                return unreachable in (await page())["worries"]

            await until(worries)
