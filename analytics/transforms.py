"""Steps that several reports share. Pure: DataFrame in, DataFrame out, no session, no collect.

All arithmetic that could depend on the order of rows is done on integers; "last" always means the greatest
(time, writer, seq). So the same events give the same numbers however they are partitioned.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from analytics.inputs import Inputs
from analytics.times import DAY_US, HOUR_US
from store.journal_schema import JournalEvent as E

SUBSCRIPTION_EVENTS = (E.SUB_CREATED, E.SUB_STATUS_CHANGED, E.SUB_DELETED)
TOKEN_EVENTS = (
    E.TOKEN_REGISTERED,
    E.TOKEN_CONFIRMED,
    E.TOKEN_VERIFIED,
    E.TOKEN_REPLACED,
    E.TOKEN_DELETED,
    E.TOKEN_INVALID,
)
SUCCESSFUL_PUSHES = (E.PUSH_SENT, E.CRON_SENT)


def is_event(*events: E) -> Column:
    """Whether a row is one of these events."""
    return F.col("event").isin([event.value for event in events])


def time_us() -> Column:
    """The event's time in microseconds."""
    return F.unix_micros("time")


def order() -> Column:
    """What makes "first" and "last" unambiguous."""
    return F.struct("time", "writer", "seq")


def day_start(us: Column) -> Column:
    """The start of the UTC day, in microseconds."""
    return us - F.pmod(us, F.lit(DAY_US))


def hour_start(us: Column) -> Column:
    """The start of the hour, in microseconds."""
    return us - F.pmod(us, F.lit(HOUR_US))


def quantity() -> Column:
    """How many a row stands for: its count, or one."""
    return F.coalesce("count", F.lit(1))


def count_if(condition: Column) -> Column:
    """Rows for which the condition holds; 0, not null, if there are none."""
    return F.coalesce(F.sum(F.when(condition, 1).otherwise(0)), F.lit(0)).cast("bigint")


def total_if(condition: Column, value: Column) -> Column:
    """Sum of an integer over the rows for which the condition holds."""
    return F.coalesce(F.sum(F.when(condition, value).otherwise(0)), F.lit(0)).cast("bigint")


def ratio(part: Column, whole: Column) -> Column:
    """A share, null where there is nothing to share."""
    return F.when(whole != 0, part / whole)


def percentiles(rows: DataFrame, keys: Sequence[str], value: str) -> DataFrame:
    """One row per keys: exact p50, p95 and p99 of an integer, interpolated between neighbours.

    Equal values are counted first, so that a group of any size costs only its distinct values, on disk if
    need be; Spark's own exact percentile keeps them all in one task's memory.
    """
    counted = rows.where(F.col(value).isNotNull()).groupBy(*keys, value).agg(F.count("*").alias("times"))
    group = Window.partitionBy(*keys)
    up_to = group.orderBy(value).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    placed = counted.withColumns(
        {"up_to": F.sum("times").over(up_to), "last": F.sum("times").over(group) - 1}
    )
    columns = []
    for percent in (50, 95, 99):
        scaled = F.lit(percent) * F.col("last")
        below = F.expr(f"({percent} * last) div 100")
        above = below + F.when(scaled % 100 > 0, 1).otherwise(0)
        low = F.min(F.when(F.col("up_to") > below, F.col(value)))
        high = F.min(F.when(F.col("up_to") > above, F.col(value)))
        columns.append((low + (high - low) * F.max(scaled % 100) / 100).alias(f"{value}_p{percent}"))
    return placed.groupBy(*keys).agg(*columns)


def to_time(us: Column) -> Column:
    """Microseconds as a timestamp."""
    return F.timestamp_micros(us.cast("bigint"))


def present_names(conditions: Sequence[tuple[str, Column]]) -> Column:
    """The names whose conditions hold, joined by a comma."""
    return F.concat_ws(", ", *[F.when(condition, F.lit(name)) for name, condition in conditions])


def calendar(spans: DataFrame, first: str, last: str, step_us: int, name: str) -> DataFrame:
    """Each row of `spans` once per step from `first` to `last` (microseconds, both included)."""
    steps = F.sequence(F.col(first), F.col(last), F.lit(step_us))
    return spans.where(F.col(first) <= F.col(last)).withColumn(name, F.explode(steps)).drop(first, last)


def window_days(inputs: Inputs) -> tuple[int, int]:
    """Start of the window's first and last day, microseconds."""
    last = inputs.window.end - 1
    return inputs.window.start - inputs.window.start % DAY_US, last - last % DAY_US


def days_from_the_one_before(inputs: Inputs) -> DataFrame:
    """The window's days and the one before them, which stands for all earlier time: day_us."""
    first, last = window_days(inputs)
    row = inputs.events.sparkSession.range(1)
    span = row.select(F.lit(first - DAY_US).alias("first"), F.lit(last).alias("last"))
    return calendar(span, "first", "last", DAY_US, "day_us")


def daily_net(changes: DataFrame, first_day: int, name: str) -> DataFrame:
    """Sum of changes per day; what was before the first day counts on the day before it."""
    day = F.greatest(day_start(F.col("us")), F.lit(first_day - DAY_US))
    return changes.groupBy(day.alias("day_us")).agg(F.sum("change").alias(name))


def token_deletions(events: DataFrame) -> DataFrame:
    """When each deleted token was deleted: token, token_deleted_us."""
    deleted = events.where(is_event(E.TOKEN_DELETED) & F.col("token").isNotNull())
    return deleted.groupBy("token").agg(F.min(time_us()).alias("token_deleted_us"))


def subscription_lives(events: DataFrame) -> DataFrame:
    """One row per subscription: server, token, own last status and when, first and last activity, its end.

    `gone_us` is when it was deleted, alone or with its token; null while it lives.
    """
    status = F.when(is_event(E.SUB_CREATED), F.coalesce("status_to", F.lit("NEW"))).otherwise(
        F.col("status_to")
    )
    active = (F.col("status") == "ACTIVE") | (F.col("status_from") == "ACTIVE")
    rows = events.where(is_event(*SUBSCRIPTION_EVENTS) & F.col("subscription").isNotNull())
    lives = (
        rows.withColumn("status", status)
        .groupBy("subscription")
        .agg(
            F.max_by("server", F.when(F.col("server").isNotNull(), order())).alias("server"),
            F.max_by("token", F.when(F.col("token").isNotNull(), order())).alias("token"),
            F.max_by("status", F.when(F.col("status").isNotNull(), order())).alias("own_status"),
            F.max(F.when(F.col("status").isNotNull(), time_us())).alias("own_status_us"),
            F.min(time_us()).alias("first_us"),
            F.max(F.when(active, time_us())).alias("own_active_us"),
            F.min(F.when(is_event(E.SUB_DELETED), time_us())).alias("deleted_us"),
        )
    )
    return (
        lives.join(token_deletions(events), "token", "left")
        .withColumn("gone_us", F.least("deleted_us", "token_deleted_us"))
        .drop("deleted_us", "token_deleted_us")
    )


def server_contacts(events: DataFrame) -> DataFrame:
    """Per server: its last disconnection, last service subscription and last sign of life, microseconds."""
    contact = is_event(E.SMP_CONNECTED, E.SMP_SERVICE_SUBSCRIBED, E.NTF_RECEIVED) | (
        is_event(E.SUB_CREATED, E.SUB_STATUS_CHANGED) & (F.col("status_to") == "ACTIVE")
    )
    return (
        events.where(F.col("server").isNotNull())
        .groupBy("server")
        .agg(
            F.max(F.when(is_event(E.SMP_DISCONNECTED), time_us())).alias("disconnected_us"),
            F.max(F.when(is_event(E.SMP_SERVICE_SUBSCRIBED), time_us())).alias("service_us"),
            F.max(F.when(contact, time_us())).alias("contact_us"),
            F.min(time_us()).alias("server_first_us"),
        )
    )


def subscription_states(events: DataFrame) -> DataFrame:
    """Living subscriptions with their status now, when they were last active and since when they are not.

    A disconnection makes a server's active subscriptions inactive without an event for each of them; a later
    service subscription makes them active again. `last_active_us` is null for one that never was active.
    """
    lives = subscription_lives(events).where(F.col("gone_us").isNull()).drop("gone_us")
    contacts = server_contacts(events).select("server", "disconnected_us", "service_us")
    cut_off = (
        (F.col("own_status") == "ACTIVE")
        & (F.col("disconnected_us") > F.col("own_status_us"))
        & ~F.coalesce(F.col("service_us") > F.col("disconnected_us"), F.lit(False))
    )
    cut_off = F.coalesce(cut_off, F.lit(False))
    return lives.join(contacts, "server", "left").select(
        "subscription",
        "token",
        "server",
        "first_us",
        F.when(cut_off, F.lit("INACTIVE")).otherwise(F.col("own_status")).alias("status"),
        F.when(cut_off, F.col("disconnected_us")).otherwise(F.col("own_active_us")).alias("last_active_us"),
    )


def token_states(events: DataFrame) -> DataFrame:
    """Tokens not deleted: provider, last event of their life, first event, last successful push."""
    tokens = events.where(is_event(*TOKEN_EVENTS) & F.col("token").isNotNull())
    lives = tokens.groupBy("token").agg(
        F.max_by("provider", F.when(F.col("provider").isNotNull(), order())).alias("provider"),
        F.max_by("event", order()).alias("last_event"),
        F.min(time_us()).alias("first_us"),
        F.max(F.when(is_event(E.TOKEN_DELETED), 1).otherwise(0)).alias("deleted"),
    )
    pushes = events.where(is_event(*SUCCESSFUL_PUSHES) & F.col("token").isNotNull())
    successes = pushes.groupBy("token").agg(F.max(time_us()).alias("last_push_us"))
    return lives.where(F.col("deleted") == 0).drop("deleted").join(successes, "token", "left")


def dead_tokens(events: DataFrame, end_us: int, days: int) -> DataFrame:
    """Tokens without a successful push (or, never having had one, without any age below) for `days`."""
    silent_since = F.coalesce("last_push_us", "first_us")
    states = token_states(events).withColumn("silent_us", F.lit(end_us) - silent_since)
    return states.where(F.col("silent_us") >= days * DAY_US)


def token_activity(events: DataFrame) -> DataFrame:
    """Changes of the number of active tokens: us, change (+1 or -1)."""
    moves = events.where(
        is_event(E.TOKEN_VERIFIED, E.TOKEN_REPLACED, E.TOKEN_DELETED, E.TOKEN_INVALID)
        & F.col("token").isNotNull()
    )
    active = F.when(is_event(E.TOKEN_VERIFIED), 1).otherwise(0)
    by_token = Window.partitionBy("token").orderBy("time", "writer", "seq")
    change = F.col("active") - F.coalesce(F.lag("active").over(by_token), F.lit(0))
    return (
        moves.withColumn("active", active)
        .select(time_us().alias("us"), change.alias("change"))
        .where(F.col("change") != 0)
    )


def running_total(rows: DataFrame, key: str, value: str, name: str) -> DataFrame:
    """Adds the sum of an integer over all rows up to each; one row per key, so few rows."""
    up_to_here = Window.orderBy(key).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return rows.withColumn(name, F.sum(value).over(up_to_here))
