"""The journal's Spark schema, made from the one definition in `store.journal_schema`."""

from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from store.journal_schema import COLUMNS, ColumnType

SPARK_TYPES: dict[ColumnType, DataType] = {
    "timestamp_us": TimestampType(),
    "string": StringType(),
    "binary": BinaryType(),
    "int64": LongType(),
}

EVENTS = StructType([StructField(c.name, SPARK_TYPES[c.type], nullable=True) for c in COLUMNS])
"""Columns of a journal. All nullable for Spark, which does not check; the reader refuses bad segments."""
