"""Every report over a journal that a real daemon wrote, in which every fault was planted."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from analytics.__main__ import to_us
from analytics.files import LocalFolder
from analytics.findings import Thresholds, find
from analytics.generator import Plan, write_journal
from analytics.results import Rows
from analytics.rollups import update_rollups
from analytics.times import DAY_US
from ntf_demo.fake_push.faults import Fault
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server import daemon_life, housekeeping, periodic, router
from ntf_server.app import App, running
from ntf_server.journal import Journal
from ntf_server.push import lanes
from ntf_server.push.composing import MAX_ENTRIES
from ntf_server.router_session import HEALED
from ntf_server.setup import DATABASE, JOURNAL_FOLDER
from protocol.device_token import ApnsToken, Provider
from protocol.errors import CMD_PROHIBITED, SERVICE
from protocol.ntf_commands import MIN_CRON_MINUTES, Ok, Sdel, Tcrn, Tdel, Trpl
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.journal_schema import CONTRACT, GIVEN_COLUMNS, JournalEvent
from store.journal_schema import JournalEvent as E
from tests.analytics.conftest import Tables, warehouse_of
from tests.ntf_server.conftest import changed, code_of, make_app
from tests.ntf_server.life import Life, journal_config
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.waiting import DEADLINE, until

QUEUES = 20
LOST = 8
BEAT = 3
"Events of one sign of life: that it lives, and of its router how many are subscribed and how many wait."
NOTHING_OF_IT = {
    "tokens_dead",
    "stale_subscriptions",
    "stale_summary",
    "incidents_gaps",
    "incidents_disconnects",
    "incidents_refused",
    "incidents_tokens",
    "capacity_trend",
}
"Tables that stay empty in so short a life, with one router."
Columns = dict[str, set[frozenset[str]]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_life, "ALIVE_INTERVAL", 0.2)
    monkeypatch.setattr(daemon_life, "BEATS_PER_SAMPLE", 1)
    monkeypatch.setattr(housekeeping, "INTERVAL", 0.2)
    monkeypatch.setattr(router, "FIRST_DELAY", 0.05)
    monkeypatch.setattr(periodic, "SHORTEST_PAUSE", 0.1)
    monkeypatch.setattr(periodic, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(lanes, "FAILURES", 1)
    monkeypatch.setattr(lanes, "FIRST_PAUSE", 0.1)


async def live_tokens(life: Life) -> Device:
    """TNEW, TVFY, a second registration, TRPL, TDEL, purge; returns a device that stays.

    Some of those that go have a subscription, which goes with them.
    """
    first_queue, deleted_queue = life.router.load.create_queues(2)
    first = await life.active()
    await life.subscribe(first, first_queue)
    assert isinstance(first.token, ApnsToken)
    second = await life.active(first.token.token)  # the device with another key: the first token goes
    replaced = await life.active()
    replaced.token = ApnsToken(Provider.APNS_TEST, os.urandom(32).hex().encode())
    assert await replaced.ask(life.client, Trpl(replaced.token)) == Ok()
    await life.confirmed(replaced)
    await replaced.verify(life.client, await code_of(life.app, replaced))
    deleted = await life.active()
    await life.subscribe(deleted, deleted_queue)
    await until(lambda: life.count("ACTIVE") == 1)
    assert await deleted.ask(life.client, Tdel()) == Ok()
    forgotten = await life.register()
    life.sql("UPDATE tokens SET updated_on = 0 WHERE token_id = ?", forgotten.token_id)
    await until(lambda: not life.sql("SELECT 1 FROM tokens WHERE token_id = ?", forgotten.token_id))
    assert second.token_id != first.token_id
    return replaced


async def live_subscriptions(life: Life, device: Device) -> list[LoadQueue]:
    """SNEW, SDEL, END, DELD, AUTH, ERR; returns queues that stay."""
    queues = life.router.load.create_queues(QUEUES + 3)
    ids = [await life.subscribe(device, queue) for queue in queues]
    await until(lambda: life.count("ACTIVE") == len(ids))
    names = ("ended", "deleted at the router", "deleted")
    life.subs |= dict(zip(names, ids[-3:], strict=True))
    life.router.faults.send_end([queues[-3].notifier_id])
    life.router.faults.send_deld([queues[-2].notifier_id])
    assert await life.client.ask(Sdel(), life.subs["deleted"], device.key) == Ok()
    (unknown, failing) = life.router.load.create_queues(2)
    life.router.faults.delete_queues([unknown.notifier_id])
    life.subs["refused"] = await life.subscribe(device, unknown)
    await until(lambda: life.state("refused") == "AUTH")
    life.router.faults.answer_errors("NSUB", CMD_PROHIBITED)
    life.subs["failed"] = await life.subscribe(device, failing)
    await until(lambda: life.state("failed") == "ERR")
    life.router.faults.answer_errors("NSUB", None)
    await until(lambda: life.state("ended") == "END" and life.state("deleted at the router") == "DELETED")
    return queues[:-3]


async def live_routers(life: Life, queues: list[LoadQueue]) -> None:
    """Associations are lost and healed; the service is refused and starts afresh."""
    wanted = {queue.notifier_id for queue in queues}

    def all_back() -> bool:
        return wanted <= life.router.subscribed_notifiers() and life.count("ACTIVE") == QUEUES

    healed = HEALED._value.get()
    life.router.faults.lose_associations(LOST)
    life.router.faults.drop_connections()
    await until(lambda: HEALED._value.get() > healed)
    await until(all_back)
    life.router.faults.answer_errors("NSUBS", SERVICE, count=1)
    life.router.faults.drop_connections()
    await until(lambda: not all_back())
    await until(all_back)


async def live_pushes(life: Life, device: Device, queues: list[LoadQueue]) -> None:
    """Pushes are accepted, given up, held back by a provider that is down, more than fit, and periodic; in
    the end the device is gone."""
    before = len(life.push.pushes)
    await life.router.load.emit(queues[:1], 1)
    await until(lambda: len(life.push.pushes) > before)
    too_large = Fault(status=413, reason="PayloadTooLarge", count=1)
    life.push.add_fault(too_large)
    await life.router.load.emit(queues[1:2], 1, fresh=True)
    await until(lambda: too_large.count == 0)
    down = Fault(status=503, reason="ServiceUnavailable", count=1)
    life.push.add_fault(down)
    await life.router.load.emit(queues, len(queues), fresh=True)
    await until(lambda: down.count == 0)
    await until(lambda: not life.sql("SELECT 1 FROM unsent_notifications"))
    assert await device.ask(life.client, Tcrn(MIN_CRON_MINUTES)) == Ok()
    life.sql("UPDATE tokens SET cron_due = 1 WHERE token_id = ?", device.token_id)
    await until(lambda: any("checkMessages" in push.body for push in life.push.pushes))
    life.push.add_fault(Fault(status=410, reason="Unregistered"))
    await life.router.load.emit(queues[2:3], 1, fresh=True)
    await until(lambda: life.sql("SELECT 1 FROM tokens WHERE status LIKE 'INVALID%'"))


def lose_an_event(life: Life) -> None:
    """One that cannot be written: the name of its provider is a number."""
    life.app._journal.record(E.PROVIDER_DOWN, provider=1, error="down")  # type: ignore[arg-type]


@pytest.fixture
async def written(tmp_path: Path, quick: None) -> Path:
    """The journal of two runs of a daemon."""
    async with Router.start() as smp, FakePushServer(FakePushConfig(folder=tmp_path / "push")) as push:
        config = changed(journal_config(tmp_path, push), PUSH={"padding": 1024})
        async with running(make_app(tmp_path, config)) as app:
            client = await NtfClient.open(app.address)
            life = Life(app, client, smp, push, tmp_path / "data" / DATABASE)
            device = await live_tokens(life)
            queues = await live_subscriptions(life, device)
            await live_routers(life, queues)
            lose_an_event(life)
            await live_pushes(life, device, queues)
            await two_beats(app)
            client.close()
        async with running(make_app(tmp_path, config)) as again:
            wanted = {queue.notifier_id for queue in queues}
            await until(lambda: wanted <= smp.subscribed_notifiers())
            await until(lambda: life.count("ACTIVE") == QUEUES)
            await until(lambda: [status.subscribed for status in again.subscriber.status()] == [True])
    return tmp_path / "data" / JOURNAL_FOLDER


async def two_beats(app: App) -> None:
    """How it is in the end is told."""
    journal = app._journal
    assert isinstance(journal, Journal)
    recorded = journal.recorded
    await until(lambda: journal.recorded > recorded + 2 * BEAT)


def rows_of(journal: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path, partitioning=None) for path in sorted(journal.glob("date=*/*.parquet"))]
    return list(pa.concat_tables(tables).to_pylist())


def columns_of(rows: list[dict[str, Any]]) -> Columns:
    """Which columns each kind of event was seen with."""
    seen: Columns = {}
    for row in rows:
        given = frozenset(name for name in GIVEN_COLUMNS if row[name] is not None)
        seen.setdefault(row["event"], set()).add(given)
    return seen


def report_on(spark: SparkSession, journal: Path, folder: Path, *, days_later: int = 0) -> dict[str, Rows]:
    """All tables, up to the last event or to some days later."""
    checked = update_rollups(spark, LocalFolder(str(journal)), LocalFolder(str(folder)), lambda _: None)
    assert (checked.bad, checked.rows) == ([], len(rows_of(journal)))
    last = to_us(max(row["time"] for row in rows_of(journal)))
    later = last + days_later * DAY_US
    warehouse = warehouse_of(spark, folder, now_us=later + 1, end=later + 1 if days_later else None)
    assert warehouse.notes == []
    return dict(Tables(warehouse))


def check_tokens(tables: dict[str, Rows]) -> None:
    assert [(r["stage"], r["tokens"]) for r in tables["tokens_funnel"]] == [
        ("registered", 5),
        ("confirmed", 5),
        ("active", 4),
    ]
    (day,) = tables["tokens_churn"][-1:]
    assert (day["replaced"], day["deleted"], day["invalid"], day["active_at_end"]) == (1, 3, 1, 1)
    assert {(r["reason"], r["tokens"]) for r in tables["tokens_deleted"]} == {
        ("requested", 1),
        ("superseded", 1),
        ("purged", 1),
    }
    assert [(r["reason"], r["tokens"]) for r in tables["tokens_invalid"]] == [("UNREGISTERED", 1)]


def check_routers(tables: dict[str, Rows]) -> None:
    (row,) = tables["health"]
    counts = {
        name: row[name] for name in ("subscriptions", "active", "ended", "deleted", "auth", "error", "lost")
    }
    assert counts == {
        "subscriptions": QUEUES + 4,
        "active": QUEUES,
        "ended": 1,
        "deleted": 1,
        "auth": 1,
        "error": 1,
        "lost": 0,
    }
    assert row["drift_size"] >= LOST - 2
    kinds = Counter(outage["kind"] for outage in tables["health_outages"])
    assert kinds["disconnected"] >= 1
    assert kinds["service reset"] == 1
    (lost,) = [outage for outage in tables["health_outages"] if outage["kind"] == "lost"]
    assert LOST - 2 <= lost["subscriptions"] <= LOST  # some may be none of ours any more
    assert lost["heal_s"] < DEADLINE
    assert not any(outage["is_open"] for outage in tables["health_outages"])
    assert tables["health_hours"][-1]["received"] >= 2


def check_pushes(tables: dict[str, Rows]) -> None:
    (provider,) = tables["delivery_providers"]
    assert provider["sent"] >= 1 + QUEUES // MAX_ENTRIES
    assert (provider["failed"], provider["retried"], provider["periodic"]) == (1, 1, 1)
    assert provider["entries"] == 1 + QUEUES  # one was given up, one came when the device was gone
    assert provider["coalesced"] > 0
    assert provider["trimmed"] > 0
    assert provider["latency_ms_p50"] > 0
    assert {(r["outcome"], r["error"]) for r in tables["delivery_errors"]} == {
        ("push_failed", "refused"),
        ("push_retried", "provider"),
    }
    (outage,) = tables["incidents_providers"]
    assert (outage["reason"], outage["is_open"]) == ("down", False)


def check_long_after(tables: dict[str, Rows]) -> None:
    """What is gone never becomes stale: dead and stale is what the store still has."""
    dead = {(row["last_event"], row["subscriptions"]) for row in tables["tokens_dead"]}
    assert dead == {("token_invalid", QUEUES + 4), ("token_verified", 0)}
    assert {(row["reason"], row["subscriptions"]) for row in tables["stale_summary"]} == {
        ("dead token", QUEUES + 4),
        ("inactive too long", 2),
        ("never active", 2),
    }
    (day,) = tables["capacity_daily"][-1:]
    assert (day["subscriptions"], day["tokens"]) == (QUEUES + 4, 1)


async def test_every_report_over_the_whole_life_of_tokens_and_subscriptions(
    spark: SparkSession, written: Path, tmp_path: Path
) -> None:
    rows = rows_of(written)
    gone = {(row["error"], row["count"]) for row in rows if row["event"] == E.TOKEN_DELETED}
    assert gone == {("superseded", 1), ("requested", 1), ("purged", 0)}  # with so many subscriptions
    check_long_after(report_on(spark, written, tmp_path / "later", days_later=60))
    tables = report_on(spark, written, tmp_path / "rollups")
    check_tokens(tables)
    check_routers(tables)
    check_pushes(tables)
    assert {name for name, rows in tables.items() if not rows} == NOTHING_OF_IT
    first, second = tables["incidents_restarts"]
    assert (first["clean"], second["clean"], first["daemon"]) == (None, True, second["daemon"])
    assert second["subscriptions"] == QUEUES
    assert second["restore_s"] is not None
    assert [(r["reason"], r["events"]) for r in tables["incidents_losses"]] == [("rejected", 1)]
    (day,) = tables["capacity_daily"][-1:]
    assert (day["subscriptions"], day["tokens"]) == (QUEUES + 4, 1)
    sentences = [finding.text for finding in find(tables, Thresholds())]
    assert any(" lost " in sentence and "healed after" in sentence for sentence in sentences)
    assert any("refused our service" in sentence for sentence in sentences)


async def test_the_generator_writes_what_the_daemon_writes(written: Path, tmp_path: Path) -> None:
    daemons = columns_of(rows_of(written))
    plan = Plan(seed=3, events=200_000, days=12, servers=3, gaps=0, mass_disconnects=1, restarts=2)
    write_journal(plan, tmp_path / "generated")
    generated = columns_of(rows_of(tmp_path / "generated"))
    for seen in (daemons, generated):
        for event, shapes in seen.items():
            contract = CONTRACT[JournalEvent(event)]
            assert all(contract.allows(shape) for shape in shapes), event
    assert daemons == generated
    assert set(daemons) == {event.value for event in JournalEvent}
