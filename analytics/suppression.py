"""Tables for others: small numbers (1 to 4) and lists of pseudonyms could identify a person."""

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, IntegralType

from analytics.results import TIME_COLUMNS

FEWEST = 5
ABOUT_SOMEBODY = frozenset({"tokens_dead", "stale_subscriptions"})
"Tables that others do not get."


def suppressed(table: DataFrame) -> DataFrame:
    """The table without small numbers and what may tell one: a share, the difference of large ones."""
    counts = [
        field.name
        for field in table.schema
        if isinstance(field.dataType, IntegralType) and field.name not in TIME_COLUMNS
    ]
    small = [F.coalesce(F.col(name).between(1, FEWEST - 1), F.lit(False)) for name in counts]
    has_small = reduce(lambda one, other: one | other, small, F.lit(False))
    coarse: dict[str, Column] = {
        name: F.when(~is_small, F.col(name) - F.col(name) % FEWEST)
        for name, is_small in zip(counts, small, strict=True)
    }
    for field in table.schema:
        if isinstance(field.dataType, DoubleType):
            two_digits = F.format_string("%.1e", field.name).cast("double")
            coarse[field.name] = F.when(~has_small & F.col(field.name).isNotNull(), two_digits)
    return table.withColumns(coarse)
