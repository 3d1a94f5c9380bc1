"""Sentences: what is told, with which size, and what comes first."""

from typing import Any

from analytics.findings import Thresholds, find
from analytics.warehouse import Warehouse
from store.journal_schema import JournalEvent as E
from tests.analytics.conftest import Ask, Row, Tables, event
from tests.analytics.test_health import A, B, held, service

HOUR = 3600.0


def sentences(warehouse: Warehouse, **thresholds: Any) -> list[str]:
    return [finding.text for finding in find(Tables(warehouse), Thresholds(**thresholds))]


def provider(at_s: float, name: E, **columns: Any) -> Row:
    return event(at_s, name, provider="AP", **columns)


def test_a_provider_that_was_down_and_one_that_still_refuses_us(ask: Ask) -> None:
    rows = [
        *held(A, 5),
        provider(HOUR, E.PROVIDER_DOWN, error="down"),
        provider(HOUR + 90, E.PROVIDER_UP, latency_us=90_000_000, count=1200),
        provider(2 * HOUR, E.PROVIDER_DOWN, error="refused"),
    ]
    assert sentences(ask(rows)) == [
        "Apple (AP) refused us on 5 January 02:00, and has not healed.",
        "Apple (AP) was down on 5 January 01:00, 1,200 pushes waited, healed after 90 s.",
    ]


def test_a_provider_is_not_down_for_ever_because_its_daemon_died(ask: Ask) -> None:
    rows = [
        event(0, E.SERVER_STARTED, daemon="d", uptime_us=0, count=0, writer=b"1"),
        {**provider(60, E.PROVIDER_DOWN, error="down"), "writer": b"1"},
        event(100, E.SERVER_ALIVE, daemon="d", uptime_us=100_000_000, writer=b"1"),
        event(120, E.SERVER_STARTED, daemon="d", uptime_us=0, count=0, writer=b"2"),
    ]
    down, died = sorted(sentences(ask(rows, days=0.02)))
    assert down == "Apple (AP) was down on 5 January 00:01, healed after 40 s."
    assert died == "d died and was back on 5 January 00:02 after 20 s with 0 subscriptions."


def refused(at_s: float, server: str, number: int, status: str = "AUTH") -> list[Row]:
    ids: list[dict[str, Any]] = [
        {"subscription": f"{server}{i}".encode(), "token": b"t", "server": server} for i in range(number)
    ]
    moved: dict[str, Any] = {"status_from": "ACTIVE", "status_to": status}
    return [event(at_s, E.SUB_STATUS_CHANGED, **one, **moved) for one in ids]


def test_what_a_router_refuses_is_told_if_it_is_much(ask: Ask) -> None:
    rows = [*held(A, 20), *held(B, 100), *refused(HOUR, A, 4), *refused(HOUR, B, 4)]
    assert sentences(ask(rows)) == [
        f"{A} refused 4 of 20 subscriptions (AUTH) on 5 January 01:00, and has not healed."
    ]
    back = [{**row, "status_from": "AUTH", "status_to": "ACTIVE"} for row in refused(HOUR + 300, A, 4)]
    assert sentences(ask([*rows, *back])) == [
        f"{A} refused 4 of 20 subscriptions (AUTH) on 5 January 01:00, healed after 5 min."
    ]


def test_a_loss_that_the_router_does_not_take_back_is_told_once(ask: Ask) -> None:
    rows = [
        *held(A, 20),
        event(HOUR, E.SMP_DRIFT, server=A, count=16, expected=20),
        *refused(HOUR, A, 4),
        service(HOUR + 1, A, count=16, expected=16, changed=0, total=20),
        event(HOUR + 1, E.SMP_HEALED, server=A, count=0, latency_us=1_000_000),
    ]
    assert [text.partition(" (")[0] for text in sentences(ask(rows), score=1)] == [
        f"{A} refused 4 of 20 subscriptions"
    ]
    assert Tables(ask(rows))["health_outages"] == []


def test_an_outage_ends_with_what_the_router_says_though_the_journal_lacks_its_last_second(ask: Ask) -> None:
    rows = [
        *held(A, 10),
        event(HOUR, E.SMP_DISCONNECTED, server=A, error="Closed", changed=10),
        service(HOUR + 90, A, count=10, expected=10, changed=0, total=10),
    ]
    assert sentences(ask(rows)) == [
        f"{A} was away from 5 January 01:00 with 10 of 10 subscriptions, healed after 90 s."
    ]


def test_tokens_that_die_together(ask: Ask) -> None:
    names = [b"t%d" % i for i in range(10)]
    rows = [event(0, E.TOKEN_VERIFIED, token=name, provider="AP") for name in names]
    for name in names:
        ids: Any = {"subscription": b"s" + name, "token": name, "server": A}
        rows.append(event(1, E.SUB_CREATED, **ids, status_to="ACTIVE"))
    dead = [event(HOUR, E.TOKEN_INVALID, token=t, provider="AP", error="UNREGISTERED") for t in names[:3]]
    assert sentences(ask([*rows, *dead[:2]])) == []  # single people leave every day
    told = "Apple (AP) called 3 of 10 tokens invalid (UNREGISTERED) on 5 January 01:00"
    told += ", they hold 3 subscriptions"
    assert sentences(ask([*rows, *dead])) == [f"{told}, and has not healed."]
    back = [event(HOUR + i, E.TOKEN_VERIFIED, token=t, provider="AP") for i, t in enumerate(names[:3])]
    assert sentences(ask([*rows, *dead, *back])) == [f"{told}, healed after 2 s."]


def test_a_failing_network_is_told_with_the_time_until_the_last_router_was_back(ask: Ask) -> None:
    servers = [A, B, "c.example:5223"]
    rows = [row for server in servers for row in held(server, 10)]
    for i, server in enumerate(servers):
        rows.append(event(HOUR + i, E.SMP_DISCONNECTED, server=server, error="Closed", changed=10))
        rows.append(service(HOUR + 20 + i, server, count=10, expected=10, changed=10, total=10))
    assert sentences(ask(rows)) == [
        "3 of 3 routers went away at once on 5 January 01:00 with 30 subscriptions, healed after 22 s."
    ]


def run(at_s: float, daemon: str, name: E = E.SERVER_ALIVE, **columns: Any) -> Row:
    uptime_us = round(at_s * 1e6)
    return event(at_s, name, daemon=daemon, uptime_us=uptime_us, writer=daemon.encode(), **columns)


def test_a_daemon_that_died_and_did_not_come_back(ask: Ask) -> None:
    beats = [run(minute * 60.0, "d", count=90, total=100) for minute in range(61)]
    assert sentences(ask(beats, days=1.9 / 24)) == []  # closed segments may be so old
    silent = ["d has given no sign of life since 5 January 01:00: nobody serves 100 subscriptions."]
    assert sentences(ask(beats)) == silent
    assert sentences(ask(beats, end=None)) == silent  # until now
    assert sentences(ask(beats, first_day=0.5)) == silent  # there was nothing since
    stopped = [*beats, run(HOUR + 1, "d", E.SERVER_STOPPED)]
    assert sentences(ask(stopped)) == ["d was stopped on 5 January 01:00: nobody serves 100 subscriptions."]


def test_others_go_on_when_a_daemon_dies(ask: Ask) -> None:
    first = [run(0.0, "a", total=10, count=10), run(HOUR, "a", total=10, count=10)]
    second = [run(hour * HOUR, "b", total=10, count=10) for hour in range(25)]
    second.append(run(23.5 * HOUR, "b", total=10, count=10))
    assert sentences(ask([*first, *second])) == [
        "a has given no sign of life since 5 January 01:00, when there were 10 subscriptions; others run."
    ]
    assert sentences(ask([*first, *second], first_day=0.5)) == []  # was told the day before
    assert sentences(ask([*first, run(HOUR + 1, "a", E.SERVER_STOPPED), *second])) == []


def test_segments_that_cannot_be_read_are_no_good_news() -> None:
    told = [finding.text for finding in find({}, Thresholds(), ["date=2026-01-05/x.parquet"])]
    what = "date=2026-01-05/x.parquet, a segment of the journal, could not be read"
    assert told == [f"{what}: its events may be missing here."]
