"""The same numbers, to the last bit, whatever the partitioning, order, copies and damaged segments."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from analytics.generator import Answers
from tests.analytics.conftest import Numbers, all_numbers, read_journal


@pytest.mark.parametrize("partitions", [7, 64])
def test_partitions_and_order(
    spark: SparkSession, journal: tuple[Path, Answers], numbers: Numbers, partitions: int
) -> None:
    events, _ = read_journal(spark, journal[0])
    shuffled = events.orderBy(F.rand(partitions)).repartition(partitions).persist()
    assert shuffled.rdd.getNumPartitions() == partitions
    assert all_numbers(shuffled) == numbers
    shuffled.unpersist()


def test_copies_and_damaged_segments(
    spark: SparkSession, journal: tuple[Path, Answers], numbers: Numbers, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    shutil.copytree(journal[0], folder)
    first, second, third = sorted(folder.glob("*/*.parquet"))[:3]
    shutil.copy(first, first.with_name("copy.parquet"))
    shutil.copy(second, folder / "copy-elsewhere.parquet")
    content = third.read_bytes()
    third.with_name("truncated.parquet").write_bytes(content[: len(content) // 2])
    middle = len(content) // 2
    corrupt = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    third.with_name("corrupt.parquet").write_bytes(corrupt)
    third.with_name("empty.parquet").write_bytes(b"")
    third.with_name(".open-segment.parquet").write_bytes(content)
    events, bad = read_journal(spark, folder)
    assert bad == 3
    assert all_numbers(events) == numbers
