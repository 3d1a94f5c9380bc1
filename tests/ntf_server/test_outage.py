"""What the log says of an outage, however often it is told of it."""

from __future__ import annotations

import logging

import pytest

from ntf_server.outage import REMINDER, Outage


def test_an_outage_has_a_beginning_reminders_and_an_end(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    outage = Outage("the store", lambda: now, logging.getLogger("test"))
    outage.note("")
    for second in range(700):
        now = float(second)
        outage.note("is unavailable: full")
    outage.note("")
    outage.note("")
    assert REMINDER == 300
    assert [record.getMessage() for record in caplog.records] == [
        "the store is unavailable: full",
        "the store is unavailable: full (for 5 minutes now)",
        "the store is unavailable: full (for 10 minutes now)",
        "the store is up again after 699 s",
    ]
