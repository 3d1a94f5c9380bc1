"""Pushes of statements that this daemon accepted and another one sends."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, cast

from ntf_server.clock import SystemClock
from ntf_server.config import PushConfig
from ntf_server.journal import EventSink
from ntf_server.push.dispatcher import Dispatcher
from store.leases import STATEMENTS, Lease, SoleOwner
from store.statement_records import PushKey


class Sharing(SoleOwner):
    """One of two daemons."""

    is_shared = True

    def __init__(self) -> None:
        self.pushes_statements = False
        self.told: list[PushKey] = []

    def owns(self, lease: Lease) -> bool:
        return lease != STATEMENTS or self.pushes_statements

    def push_statements_elsewhere(self, keys: Collection[PushKey]) -> None:
        self.told += keys


async def test_the_daemon_that_pushes_is_told() -> None:
    ownership = Sharing()
    dispatcher = Dispatcher(
        cast("Any", None),
        {},
        PushConfig(),
        clock=SystemClock(),
        random=os.urandom,
        journal=EventSink(),
        ownership=ownership,
    )
    await dispatcher.notify_statements([PushKey(1), PushKey(2)], 0.0)
    assert ownership.told == [1, 2]
    await dispatcher.notify_stored_statements([PushKey(3)])  # told by a third one: not for us
    assert (ownership.told, dispatcher._scheduler.to_look_up) == ([1, 2], 0)
    ownership.pushes_statements = True
    await dispatcher.notify_stored_statements([PushKey(4)])
    assert (ownership.told, dispatcher._scheduler.to_look_up) == ([1, 2], 1)
