"""Every incident the generator planted is found, and none is invented."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from analytics.generator import Plan, write_journal
from analytics.inputs import Inputs, Window
from analytics.reports import incidents
from analytics.schema import EVENTS

SEEDS = range(20)


def found(inputs: Inputs) -> dict[str, list[tuple[Any, ...]]]:
    """All three kinds in one query: twenty seeds take a third of the time."""
    columns = {
        "gaps": ("server", "start", "end"),
        "disconnects": ("servers", "start", "subscriptions"),
        "restarts": ("start", "subscriptions", "clean", "down_s", "restore_s"),
    }
    tables = incidents.tables(inputs)
    parts = [
        tables[f"incidents_{kind}"].select(
            F.lit(kind).alias("kind"),
            F.to_json(F.struct(*[as_number(name) for name in names])).alias("facts"),
        )
        for kind, names in columns.items()
    ]
    result: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in columns}
    for row in (
        parts[0]
        .unionByName(parts[1])
        .unionByName(parts[2])
        .select("kind", F.from_json("facts", FACTS))
        .collect()
    ):
        facts = row[1].asDict()
        result[row.kind].append(tuple(facts[name] for name in columns[row.kind]))
    return {kind: sorted(rows) for kind, rows in result.items()}


FACTS = (
    "server string, start bigint, end bigint, servers bigint, subscriptions bigint, clean boolean, "
    "down_s double, restore_s double"
)


def as_number(name: str) -> Any:
    return F.unix_micros(name).alias(name) if name in ("start", "end") else F.col(name)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_planted_incidents_and_no_other(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    plan = Plan(
        seed=seed,
        events=130_000,
        days=22,
        servers=4 if seed % 2 else 3,
        gaps=2,
        mass_disconnects=1,
        restarts=1,
    )
    answers = write_journal(plan, tmp_path)
    assert answers.gaps, "nothing was planted"
    events = spark.read.schema(EVENTS).parquet(str(tmp_path)).persist()
    try:
        seen = found(Inputs(events, events, Window(plan.start_us + 1, plan.end_us)))
    finally:
        events.unpersist()
    assert seen == {
        "gaps": sorted((gap["server"], gap["start_us"], gap["end_us"]) for gap in answers.gaps),
        "disconnects": sorted(
            (m["servers"], m["start_us"], m["subscriptions"]) for m in answers.mass_disconnects
        ),
        "restarts": sorted(
            (r["start_us"], r["subscriptions"], r["clean"], r["down_us"] / 1e6, r["restore_us"] / 1e6)
            for r in answers.restarts
        ),
    }
