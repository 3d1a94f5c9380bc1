"""Pushes of statements in the journal of a real daemon, and in the reports that Spark makes of it."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from analytics.job import ReportJob, run_reports
from analytics.times import DAY_US
from ntf_demo.fake_push.faults import Fault
from ntf_demo.statement_gateway import gateway_parts, key_pair, signed_statement
from ntf_server.clock import SystemClock
from ntf_server.setup import JOURNAL_FOLDER
from store.journal_schema import CALL_PUSH, CONTRACT, GIVEN_COLUMNS, STATEMENT_PUSH, JournalEvent
from tests.waiting import until

ALICE = key_pair("alice")
TOPIC = b"t" * 32
DEVICES: dict[str, dict[str, Any]] = {
    "apns": {"token": "a1" * 32},
    "voip": {"token": "b2" * 32},
    "fcm": {"token": "fcm:call", "call": True},
}


async def live(folder: Path) -> None:
    """Two statements for an alert and two calls each, and one more that the provider refuses to show."""
    async with gateway_parts(folder) as world:
        world.config = replace(world.config, JOURNAL=replace(world.config.JOURNAL, enabled=True))
        async with world.serving():
            bob = world.client("bob")
            for kind, device in DEVICES.items():
                await bob.allow(await bob.register(kind, **device), (ALICE[0], TOPIC))
            for number in range(2):
                await world.node.submit(signed_statement(ALICE, TOPIC, data=b"%d" % number))
            await until(lambda: len(world.accepted) == 6)
            alerts = DEVICES["apns"]["token"]
            world.push.add_fault(Fault(token=alerts, status=413, reason="PayloadTooLarge"))
            await world.node.submit(signed_statement(ALICE, TOPIC, data=b"refused"))
            await until(lambda: len(world.push.pushes) == 9)


def test_reports_count_statements_and_calls(tmp_path: Path, spark: SparkSession) -> None:
    asyncio.run(live(tmp_path))
    journal, out = tmp_path / "data" / JOURNAL_FOLDER, tmp_path / "out"
    rows = [
        row
        for path in sorted(journal.glob("date=*/*.parquet"))
        for row in pq.read_table(path, partitioning=None).to_pylist()
    ]
    pushed = [row for row in rows if row["kind"] is not None]
    assert Counter((row["event"], row["kind"]) for row in pushed) == {
        (JournalEvent.PUSH_SENT, STATEMENT_PUSH): 2,
        (JournalEvent.PUSH_SENT, CALL_PUSH): 6,
        (JournalEvent.PUSH_FAILED, STATEMENT_PUSH): 1,
    }
    for row in pushed:
        given = frozenset(name for name in GIVEN_COLUMNS if row[name] is not None)
        assert CONTRACT[JournalEvent(row["event"])].allows(given), row
    now = int(SystemClock().now() * 1_000_000) + DAY_US
    job = ReportJob(names=["delivery"], journal=str(journal), out=f"file://{out}", now=now)
    run_reports(spark, job, lambda step: None)
    assert (out / "delivery_kinds.csv").read_text().splitlines() == [
        "kind,sent,failed,retried",
        f"{CALL_PUSH},6,0,0",
        f"{STATEMENT_PUSH},2,1,0",
    ]
