"""Health by size and time: planted faults, worked out by hand."""

from typing import Any

import pytest

from analytics.warehouse import Warehouse
from store.journal_schema import JournalEvent as E
from tests.analytics.conftest import START_US, Ask, Row, Tables, at, event

HOUR = 3600.0
DAY = 24 * HOUR
A, B = "a.example:5223", "b.example:5223"


def held(server: str, number: int, *, since: float = 0) -> list[Row]:
    """Active subscriptions of a server."""
    rows = []
    for i in range(number):
        ids: dict[str, Any] = {"subscription": f"{server}{i}".encode(), "token": b"t", "server": server}
        rows.append(event(since, E.SUB_CREATED, **ids))
        rows.append(event(since, E.SUB_STATUS_CHANGED, status_from="PENDING", status_to="ACTIVE", **ids))
    return rows


def service(at_s: float, server: str, *, count: int, expected: int, changed: int, total: int) -> Row:
    numbers: dict[str, Any] = {"count": count, "expected": expected, "changed": changed, "total": total}
    return event(at_s, E.SMP_SERVICE_SUBSCRIBED, server=server, **numbers)


def only(rows: list[Row], **wanted: Any) -> Row:
    (row,) = [r for r in rows if all(r[name] == value for name, value in wanted.items())]
    return row


def health_of(warehouse: Warehouse, server: str) -> Row:
    return only(Tables(warehouse)["health"], server=server)


def test_a_healthy_server_has_full_marks(ask: Ask) -> None:
    row = health_of(ask([event(0, E.SMP_CONNECTED, server=A, latency_us=1), *held(A, 10)]), A)
    assert (row["score"], row["reasons"], row["active"], row["availability"]) == (100, "", 10, 1.0)


def test_a_server_that_kept_10_of_100_is_not_well_until_it_has_healed(ask: Ask) -> None:
    lost = [
        *held(A, 100),
        service(HOUR, A, count=10, expected=100, changed=0, total=100),
        event(HOUR, E.SMP_DRIFT, server=A, count=10, expected=100),
    ]
    warehouse = ask(lost)
    tables = Tables(warehouse)
    row = tables["health"][0]
    assert (row["active"], row["lost"], row["open_outages"]) == (10, 90, 1)
    assert row["score"] < 30
    assert row["reasons"].startswith("not active, unavailable, lost subscriptions")
    (outage,) = tables["health_outages"]
    assert (outage["kind"], outage["subscriptions"], outage["of_subscriptions"]) == ("lost", 90, 100)
    assert outage["is_open"]
    later = [
        service(HOUR + 41, A, count=100, expected=100, changed=0, total=100),
        event(HOUR + 41, E.SMP_HEALED, server=A, count=90, latency_us=41_000_000),
    ]
    tables = Tables(ask([*lost, *later]))
    row = tables["health"][0]
    assert (row["active"], row["lost"], row["open_outages"], row["longest_heal_s"]) == (100, 0, 0, 41.0)
    assert 80 < row["score"] < 90
    (outage,) = tables["health_outages"]
    assert (outage["start"], outage["heal_s"], outage["is_open"]) == (at(HOUR), 41.0, False)


def test_drift_costs_by_its_size(ask: Ask) -> None:
    def score(lost: int) -> float:
        rows = [
            *held(A, 100),
            event(HOUR, E.SMP_DRIFT, server=A, count=100 - lost, expected=100),
            event(HOUR + 1, E.SMP_HEALED, server=A, count=lost, latency_us=1_000_000),
        ]
        return float(health_of(ask(rows), A)["score"])

    assert score(1) > 99 > score(10) > 95 > score(50)


def test_time_without_service_counts_and_ends_when_subscriptions_are_back(ask: Ask) -> None:
    rows = [
        *held(A, 10),
        event(6 * HOUR, E.SMP_DISCONNECTED, server=A, error="Closed", changed=10),
        event(6 * HOUR + 60, E.SMP_CONNECTED, server=A, latency_us=1),
        service(6 * HOUR + 60, A, count=6, expected=6, changed=6, total=10),
    ]
    for i in range(6, 10):
        ids: dict[str, Any] = {"subscription": f"{A}{i}".encode(), "token": b"t", "server": A}
        moved: dict[str, Any] = {"status_from": "INACTIVE", "status_to": "ACTIVE"}
        rows.append(event(6 * HOUR + 120, E.SUB_STATUS_CHANGED, **ids, **moved))
    tables = Tables(ask(rows))
    (outage,) = tables["health_outages"]
    assert (outage["kind"], outage["subscriptions"], outage["heal_s"]) == ("disconnected", 10, 120.0)
    row = tables["health"][0]
    assert (row["active"], row["mean_recover_s"], row["disconnects"]) == (10, 120.0, 1)
    assert row["availability"] == pytest.approx(1 - 120 / DAY)
    hour = only(tables["health_hours"], hour=at(6 * HOUR))
    assert (hour["lost"], hour["lost_seconds"]) == (10, 1200.0)


def test_a_later_service_subscription_makes_active_only_what_it_changed(ask: Ask) -> None:
    rows = [
        *held(A, 10),
        event(HOUR, E.SMP_DISCONNECTED, server=A, error="Closed", changed=10),
        event(HOUR + 5, E.SMP_CONNECTED, server=A, latency_us=1),
        service(HOUR + 6, A, count=4, expected=4, changed=4, total=10),
    ]
    row = health_of(ask(rows), A)
    assert (row["active"], row["open_outages"]) == (0, 1)


def test_a_service_reset_is_an_outage_until_the_subscriptions_are_back(ask: Ask) -> None:
    rows = [
        *held(A, 5),
        event(HOUR, E.SMP_SERVICE_RESET, server=A, error="refused", changed=5),
        service(HOUR + 7, A, count=5, expected=5, changed=5, total=5),
    ]
    (outage,) = Tables(ask(rows))["health_outages"]
    assert (outage["kind"], outage["subscriptions"], outage["heal_s"]) == ("service reset", 5, 7.0)


def test_a_short_window_costs_no_full_penalty(ask: Ask) -> None:
    rows = [
        *held(A, 5),
        event(60, E.SMP_DISCONNECTED, server=A, error="Closed", changed=5),
        event(61, E.SMP_CONNECTED, server=A, latency_us=1),
        service(61, A, count=5, expected=5, changed=5, total=5),
    ]
    row = health_of(ask(rows, days=1 / 24), A)
    assert row["score"] > 95


def test_two_routers_on_one_host_are_two(ask: Ask) -> None:
    other = "a.example:7001"
    rows = [*held(A, 2), *held(other, 3), event(9, E.SMP_DISCONNECTED, server=other, error="x", changed=3)]
    found = {row["server"]: row["active"] for row in Tables(ask(rows))["health"]}
    assert found == {A: 2, other: 0}


def lives(at_s: float, uptime_s: float, **more: Any) -> Row:
    name = more.pop("name", E.SERVER_ALIVE)
    return event(at_s, name, daemon="d", uptime_us=round(uptime_s * 1e6), **more)


def test_wrong_clocks_are_put_aside_and_told(ask: Ask) -> None:
    year = 365 * DAY
    good = [
        lives(0, 0, name=E.SERVER_STARTED, count=2),
        *held(A, 2),
        *[lives(i * HOUR, i * HOUR) for i in range(1, 12)],
        event(HOUR, E.NTF_RECEIVED, server=A, token=b"t", count=3),
    ]
    bad = [
        event(10 * year, E.SMP_CONNECTED, server=A, latency_us=1),
        event(-56 * year, E.SMP_CONNECTED, server=A, latency_us=1),
        lives(10 * year, 11.5 * HOUR),
        event(10 * year, E.NTF_RECEIVED, server=A, count=7),
    ]
    warehouse = ask([*good, *bad], start=None, end=None)
    assert warehouse.window.start == START_US
    assert warehouse.window.end == at(11 * HOUR) + 1
    (note,) = warehouse.notes
    assert note.startswith("4 events were put aside: their times, from 19 January 1970 to 3 January 2036,")
    assert Tables(warehouse)["stale_subscriptions"] == []
    assert len(Tables(warehouse)["capacity_daily"]) == 1
    right = ask(good, start=None, end=None)
    assert right.notes == []
    assert Tables(right)["health"] == Tables(warehouse)["health"]


def test_a_clock_that_is_set_right_while_the_daemon_runs(ask: Ask) -> None:
    rows = [
        lives(-20 * 365 * DAY, 0, name=E.SERVER_STARTED, count=0),
        *[lives(i * HOUR, i * HOUR) for i in range(1, 5)],
        *held(A, 1, since=HOUR),
    ]
    warehouse = ask(rows, start=None, end=None)
    assert warehouse.window.start == at(HOUR)
    assert len(warehouse.notes) == 1


def era(start: float, epoch: int, names: list[bytes], writer: bytes) -> list[Row]:
    """A run of a daemon with a key."""
    rows = [lives(start, 0, name=E.SERVER_STARTED, count=0)]
    for name in names:
        rows.append(event(start, E.TOKEN_VERIFIED, token=name, provider="AP"))
        rows.append(event(start, E.SUB_CREATED, subscription=name, token=name, server=A))
    return [{**row, "epoch": epoch, "writer": writer} for row in rows]


def test_a_new_key_counts_nobody_twice(ask: Ask) -> None:
    old = era(0, 1, [b"1", b"2", b"3"], b"w1")
    new = era(DAY + HOUR, 2, [b"x", b"y"], b"w2")
    warehouse = ask([*old, *new], days=2)
    assert "key changed on 6 January 2026" in warehouse.notes[0]
    days = Tables(warehouse)["capacity_daily"]
    assert [(d["tokens"], d["subscriptions"]) for d in days] == [(3, 3), (2, 2)]
    assert Tables(warehouse)["health"][0]["subscriptions"] == 2
    assert [d["active_at_end"] for d in Tables(warehouse)["tokens_churn"]] == [3, 2]


def test_a_daemon_that_was_gone_before_a_new_key_does_not_keep_the_old_one(ask: Ask) -> None:
    gone = {**lives(HOUR, HOUR), "daemon": "gone", "writer": b"w0"}
    rows = [gone, *era(0, 1, [b"1", b"2"], b"w1"), *era(DAY, 2, [b"x", b"y"], b"w2")]
    assert Tables(ask(rows, days=2))["health"][0]["subscriptions"] == 2
    still = {**gone, **lives(DAY + HOUR, DAY + HOUR), "daemon": "gone", "writer": b"w0"}
    assert Tables(ask([*rows, still], days=2))["health"][0]["subscriptions"] == 4


def test_daemons_with_stores_of_their_own_do_not_end_each_others_outages(ask: Ask) -> None:
    """Their journals may be in one folder, and their routers the same."""
    rows = [
        *held(A, 10),
        event(HOUR, E.SMP_DISCONNECTED, server=A, error="Closed", changed=10),
        {**service(HOUR + 5, A, count=50, expected=50, changed=0, total=50), "epoch": 2, "writer": b"w2"},
        service(HOUR + 90, A, count=10, expected=10, changed=10, total=10),
    ]
    (outage,) = Tables(ask(rows))["health_outages"]
    assert (outage["subscriptions"], outage["heal_s"]) == (10, 90.0)


def test_an_outage_is_not_open_for_ever_under_a_key_that_was_given_up(ask: Ask) -> None:
    down = {**event(HOUR, E.SMP_DISCONNECTED, server=A, error="Closed", changed=1), "writer": b"w1"}
    rows = [*era(0, 1, [b"1"], b"w1"), down, *era(DAY, 2, [b"x"], b"w2")]
    (outage,) = Tables(ask(rows, days=2))["health_outages"]
    assert (outage["is_open"], outage["end"]) == (False, at(DAY))


def sampled(at_s: float, number: int) -> Row:
    return event(at_s, E.SMP_SAMPLED, server=A, status_to="ACTIVE", count=number)


def test_a_sample_taken_while_a_router_is_away_does_not_count_the_loss_twice(ask: Ask) -> None:
    rows = [
        *held(A, 100),
        event(HOUR, E.SMP_DISCONNECTED, server=A, error="Closed", changed=100),
        sampled(HOUR + 30, 0),
        event(HOUR + 60, E.SMP_CONNECTED, server=A, latency_us=1),
        service(HOUR + 60, A, count=100, expected=100, changed=100, total=100),
        sampled(2 * HOUR, 97),
    ]
    hours = {row["hour"]: row["active"] for row in Tables(ask(rows))["health_hours"]}
    assert hours == {at(HOUR): 98, at(2 * HOUR): 97}
