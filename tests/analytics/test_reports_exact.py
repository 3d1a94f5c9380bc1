"""Each report function on data small enough to work out by hand."""

import pytest

from analytics.inputs import Limits
from analytics.reports import capacity, delivery, health, incidents, stale, tokens
from analytics.times import DAY_US
from store.journal_schema import JournalEvent as E
from tests.analytics.conftest import START_US, MakeInputs, Row, at, collected, event

HOUR = 3600.0
DAY = 24 * HOUR
A, B = "a.example", "b.example"


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


def test_health_counts_statuses_and_names_reasons(make_inputs: MakeInputs) -> None:
    rows = [
        event(0, E.SMP_CONNECTED, server=A),
        *[created(10, s) for s in (b"1", b"2", b"3", b"4")],
        *[changed(20, s, "NEW", "ACTIVE") for s in (b"1", b"2", b"3")],
        changed(100, b"1", "ACTIVE", "END"),
        changed(200, b"2", "ACTIVE", "INACTIVE"),
        changed(300, b"2", "INACTIVE", "ACTIVE"),
        event(400, E.SUB_DELETED, subscription=b"3", server=A),
        event(500, E.SMP_DRIFT, server=A, count=7, expected=10),
        event(510, E.SMP_HEALED, server=A, count=3),
        event(600, E.SMP_SERVICE_SUBSCRIBED, server=A, count=1, total=4),
    ]
    (row,) = collected(health.server_health(make_inputs(rows)))
    assert {
        k: row[k] for k in ("server", "subscriptions", "active", "end", "pending", "inactive", "error")
    } == {
        "server": A,
        "subscriptions": 3,
        "active": 1,
        "end": 1,
        "pending": 1,
        "inactive": 0,
        "error": 0,
    }
    assert row["active_share"] == pytest.approx(1 / 3)
    assert (row["flaps"], row["drift_events"], row["drift_size"], row["healed_events"]) == (2, 1, 3, 1)
    assert row["service_coverage"] == 0.25
    assert row["seconds_since_active"] == 0
    assert row["reasons"] == "not active, flapping, drift"
    assert row["score"] == pytest.approx(100 - 60 * 2 / 3 - 5 * 2 / 3 - 1)


def test_health_disconnection_makes_active_subscriptions_inactive(make_inputs: MakeInputs) -> None:
    rows = [
        event(0, E.SMP_CONNECTED, server=A),
        event(0, E.SMP_CONNECTED, server=B),
        created(1, b"1"),
        changed(2, b"1", "NEW", "ACTIVE"),
        created(1, b"2", server=B),
        changed(2, b"2", "NEW", "ACTIVE", server=B),
        event(3600, E.SMP_DISCONNECTED, server=A, changed=1),
        event(3600, E.SMP_DISCONNECTED, server=B, changed=1),
        event(3720, E.SMP_CONNECTED, server=B),
        event(3721, E.SMP_SERVICE_SUBSCRIBED, server=B, count=1, total=1),
    ]
    first, second = collected(health.server_health(make_inputs(rows, days=1)))
    assert (first["server"], first["inactive"], first["active"]) == (A, 1, 0)
    assert first["seconds_since_active"] == DAY - 3600
    assert (first["disconnects"], first["recoveries"], first["mean_recover_s"]) == (1, 0, None)
    assert (second["server"], second["inactive"], second["active"]) == (B, 0, 1)
    assert (second["recoveries"], second["mean_recover_s"], second["service_coverage"]) == (1, 120.0, 1.0)
    assert second["score"] == pytest.approx(100 - 1 - 2)
    assert second["reasons"] == "disconnects, slow to recover"


def test_health_of_a_server_known_only_by_its_disconnections(make_inputs: MakeInputs) -> None:
    (row,) = collected(health.server_health(make_inputs([event(1, E.SMP_DISCONNECTED, server=A)])))
    assert (row["subscriptions"], row["active_share"], row["seconds_since_active"]) == (0, None, None)
    assert row["score"] == 99


def test_delivery_rates_and_percentiles(make_inputs: MakeInputs) -> None:
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
    inputs = make_inputs(rows)
    (row,) = collected(delivery.by_provider(inputs))
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
        "latency_us_p50": 3000,
        "latency_us_p95": 8000,
        "latency_us_p99": 8800,
    }
    first, second = collected(delivery.latency(inputs, "hour", "provider", "server"))
    assert (first["hour"], first["server"], first["pushes"], first["entries"]) == (at(0), A, 4, 5)
    assert (first["latency_us_p50"], first["latency_us_p95"], first["latency_us_p99"]) == (2500, 3850, 3970)
    assert (second["hour"], second["server"], second["latency_us_p99"]) == (at(HOUR), B, 9000)
    assert [
        (r["outcome"], r["error"], r["pushes"], r["share"]) for r in collected(delivery.errors(inputs))
    ] == [
        ("push_failed", "TIMEOUT", 1, 0.125),
        ("push_retried", "TIMEOUT", 1, 0.125),
        ("push_retried", "unknown", 1, 0.125),
    ]


def test_token_funnel(make_inputs: MakeInputs) -> None:
    rows = [
        event(0, E.TOKEN_REGISTERED, token=b"1"),
        event(2, E.TOKEN_CONFIRMED, token=b"1"),
        event(12, E.TOKEN_VERIFIED, token=b"1"),
        event(100, E.TOKEN_REGISTERED, token=b"2"),
        event(104, E.TOKEN_CONFIRMED, token=b"2"),
        event(200, E.TOKEN_REGISTERED, token=b"3"),
        event(300, E.TOKEN_REGISTERED, token=b"1"),
    ]
    found = [tuple(row.values()) for row in collected(tokens.funnel(make_inputs(rows)))]
    assert found == [
        ("registered", 3, 1.0, None, None),
        ("confirmed", 2, pytest.approx(2 / 3), 3.0, pytest.approx(3.9)),
        ("active", 1, pytest.approx(1 / 3), 10.0, 10.0),
    ]


def test_token_churn_fills_days_and_starts_with_what_was_before(make_inputs: MakeInputs) -> None:
    rows = [
        event(0, E.TOKEN_VERIFIED, token=b"1"),
        event(1, E.TOKEN_VERIFIED, token=b"2"),
        event(2, E.TOKEN_VERIFIED, token=b"2"),
        event(DAY, E.TOKEN_INVALID, token=b"1", provider="AP", error="UNREGISTERED"),
        event(DAY + 1, E.TOKEN_REPLACED, token=b"2"),
        event(3 * DAY, E.TOKEN_VERIFIED, token=b"2"),
        event(3 * DAY + 5, E.TOKEN_DELETED, token=b"2"),
    ]
    inputs = make_inputs(rows, first_day=1, days=4)
    found = collected(tokens.churn(inputs))
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
    assert [tuple(r.values()) for r in collected(tokens.invalid_reasons(inputs))] == [
        ("AP", "UNREGISTERED", 1, 1.0)
    ]


def test_dead_tokens_and_what_they_hold(make_inputs: MakeInputs) -> None:
    rows = [
        *[event(0, E.TOKEN_VERIFIED, token=t, provider="AP") for t in (b"1", b"2", b"3", b"4")],
        event(DAY, E.PUSH_SENT, token=b"1", provider="AP"),
        event(5 * DAY, E.CRON_SENT, token=b"2", provider="AP"),
        event(5 * DAY, E.TOKEN_DELETED, token=b"4", provider="AP"),
        created(10, b"a", token=b"1"),
        created(10, b"b", token=b"1"),
        event(20, E.SUB_DELETED, subscription=b"b", server=A),
    ]
    found = collected(tokens.dead(make_inputs(rows, days=8, limits=Limits(dead_token_days=7))))
    names = ("token", "last_event", "last_push", "silent_days", "subscriptions")
    assert [tuple(row[n] for n in names) for row in found] == [
        (b"1".hex(), "token_verified", at(DAY), 7.0, 1),
        (b"3".hex(), "token_verified", None, 8.0, 0),
    ]


def test_stale_subscriptions_have_all_their_reasons(make_inputs: MakeInputs) -> None:
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
    inputs = make_inputs(rows, days=20, limits=limits)
    listed = stale.stale_subscriptions(inputs)
    found = {bytes.fromhex(row["subscription"]): (row["status"], row["reasons"]) for row in collected(listed)}
    assert found == {
        b"never": ("NEW", "never active"),
        b"ended": ("END", "inactive too long"),
        b"lost": ("INACTIVE", "inactive too long, server unreachable"),
        b"held": ("ACTIVE", "dead token"),
    }
    assert [tuple(row.values()) for row in collected(stale.summary(listed))] == [
        (A, "dead token", 1),
        (A, "inactive too long", 1),
        (A, "never active", 1),
        (B, "inactive too long", 1),
        (B, "server unreachable", 1),
    ]


def test_gap_against_the_hour_of_the_week(make_inputs: MakeInputs) -> None:
    """100 an hour at noon on Mondays, 2 at other times; silent on the third Monday."""
    hours = [(week * 7 * 24 + hour, 100 if hour == 12 else 2) for week in range(4) for hour in range(36)]
    rows = [
        event(hour * HOUR, E.NTF_RECEIVED, server=A, count=number)
        for hour, number in hours
        if hour != 2 * 7 * 24 + 12
    ]
    (row,) = collected(incidents.gaps(make_inputs(rows, days=28)))
    noon = (2 * 7 * 24 + 12) * HOUR
    assert row == {
        "server": A,
        "start": at(noon),
        "end": at(noon + HOUR),
        "received": 0,
        "expected": 100.0,
        "missed": 100.0,
    }


def test_mass_disconnect_needs_servers_and_share(make_inputs: MakeInputs) -> None:
    names = [f"{i}.example" for i in range(10)]
    seen = [event(d * DAY, E.SMP_CONNECTED, server=n) for d in range(3) for n in names]
    rows = [
        *seen,
        *[event(1000 + 20 * i, E.SMP_DISCONNECTED, server=names[i], changed=10) for i in range(4)],
        *[event(DAY + 1000 + 600 * i, E.SMP_DISCONNECTED, server=names[i], changed=10) for i in range(6)],
        *[event(2 * DAY + 1000 + i, E.SMP_DISCONNECTED, server=names[i], changed=10) for i in range(2)],
    ]
    (row,) = collected(incidents.mass_disconnects(make_inputs(rows, days=3)))
    assert row == {"start": at(1000), "end": at(1060), "servers": 4, "servers_seen": 10, "subscriptions": 40}


def test_a_mass_disconnect_that_goes_on_for_an_hour_is_one(make_inputs: MakeInputs) -> None:
    rows = [
        event(60 * m + s, E.SMP_DISCONNECTED, server=f"{s}.example", changed=1)
        for m in range(60)
        for s in range(3)
    ]
    (row,) = collected(incidents.mass_disconnects(make_inputs(rows)))
    assert (row["start"], row["end"], row["servers"], row["subscriptions"]) == (
        at(0),
        at(59 * 60 + 2),
        3,
        180,
    )


def test_our_own_stop_is_no_mass_disconnect(make_inputs: MakeInputs) -> None:
    rows = [event(1000 + i, E.SMP_DISCONNECTED, server=f"{i}.example", changed=1) for i in range(5)]
    assert collected(incidents.mass_disconnects(make_inputs([*rows, event(1010, E.SERVER_STOPPED)]))) == []


def test_restart_cost(make_inputs: MakeInputs) -> None:
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
    first, second = collected(incidents.restarts(make_inputs(rows)))
    assert (first["start"], first["down_s"], first["clean"], first["restore_s"]) == (at(0), None, None, None)
    assert second == {
        "start": at(1030),
        "end": at(1048),
        "subscriptions": 100,
        "down_s": 30.0,
        "clean": True,
        "restore_s": 18.0,
    }


def test_capacity_by_day_and_projection(make_inputs: MakeInputs) -> None:
    rows = [
        *[event(d * DAY, E.TOKEN_VERIFIED, token=bytes([d])) for d in range(4)],
        *[created(d * DAY + 1, bytes([d, i]), token=bytes([d])) for d in range(4) for i in range(2)],
        event(3 * DAY + 5, E.SUB_DELETED, subscription=bytes([0, 0]), server=A),
        event(3 * DAY + 6, E.TOKEN_DELETED, token=bytes([1])),
        *[event(2 * DAY + i, E.NTF_RECEIVED, token=bytes([i % 2]), server=A) for i in range(6)],
        event(2 * DAY + 9, E.PUSH_SENT, token=bytes([0])),
    ]
    inputs = make_inputs(rows, first_day=1, days=4)
    days = capacity.daily(inputs)
    names = ("day", "tokens", "tokens_net", "subscriptions", "subscriptions_net", "notifications", "pushes")
    assert [tuple(row[n] for n in (*names, "notifications_per_token")) for row in collected(days)] == [
        (at(DAY), 2, 1, 4, 2, 0, 0, None),
        (at(2 * DAY), 3, 1, 6, 2, 6, 1, 3.0),
        (at(3 * DAY), 3, 0, 5, -1, 0, 0, None),
    ]
    projected = {r["measure"]: r for r in collected(capacity.projection(days, START_US + DAY_US))}
    assert projected["tokens"]["per_day"] == 0.5
    assert projected["tokens"]["in_30_days"] == 18
    assert projected["subscriptions"]["now"] == 5
    assert projected["notifications"]["per_day"] == 0
    assert projected["store_bytes"]["now"] == 3 * 1000 + 5 * 700
