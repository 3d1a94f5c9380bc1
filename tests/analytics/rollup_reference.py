"""The rollups once more, by DuckDB: for tests that need no Spark, and to compare Spark's with."""

from pathlib import Path

import duckdb
import pyarrow as pa

from analytics.rollups_schema import BUCKETS_PER_OCTAVE, TRAFFIC

HOUR = 3_600_000_000
NAMES = ", ".join(f"'{event.value}'" for event in TRAFFIC)
DATE = "strftime(make_timestamp(epoch_us(time)), '%Y-%m-%d') AS date"

ROLLUPS = {
    "life": f"SELECT *, {DATE} FROM events WHERE event NOT IN ({NAMES})",
    "hours": f"""
SELECT {DATE}, epoch_us(time) // {HOUR} * {HOUR} AS hour_us, event, server, provider, kind, error,
  CASE WHEN latency_us > 1 THEN floor(log2(latency_us) * {BUCKETS_PER_OCTAVE})::INT
       WHEN latency_us IS NOT NULL THEN 0 END AS bucket, count(*) AS number,
  sum(coalesce("count", 1))::BIGINT AS entries, sum(coalesce(total, "count", 1))::BIGINT AS total
FROM events WHERE event IN ({NAMES}) GROUP BY ALL""",
    "tokens": f"""
SELECT {DATE}, token, count(*) FILTER (event = 'ntf_received') AS received,
  count(*) FILTER (event <> 'ntf_received') AS pushes,
  max(epoch_us(time)) FILTER (event <> 'ntf_received') AS last_push_us
FROM events WHERE event IN ('ntf_received', 'push_sent', 'cron_sent') AND token IS NOT NULL GROUP BY ALL""",
}


def write_rollups(events: pa.Table | list[str], folder: Path) -> None:
    """Write the rollups of events, or of all in some files, as Spark does."""
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        if isinstance(events, pa.Table):
            db.register("events", events)
        else:
            source = f"read_parquet({events}, hive_partitioning = false)"
            db.execute(f"CREATE VIEW events AS SELECT * FROM {source}")
        for name, query in ROLLUPS.items():
            (folder / name).mkdir(parents=True)
            db.execute(f"COPY ({query}) TO '{folder / name}' (FORMAT parquet, PARTITION_BY (date))")
            if not any((folder / name).iterdir()):
                empty = folder / name / "date=2026-01-01"
                empty.mkdir()
                columns = f"SELECT * EXCLUDE (date) FROM ({query})"
                db.execute(f"COPY ({columns}) TO '{empty}/none.parquet' (FORMAT parquet)")
