"""Plot how many pushes each hour of the day has and how late they are, from the rollups of a journal.

    spark-submit contrib/spark/busy_hours.py JOURNAL

An example of your own analysis with PySpark: rollups are plain Parquet, partitioned by date. Run
`ntf-analytics report` or `ntf-analytics sql` first: they bring the rollups up to date.
"""

import sys

from pyspark.sql import DataFrame, SparkSession

WIDTH = 50
QUERY = """
SELECT hour(timestamp_micros(hour_us)) AS hour, sum(number) AS pushes,
  percentile(pow(2, (bucket + 0.5) / 16) / 1000, 0.95, number) AS latency_ms_p95
FROM hours WHERE event = 'push_sent' GROUP BY 1 ORDER BY 1"""
"Latencies are counted in buckets, sixteen for each doubling of microseconds."


def busy_hours(session: SparkSession, journal: str) -> DataFrame:
    """Pushes by hour of the day (UTC) and the 95th percentile of their latency."""
    session.read.parquet(f"{journal}/_rollups/hours").createOrReplaceTempView("hours")
    return session.sql(QUERY)


def plot(hours: DataFrame) -> str:
    """A line with a bar for each hour."""
    rows = hours.collect()
    most = max((row.pushes for row in rows), default=1)
    return "\n".join(
        f"{row.hour:02}:00 {'█' * round(WIDTH * row.pushes / most):<{WIDTH}} {row.pushes:>9,} pushes,"
        f" p95 {row.latency_ms_p95 or 0:,.0f} ms"
        for row in rows
    )


if __name__ == "__main__":
    builder = SparkSession.builder.config("spark.sql.session.timeZone", "UTC")
    print(plot(busy_hours(builder.getOrCreate(), sys.argv[1])))
