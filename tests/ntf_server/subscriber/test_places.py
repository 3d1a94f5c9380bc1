"""Who has a place among the routers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from ntf_server import router as router_module
from ntf_server import subscriber
from ntf_server.clock import SECONDS_PER_DAY, SystemClock
from ntf_server.journal import EventSink
from ntf_server.router import Acquaintance
from ntf_server.subscriber import NamedRouters, RouterPlaces, RouterSubscriber
from protocol.addresses import SmpServer
from protocol.errors import QUOTA
from protocol.statuses import SubState
from smp_client.errors import ConnectFailed
from smp_client.session import SmpSession, connect_smp
from smp_router.router import Router
from store.leases import Lease, SoleOwner
from tests.ntf_server.subscriber.conftest import QUICK, CollectingSink, Daemon, tune
from tests.waiting import until

A, B, C, D = (SmpServer((f"{name}.example",), "", bytes(32)) for name in "abcd")


def test_so_many_in_all_and_so_many_of_one_client() -> None:
    places = RouterPlaces(total=3, per_client=1)
    places.take(A, "x")
    assert places.has_room(A, "x"), "it has its place already"
    assert not places.has_room(B, "x")
    assert places.has_room(B, "y")
    places.take(B, None)  # from the store
    places.take(C, "y")
    assert not places.has_room(D, "z"), "all places are taken"
    assert not places.has_room(D, None)
    assert places.brought_by(A) == "x"
    assert places.brought_by(B) is None


def test_a_place_is_held_until_the_last_leaves() -> None:
    places = RouterPlaces(total=9, per_client=1)
    places.take(A, "x")  # SNEW
    places.take(A, None)  # the router's task
    places.leave(A)
    assert not places.has_room(B, "x")
    places.leave(A)
    assert places.has_room(B, "x")
    assert len(places) == 0


def test_nothing_is_left_behind() -> None:
    chance, places, held = random.Random(1), RouterPlaces(4, 2), Counter[SmpServer]()
    for _ in range(10_000):
        server, client = chance.choice([A, B, C, D]), chance.choice(["x", "y", None])
        if held[server] and chance.random() < 0.5:
            places.leave(server)
            held[server] -= 1
        elif places.has_room(server, client):
            places.take(server, client)
            held[server] += 1
        assert len(places) == sum(count > 0 for count in held.values()) <= 4
    for server in held.elements():
        places.leave(server)
    assert places._holders == {} == places._brought_by == places._brought


def test_new_names_of_one_client_in_a_day() -> None:
    named = NamedRouters(per_client=2)
    assert named.allows(A, "x", 0)
    assert named.allows(B, "x", 0)
    assert not named.allows(C, "x", 0)
    assert named.allows(A, "x", 0), "it is known"
    assert named.allows(C, "y", 0)
    assert named.allows(C, "x", 0), "another one named it"
    assert not named.allows(D, "x", 0)
    assert named.allows(D, "x", SECONDS_PER_DAY)
    assert [named.named_by(server) for server in (A, C, D)] == ["x", "y", "x"]


def test_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "NAMED_ROUTERS", 2)
    named = NamedRouters(per_client=9)
    for server in (A, B, A, C):
        assert named.allows(server, "x", 0)
    assert named.named_by(B) is None
    assert named.named_by(A) == named.named_by(C) == "x"


class OwnsNothing(SoleOwner):
    """As a daemon on a database that others use: routers come to it by way of leases, if at all."""

    is_shared = True

    def owns(self, lease: Lease) -> bool:
        return False


async def test_routers_that_other_daemons_watch_count_too() -> None:
    """Their places are given back as soon as they are stored: without a count of names there was no limit."""
    subscriber = RouterSubscriber(
        cast("Any", None),
        CollectingSink(),
        SystemClock(),
        replace(QUICK, routers_per_address=2),
        EventSink(),
        max_routers=100,
        ownership=OwnsNothing(),
    )
    for servers, refused in (([A, B], {}), ([C], {C: QUOTA}), ([A], {})):
        with subscriber.admission(servers, "192.0.2.1") as answers:
            assert answers == refused
    with subscriber.admission([C], "192.0.2.2") as answers:
        assert answers == {}


async def test_routers_that_do_not_answer_any_more_hold_up_nobody_who_does(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes one connection to be a router that was there before; after that, silence is free."""
    monkeypatch.setattr(subscriber, "DIALS", dict.fromkeys(Acquaintance, (1, 1)))
    daemon.configure(daemon.config)
    went_silent, attempts = asyncio.Event(), 0

    async def dial(server: SmpServer, *arguments: Any, **options: Any) -> SmpSession:
        nonlocal attempts
        if went_silent.is_set() and server == silent.address:
            attempts += 1
            if attempts > 1:
                await asyncio.Event().wait()
            await asyncio.sleep(0.02)
            raise ConnectFailed("no answer in time")
        return await connect_smp(server, *arguments, **options)

    monkeypatch.setattr(router_module, "connect_smp", dial)
    async with Router.start() as honest, Router.start() as silent, daemon.running():
        for router in (honest, silent):
            await daemon.add(router.address, router.load.create_queues(1))
        await until(lambda: daemon.count(SubState.ACTIVE) == 2)
        went_silent.set()
        tune(monkeypatch, SLOW_DIAL=0.01)
        await daemon.see_drop(silent)
        await until(lambda: attempts == 2)  # and that one never ends
        await daemon.see_drop(honest)
        await until(lambda: len(honest.subscribed_notifiers()) == 1 and daemon.count(SubState.ACTIVE) == 1)
