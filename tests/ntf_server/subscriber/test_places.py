"""Who has a place among the routers."""

from __future__ import annotations

import random
from collections import Counter

from ntf_server.router_places import RouterPlaces
from protocol.addresses import SmpServer

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
