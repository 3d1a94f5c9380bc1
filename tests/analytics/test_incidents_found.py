"""Every incident the generator planted is found and none is invented, for twenty seeds.

Twenty Spark runs would take minutes, so all seeds go into one journal. Each gets its own servers and weeks: what
is looked at server by server or day by day then comes out as for a journal alone. Only the baseline of gaps needs
all seeds to end at the same time; there the weeks are laid over each other again.
"""

from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from analytics.generator import Answers, Plan, write_journal
from analytics.inputs import DAY_US, Inputs, Window
from analytics.reports import incidents
from analytics.schema import EVENTS
from tests.analytics.conftest import START, START_US, collected

SEEDS = range(20)
WEEKS = 4
SPACING = timedelta(weeks=WEEKS)
SPACING_US = 7 * WEEKS * DAY_US
DAYS = 22  # three of each hour of the week


def plan(seed: int) -> Plan:
    start: date = START.date() + seed * SPACING
    servers = 4 if seed % 2 else 3
    sizes = {"gaps": 2, "mass_disconnects": 1, "restarts": 1 + seed % 2}
    return Plan(seed=seed, events=130_000, days=DAYS, servers=servers, start=start.isoformat(), **sizes)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Answers]]:
    root = tmp_path_factory.mktemp("seeds")
    return root, {seed: write_journal(plan(seed), root / f"seed={seed}") for seed in SEEDS}


@pytest.fixture(scope="module")
def events(spark: SparkSession, planted: tuple[Path, dict[int, Answers]]) -> DataFrame:
    reader = (
        spark.read.schema(EVENTS).option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet")
    )
    seed = F.regexp_extract("_metadata.file_path", "/seed=([0-9]+)/", 1).cast("int")
    files = reader.parquet(str(planted[0])).withColumn("seed", seed)
    return files.withColumn("server", F.concat("seed", F.lit("/"), "server"))


def window(weeks: int) -> Window:
    return Window(START_US, START_US + weeks * 7 * DAY_US)


def test_gaps(events: DataFrame, planted: tuple[Path, dict[int, Answers]]) -> None:
    same_weeks = F.timestamp_micros(F.unix_micros("time") - F.col("seed") * F.lit(SPACING_US))
    laid_over = events.where("event = 'ntf_received'").withColumn("time", same_weeks).drop("seed")
    found = collected(incidents.gaps(Inputs(laid_over, laid_over, window(WEEKS))))
    expected = {
        (f"{seed}/{gap['server']}", gap["start_us"] - seed * SPACING_US, gap["end_us"] - seed * SPACING_US)
        for seed, answers in planted[1].items()
        for gap in answers.gaps
    }
    assert len(expected) == 2 * len(SEEDS)
    assert {(row["server"], row["start"], row["end"]) for row in found} == expected
    assert len(found) == len(expected)


def test_mass_disconnects(events: DataFrame, planted: tuple[Path, dict[int, Answers]]) -> None:
    rows = events.drop("seed")
    found = collected(incidents.mass_disconnects(Inputs(rows, rows, window(WEEKS * len(SEEDS)))))
    assert [(r["start"], r["end"], r["servers"], r["subscriptions"]) for r in found] == [
        (mass["start_us"], mass["end_us"], mass["servers"], mass["subscriptions"])
        for answers in planted[1].values()
        for mass in answers.mass_disconnects
    ]
    assert len(found) == len(SEEDS)


def test_restarts(events: DataFrame, planted: tuple[Path, dict[int, Answers]]) -> None:
    rows = events.drop("seed")
    found = collected(incidents.restarts(Inputs(rows, rows, window(WEEKS * len(SEEDS)))))
    first_starts = {START_US + seed * SPACING_US for seed in SEEDS}
    assert {r["start"] for r in found} >= first_starts
    again = [r for r in found if r["start"] not in first_starts]
    assert [(r["start"], r["subscriptions"], r["clean"], r["down_s"], r["restore_s"]) for r in again] == [
        (r["start_us"], r["subscriptions"], r["clean"], r["down_us"] / 1e6, r["restore_us"] / 1e6)
        for answers in planted[1].values()
        for r in sorted(answers.restarts, key=lambda r: int(r["start_us"]))
    ]
    assert len(again) == 30
