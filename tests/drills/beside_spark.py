"""Commands that start Spark beside a live server, router and agent: nothing promised is lost.

`pytest tests/drills/beside_spark.py`; tests/test_beside.py runs all other commands.
"""

from __future__ import annotations

from pathlib import Path

from tests.beside import needs_locks, neighbours
from tests.test_beside import SPARK_MATRIX, check_nothing_is_lost
from tests.waiting import until


@needs_locks
async def test_nothing_is_lost_beside_spark(tmp_path: Path) -> None:
    async with neighbours(tmp_path) as live:
        await until(lambda: any((live.data_dir / "journal").glob("date=*/*.parquet")))
        await check_nothing_is_lost(live, SPARK_MATRIX)
