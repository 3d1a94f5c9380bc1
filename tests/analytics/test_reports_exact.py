"""Each report function on data small enough to work out by hand."""

import pytest

from analytics.inputs import Limits
from store.journal_schema import JournalEvent as E
from tests.analytics.conftest import Ask, Row, Tables, at, event

HOUR = 3600.0
DAY = 24 * HOUR
A, B = "a.example:5223", "b.example:5223"
BUCKET = 0.045  # latencies are known to the width of their bucket


def created(at_s: float, sub: bytes, *, token: bytes = b"t", server: str = A) -> Row:
    return event(at_s, E.SUB_CREATED, subscription=sub, token=token, server=server)


def changed(at_s: float, sub: bytes, before: str, after: str, *, server: str = A, token: bytes = b"t") -> Row:
    return event(
        at_s,
        E.SUB_STATUS_CHANGED,
        subscription=sub,
        token=token,
        server=server,
        status_from=before,
        status_to=after,
    )


def test_delivery_rates_and_percentiles(ask: Ask) -> None:
    sent = [
        event(60 * i, E.PUSH_SENT, provider="AP", server=A, latency_us=1000 * (i + 1), count=1 + (i == 0))
        for i in range(4)
    ]
    rows = [
        *sent,
        event(HOUR, E.PUSH_SENT, provider="AP", server=B, latency_us=9000),
        event(70, E.PUSH_FAILED, provider="AP", server=A, error="TIMEOUT"),
        event(71, E.PUSH_RETRIED, provider="AP", server=A, error="TIMEOUT"),
        event(72, E.PUSH_RETRIED, provider="AP", server=A),
        event(73, E.PUSH_COALESCED, provider="AP", count=4),
        event(74, E.PUSH_TRIMMED, provider="AP", count=2),
        event(75, E.CRON_SENT, provider="AP"),
        event(2 * DAY, E.PUSH_SENT, provider="AP", server=A, latency_us=1),
    ]
    found = Tables(ask(rows))
    (row,) = found["delivery_providers"]
    assert row == {
        "provider": "AP",
        "sent": 5,
        "failed": 1,
        "retried": 2,
        "entries": 6,
        "coalesced": 4,
        "trimmed": 2,
        "periodic": 1,
        "success_rate": pytest.approx(5 / 6),
        "failure_rate": pytest.approx(1 / 6),
        "retry_rate": 0.25,
        "coalescing_factor": 1.2,
        "sent_again": 0,
        "latency_ms_p50": pytest.approx(3, rel=BUCKET),
        "latency_ms_p95": pytest.approx(9, rel=BUCKET),
        "latency_ms_p99": pytest.approx(9, rel=BUCKET),
    }
    first, second = found["delivery_latency"]
    assert (first["hour"], first["server"], first["pushes"], first["entries"]) == (at(0), A, 4, 5)
    assert first["latency_ms_p50"] == pytest.approx(2, rel=BUCKET)
    assert first["latency_ms_p99"] == pytest.approx(4, rel=BUCKET)
    assert (second["hour"], second["server"]) == (at(HOUR), B)
    assert second["latency_ms_p99"] == pytest.approx(9, rel=BUCKET)
    assert [(r["outcome"], r["error"], r["pushes"], r["share"]) for r in found["delivery_errors"]] == [
        ("push_failed", "TIMEOUT", 1, 0.125),
        ("push_retried", "TIMEOUT", 1, 0.125),
        ("push_retried", "unknown", 1, 0.125),
    ]


def test_token_funnel(ask: Ask) -> None:
    rows = [
        event(0, E.TOKEN_REGISTERED, token=b"1"),
        event(2, E.TOKEN_CONFIRMED, token=b"1"),
        event(12, E.TOKEN_VERIFIED, token=b"1"),
        event(100, E.TOKEN_REGISTERED, token=b"2"),
        event(104, E.TOKEN_CONFIRMED, token=b"2"),
        event(200, E.TOKEN_REGISTERED, token=b"3"),
        event(300, E.TOKEN_REGISTERED, token=b"1"),
    ]
    found = [tuple(row.values()) for row in Tables(ask(rows))["tokens_funnel"]]
    assert found == [
        ("registered", 3, 1.0, None, None),
        ("confirmed", 2, pytest.approx(2 / 3), 3.0, pytest.approx(3.9)),
        ("active", 1, pytest.approx(1 / 3), 10.0, 10.0),
    ]


def test_token_churn_fills_days_and_starts_with_what_was_before(ask: Ask) -> None:
    rows = [
        event(0, E.TOKEN_VERIFIED, token=b"1"),
        event(1, E.TOKEN_VERIFIED, token=b"2"),
        event(2, E.TOKEN_VERIFIED, token=b"2"),
        event(DAY, E.TOKEN_INVALID, token=b"1", provider="AP", error="UNREGISTERED"),
        event(DAY + 1, E.TOKEN_REPLACED, token=b"2"),
        event(3 * DAY, E.TOKEN_VERIFIED, token=b"2"),
        event(3 * DAY + 5, E.TOKEN_DELETED, token=b"2"),
    ]
    tables = Tables(ask(rows, first_day=1, days=4))
    found = tables["tokens_churn"]
    names = (
        "day",
        "verified",
        "replaced",
        "deleted",
        "invalid",
        "active_at_start",
        "active_at_end",
        "churn_rate",
    )
    assert [tuple(row[n] for n in names) for row in found] == [
        (at(DAY), 0, 1, 0, 1, 2, 0, 0.5),
        (at(2 * DAY), 0, 0, 0, 0, 0, 0, None),
        (at(3 * DAY), 1, 0, 1, 0, 0, 0, None),
    ]
    assert [tuple(r.values()) for r in tables["tokens_invalid"]] == [("AP", "UNREGISTERED", 1, 1.0)]


def test_dead_tokens_and_what_they_hold(ask: Ask) -> None:
    rows = [
        *[event(0, E.TOKEN_VERIFIED, token=t, provider="AP") for t in (b"1", b"2", b"3", b"4")],
        event(DAY, E.PUSH_SENT, token=b"1", provider="AP"),
        event(5 * DAY, E.CRON_SENT, token=b"2", provider="AP"),
        event(5 * DAY, E.TOKEN_DELETED, token=b"4", provider="AP"),
        created(10, b"a", token=b"1"),
        created(10, b"b", token=b"1"),
        event(20, E.SUB_DELETED, subscription=b"b", server=A),
    ]
    found = Tables(ask(rows, days=8, limits=Limits(dead_token_days=7)))["tokens_dead"]
    names = ("token", "last_event", "last_push", "silent_days", "subscriptions")
    assert [tuple(row[n] for n in names) for row in found] == [
        (b"1".hex(), "token_verified", at(DAY), 7.0, 1),
        (b"3".hex(), "token_verified", None, 8.0, 0),
    ]


def test_stale_subscriptions_have_all_their_reasons(ask: Ask) -> None:
    day = 20 * DAY
    rows = [
        event(0, E.SMP_CONNECTED, server=A),
        event(day - 60, E.NTF_RECEIVED, server=A),
        *[event(day - 60, E.PUSH_SENT, token=t) for t in (b"t", b"u")],
        *[event(0, E.TOKEN_VERIFIED, token=t) for t in (b"t", b"u", b"dead")],
        created(10, b"never"),
        created(19 * DAY, b"new"),
        created(10, b"ended"),
        changed(20, b"ended", "NEW", "ACTIVE"),
        changed(3 * DAY, b"ended", "ACTIVE", "END"),
        created(10, b"fine"),
        changed(20, b"fine", "NEW", "ACTIVE"),
        created(10, b"lost", server=B),
        changed(20, b"lost", "NEW", "ACTIVE", server=B),
        event(4 * DAY, E.SMP_DISCONNECTED, server=B),
        created(10, b"held", token=b"dead"),
        changed(20, b"held", "NEW", "ACTIVE", token=b"dead"),
    ]
    limits = Limits(dead_token_days=10, never_active_days=7, inactive_days=14, unreachable_days=7)
    tables = Tables(ask(rows, days=20, limits=limits))
    listed = tables["stale_subscriptions"]
    found = {bytes.fromhex(row["subscription"]): (row["status"], row["reasons"]) for row in listed}
    assert found == {
        b"never": ("NEW", "never active"),
        b"ended": ("END", "inactive too long"),
        b"lost": ("INACTIVE", "inactive too long, server unreachable"),
        b"held": ("ACTIVE", "dead token"),
    }
    assert [tuple(row.values()) for row in tables["stale_summary"]] == [
        (A, "dead token", 1),
        (A, "inactive too long", 1),
        (A, "never active", 1),
        (B, "inactive too long", 1),
        (B, "server unreachable", 1),
    ]


def test_gap_against_the_hour_of_the_week(ask: Ask) -> None:
    """100 an hour at noon on Mondays, 2 at other times; silent on the third Monday."""
    hours = [(week * 7 * 24 + hour, 100 if hour == 12 else 2) for week in range(4) for hour in range(36)]
    rows = [
        event(hour * HOUR, E.NTF_RECEIVED, server=A, count=number)
        for hour, number in hours
        if hour != 2 * 7 * 24 + 12
    ]
    (row,) = Tables(ask(rows, days=28))["incidents_gaps"]
    noon = (2 * 7 * 24 + 12) * HOUR
    assert row == {
        "server": A,
        "start": at(noon),
        "end": at(noon + HOUR),
        "received": 0,
        "expected": 100.0,
        "missed": 100.0,
    }


def test_mass_disconnect_needs_servers_and_share(ask: Ask) -> None:
    names = [f"{i}.example" for i in range(10)]
    seen = [event(d * DAY, E.SMP_CONNECTED, server=n) for d in range(3) for n in names]
    rows = [
        *seen,
        *[event(1000 + 20 * i, E.SMP_DISCONNECTED, server=names[i], changed=10) for i in range(4)],
        *[event(DAY + 1000 + 600 * i, E.SMP_DISCONNECTED, server=names[i], changed=10) for i in range(6)],
        *[event(2 * DAY + 1000 + i, E.SMP_DISCONNECTED, server=names[i], changed=10) for i in range(2)],
    ]
    (row,) = Tables(ask(rows, days=3))["incidents_disconnects"]
    assert row == {"start": at(1000), "end": at(1060), "servers": 4, "servers_seen": 10, "subscriptions": 40}


def test_a_mass_disconnect_that_goes_on_for_an_hour_is_one(ask: Ask) -> None:
    rows = [
        event(60 * m + s, E.SMP_DISCONNECTED, server=f"{s}.example", changed=1)
        for m in range(60)
        for s in range(3)
    ]
    (row,) = Tables(ask(rows))["incidents_disconnects"]
    assert (row["start"], row["end"], row["servers"], row["subscriptions"]) == (
        at(0),
        at(59 * 60 + 2),
        3,
        180,
    )


def test_restart_cost(ask: Ask) -> None:
    rows = [
        event(0, E.SERVER_STARTED, count=0),
        event(1000, E.SERVER_STOPPED),
        event(1030, E.SERVER_STARTED, writer=b"w2", count=100),
        event(1031, E.SMP_SERVICE_SUBSCRIBED, writer=b"w2", server=A, count=90, changed=90, total=100),
        event(1500, E.SMP_SERVICE_SUBSCRIBED, writer=b"w2", server=A, count=90, changed=90, total=100),
        *[{**changed(1040 + i, bytes([i]), "INACTIVE", "ACTIVE"), "writer": b"w2"} for i in range(10)],
        {**changed(1041, bytes([1]), "INACTIVE", "ACTIVE"), "writer": b"w2"},
        {**created(1035, b"fresh"), "writer": b"w2"},
        {**changed(1036, b"fresh", "NEW", "ACTIVE"), "writer": b"w2"},
    ]
    first, second = Tables(ask(rows))["incidents_restarts"]
    assert (first["start"], first["down_s"], first["clean"], first["restore_s"]) == (at(0), None, None, None)
    assert second == {
        "start": at(1030),
        "end": at(1048),
        "subscriptions": 100,
        "down_s": 30.0,
        "clean": True,
        "restore_s": 18.0,
        "daemon": None,
        "others_running": 0,
    }


def test_each_of_two_daemons_has_its_own_restarts(ask: Ask) -> None:
    rows = [
        event(0, E.SERVER_STARTED, writer=b"a1", daemon="a", uptime_us=0, count=0),
        event(10, E.SERVER_STARTED, writer=b"b1", daemon="b", uptime_us=0, count=0),
        event(1000, E.SERVER_ALIVE, writer=b"a1", daemon="a", uptime_us=1_000_000_000),
        event(1060, E.SERVER_STARTED, writer=b"a2", daemon="a", uptime_us=0, count=0),
        event(9000, E.SERVER_STOPPED, writer=b"b1", daemon="b", uptime_us=8_990_000_000),
    ]
    found = Tables(ask(rows))["incidents_restarts"]
    assert [(r["daemon"], r["down_s"], r["clean"], r["others_running"]) for r in found] == [
        ("a", None, None, 0),
        ("b", None, None, 1),
        ("a", 60.0, False, 1),
    ]


def test_capacity_by_day_and_projection(ask: Ask) -> None:
    rows = [
        *[event(d * DAY, E.TOKEN_VERIFIED, token=bytes([d])) for d in range(4)],
        *[created(d * DAY + 1, bytes([d, i]), token=bytes([d])) for d in range(4) for i in range(2)],
        event(3 * DAY + 5, E.SUB_DELETED, subscription=bytes([0, 0]), server=A),
        event(3 * DAY + 6, E.TOKEN_DELETED, token=bytes([1])),
        *[event(2 * DAY + i, E.NTF_RECEIVED, token=bytes([i % 2]), server=A) for i in range(6)],
        event(2 * DAY + 9, E.PUSH_SENT, token=bytes([0])),
    ]
    tables = Tables(ask(rows, first_day=1, days=4))
    days = tables["capacity_daily"]
    names = ("day", "tokens", "tokens_net", "subscriptions", "subscriptions_net", "notifications", "pushes")
    assert [tuple(row[n] for n in (*names, "notifications_per_token")) for row in days] == [
        (at(DAY), 2, 1, 4, 2, 0, 0, None),
        (at(2 * DAY), 3, 1, 6, 2, 6, 1, 3.0),
        (at(3 * DAY), 3, 0, 5, -1, 0, 0, None),
    ]
    projected = {r["measure"]: r for r in tables["capacity_projection"]}
    assert [row["tokens"] for row in tables["capacity_trend"]] == [1, 2, 3, 3]  # whole days of before, too
    assert projected["tokens"]["per_day"] == pytest.approx(0.7)
    assert projected["tokens"]["in_30_days"] == pytest.approx(24)
    assert projected["tokens"]["in_30_days_low"] < 24 < projected["tokens"]["in_30_days_high"]
    assert projected["subscriptions"]["now"] == 5
    assert projected["notifications"]["now"] == 2
    rate = (0 + 0 + 6 / 6 + 0) / 4
    assert projected["notifications"]["per_day"] == pytest.approx(
        rate * projected["subscriptions"]["per_day"]
    )
    assert projected["store_bytes"]["now"] == 3 * 1000 + 5 * 700


def test_a_weekend_is_no_decline(ask: Ask) -> None:
    """Subscriptions grow, and the week ends with two quiet days: nobody is about to receive nothing."""
    quiet = {5: 20, 6: 20}
    rows = [event(d * DAY, E.NTF_RECEIVED, token=b"t", server=A, count=quiet.get(d, 100)) for d in range(7)]
    rows += [created(d * DAY + 1, bytes([d, i])) for d in range(7) for i in range(2)]
    for first_day in (0, 6):
        tables = Tables(ask(rows, first_day=first_day, days=7))
        found = {r["measure"]: r for r in tables["capacity_projection"]}
        assert found["subscriptions"]["per_day"] == pytest.approx(2)
        assert found["notifications"]["per_day"] > 0
        assert found["notifications"]["in_365_days_low"] > found["notifications"]["now"]


def test_a_day_that_has_just_begun_says_nothing_about_growth(ask: Ask) -> None:
    rows = [
        event(d * DAY + i, E.NTF_RECEIVED, token=b"t", server=A, count=100 + d)
        for d in range(5)
        for i in range(1 if d == 4 else 10)
    ]
    rows += [created(d * DAY + 1, bytes([d])) for d in range(5)]
    tables = Tables(ask(rows, days=4.1))
    found = {r["measure"]: r for r in tables["capacity_projection"]}
    assert found["notifications"]["now"] == 1015
    assert found["subscriptions"]["in_365_days_low"] > 300
    few = Tables(ask(rows, days=1.5))["capacity_projection"]
    assert {r["in_30_days"] for r in few} == {None}
