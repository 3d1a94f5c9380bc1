"""Every incident the generator planted is found and none is invented, for several seeds."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from analytics.generator import Answers, Plan, write_journal
from analytics.warehouse import Warehouse
from tests.analytics.conftest import Tables, warehouse_of
from tests.analytics.rollup_reference import write_rollups

SEEDS = range(4)
DENSE = 0
"The seed of a journal with enough notifications for silent hours to be noticed."
DAYS = 22  # three of each hour of the week


def plant(spark: SparkSession, root: Path, seed: int, *, events: int, gaps: int) -> tuple[Warehouse, Answers]:
    """A journal with planted incidents, and the answers."""
    sizes: dict[str, Any] = {
        "events": events,
        "gaps": gaps,
        "servers": 3 + seed % 2,
        "restarts": 1 + seed % 2,
    }
    answers = write_journal(Plan(seed=seed, days=DAYS, mass_disconnects=1, **sizes), root / "journal")
    write_rollups([f"{root}/journal/*/*.parquet"], root / "rollups")
    return warehouse_of(spark, root / "rollups"), answers


@pytest.mark.parametrize("seed", SEEDS)
def test_planted_incidents(spark: SparkSession, seed: int, tmp_path: Path) -> None:
    warehouse, answers = plant(spark, tmp_path, seed, events=220_000 if seed == DENSE else 6_000, gaps=2)
    found = Tables(warehouse)
    assert warehouse.notes == []
    assert bool(answers.gaps) is (seed == DENSE)
    assert sorted((row["server"], row["start"], row["end"]) for row in found["incidents_gaps"]) == sorted(
        (gap["server"], gap["start_us"], gap["end_us"]) for gap in answers.gaps
    )
    assert [
        (r["start"], r["end"], r["servers"], r["subscriptions"]) for r in found["incidents_disconnects"]
    ] == [(m["start_us"], m["end_us"], m["servers"], m["subscriptions"]) for m in answers.mass_disconnects]
    again = found["incidents_restarts"][1:]
    assert [(r["start"], r["subscriptions"], r["clean"], r["down_s"], r["restore_s"]) for r in again] == [
        (r["start_us"], r["subscriptions"], r["clean"], r["down_us"] / 1e6, r["restore_us"] / 1e6)
        for r in sorted(answers.restarts, key=lambda r: int(r["start_us"]))
    ]
    assert [(r["provider"], r["start"], r["end"], r["waited"]) for r in found["incidents_providers"]] == [
        (o["provider"], o["start_us"], o["end_us"], o["waited"]) for o in answers.provider_outages
    ]
    assert found["incidents_refused"] == found["incidents_tokens"] == []
    outages = Tables(warehouse)["health_outages"]
    assert not any(row["is_open"] for row in outages)
    assert {row["kind"] for row in outages} <= {"disconnected", "lost", "service reset"}
