"""Every incident the generator planted is found and none is invented, for twenty seeds.

Twenty Spark runs would take minutes, so all seeds go into one journal. Each gets its own servers and its
own weeks: what is looked at server by server or day by day then comes out as for a journal alone. Only the
baseline of gaps needs all seeds to end at the same time; there the weeks are laid over each other again.
"""

from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import Inputs, Window
from analytics.reports import incidents
from analytics.schema import EVENTS
from analytics.times import DAY_US
from tests.analytics.conftest import START, START_US, collected

SEEDS = range(20)
WEEKS = 4
SPACING = timedelta(weeks=WEEKS)
SPACING_US = 7 * WEEKS * DAY_US
DAYS = 22  # three of each hour of the week


Planted = tuple[DataFrame, dict[int, Answers]]


def plant(spark: SparkSession, root: Path, *, events: int, gaps: int) -> Planted:
    """One journal of all seeds, with a column `seed`, and the answers."""
    answers = {}
    for seed in SEEDS:
        start: date = START.date() + seed * SPACING
        sizes = {"events": events, "gaps": gaps, "servers": 3 + seed % 2, "restarts": 1 + seed % 2}
        plan = Plan(seed=seed, days=DAYS, start=start.isoformat(), mass_disconnects=1, **sizes)
        answers[seed] = write_journal(plan, root / f"seed={seed}")
    reader = (
        spark.read.schema(EVENTS).option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet")
    )
    seed_of_file = F.regexp_extract("_metadata.file_path", "/seed=([0-9]+)/", 1).cast("int")
    rows = reader.parquet(str(root)).withColumn("seed", seed_of_file)
    return rows.withColumn("server", F.concat("seed", F.lit("/"), "server")), answers


@pytest.fixture(scope="module")
def small(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Too few notifications for gaps, enough for everything else."""
    return plant(spark, tmp_path_factory.mktemp("small"), events=6_000, gaps=0)


def window(weeks: int) -> Window:
    return Window(START_US, START_US + weeks * 7 * DAY_US)


def test_gaps(spark: SparkSession, tmp_path: Path) -> None:
    events, planted = plant(spark, tmp_path, events=130_000, gaps=2)
    same_weeks = F.timestamp_micros(F.unix_micros("time") - F.col("seed") * F.lit(SPACING_US))
    received = events.where("event = 'ntf_received'")
    # One event with a count stands for an hour's: the report looks at whole hours only.
    hours = received.groupBy("event", "server", F.date_trunc("hour", same_weeks).alias("time"))
    laid_over = hours.agg(F.count("*").alias("count")).persist()
    found = collected(incidents.gaps(Inputs(laid_over, laid_over, window(WEEKS))))
    expected = {
        (f"{seed}/{gap['server']}", gap["start_us"] - seed * SPACING_US, gap["end_us"] - seed * SPACING_US)
        for seed, answers in planted.items()
        for gap in answers.gaps
    }
    assert len(expected) == 2 * len(SEEDS)
    assert {(row["server"], row["start"], row["end"]) for row in found} == expected
    assert len(found) == len(expected)


def test_mass_disconnects(small: Planted) -> None:
    rows = small[0].drop("seed")
    found = collected(incidents.mass_disconnects(Inputs(rows, rows, window(WEEKS * len(SEEDS)))))
    assert [(r["start"], r["end"], r["servers"], r["subscriptions"]) for r in found] == [
        (mass["start_us"], mass["end_us"], mass["servers"], mass["subscriptions"])
        for answers in small[1].values()
        for mass in answers.mass_disconnects
    ]
    assert len(found) == len(SEEDS)


def test_restarts(small: Planted) -> None:
    rows = small[0].drop("seed")
    found = collected(incidents.restarts(Inputs(rows, rows, window(WEEKS * len(SEEDS)))))
    first_starts = {START_US + seed * SPACING_US for seed in SEEDS}
    assert {r["start"] for r in found} >= first_starts
    again = [r for r in found if r["start"] not in first_starts]
    assert [(r["start"], r["subscriptions"], r["clean"], r["down_s"], r["restore_s"]) for r in again] == [
        (r["start_us"], r["subscriptions"], r["clean"], r["down_us"] / 1e6, r["restore_us"] / 1e6)
        for answers in small[1].values()
        for r in sorted(answers.restarts, key=lambda r: int(r["start_us"]))
    ]
    assert len(again) == 30
