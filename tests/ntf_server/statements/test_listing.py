"""Lists of subscriptions: how many there may be at once, and how much of them is in memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from ntf_demo.statement_gateway import gateway_world
from ntf_server.statements.listing import LISTS, LISTS_PER_SOURCE, PAGE, Lists
from ntf_server.statements.openapi import SUBSCRIPTIONS
from store.statements import Statements
from transport.budget import CpuBudget


async def test_lists_at_once_are_few() -> None:
    """For one source and for all, whatever the number of clients."""
    lists = Lists(cast("Any", None), CpuBudget())

    def may_begin(stack: ExitStack, source: str) -> bool:
        return stack.enter_context(lists.begun(new_client(), source))

    clients = 0

    def new_client() -> bytes:
        nonlocal clients
        clients += 1
        return clients.to_bytes(32, "big")

    for _ in range(2):
        with ExitStack() as under_way:
            for number in range(LISTS // LISTS_PER_SOURCE):
                source = f"192.0.2.{number}"
                assert all(may_begin(under_way, source) for _ in range(LISTS_PER_SOURCE))
                assert not may_begin(under_way, source)
            assert not may_begin(under_way, "198.51.100.1")


async def test_a_list_is_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    gateway_rules = Statements.gateway_rules

    async def noted(*arguments: Any, **options: Any) -> Any:
        page = await gateway_rules(*arguments, **options)
        read.append(len(page))
        return page

    monkeypatch.setattr(Statements, "gateway_rules", noted)
    count = 2 * PAGE + 1
    async with gateway_world(tmp_path, rules_per_subscription=count) as world:
        bob = world.client("bob")
        one = await bob.register("fcm", "1")
        await bob.replace_rules(one, *((at.to_bytes(32, "big"), bytes(32)) for at in range(count)))
        (listed,) = (await bob.ask("GET", SUBSCRIPTIONS)).body
    assert len(listed["rules"]) == count
    assert read == [PAGE, PAGE, 1]
