"""What a report is asked for: a span of time, and the limits that make something stale or an incident."""

from dataclasses import dataclass

from analytics.times import HOUR_US


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` up to, not including, `end`: microseconds since the epoch, UTC."""

    start: int
    end: int

    @property
    def first_hour(self) -> int:
        """Traffic is summed by hours: the one in which the window starts counts as a whole."""
        return self.start - self.start % HOUR_US


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
    refused_share: float = 0.05
    "Subscriptions a router refuses, or tokens a provider calls invalid, within an hour: at least this share."
