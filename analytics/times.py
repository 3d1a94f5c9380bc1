"""Spans of time in microseconds, the unit of all times in journals and reports."""

from store.journal_schema import MINUTE_US as MINUTE_US
from store.journal_schema import SECOND_US as SECOND_US

HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US
