"""What every report gets: events, the time they are asked for, and the limits that make something stale."""

from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` up to, not including, `end`: microseconds since the epoch, UTC."""

    start: int
    end: int

    def holds(self, us: Column) -> Column:
        """Whether a time in microseconds lies within."""
        return (us >= self.start) & (us < self.end)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When something counts as dead, stale or an incident."""

    dead_token_days: int = 30
    "A token without a successful push for so long is dead."
    never_active_days: int = 7
    "A subscription that was not active once since it was created so long ago is stale."
    inactive_days: int = 14
    "A subscription that has not been active for so long is stale."
    unreachable_days: int = 7
    "A server without contact for so long makes its subscriptions orphans."
    gap_sigmas: int = 6
    "An hour is a gap if it has this many standard deviations (of a Poisson count) less than its baseline,"
    gap_share: float = 0.5
    "and at most this share of the baseline."
    mass_servers: int = 3
    "A mass disconnect takes at least so many servers,"
    mass_share: float = 0.3
    "and at least this share of the servers seen that day."


@dataclass(frozen=True)
class Inputs:
    """Deduplicated events before the window's end.

    `history` is `events` plus, where snapshots are given, what the newest of them says about tokens and
    subscriptions older than the journal: reports take states from it and counts from `events`.
    """

    events: DataFrame
    history: DataFrame
    window: Window
    limits: Limits = field(default_factory=Limits)

    def in_window(self) -> DataFrame:
        """The events of the window only."""
        return self.events.where(self.window.holds(F.unix_micros("time")))
