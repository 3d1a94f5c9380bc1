"""From a token with news to its device: reads what the scheduler chose, delivers it, stores the outcome.

An entry stays unsent in the store until a push that carries it was accepted and marked there, so a crash at
any moment costs at most a repeated push. A token is in the scheduler's hands until its outcome is stored:
nothing is pushed twice in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random as randomness
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ntf_server.clock import Clock, day
from ntf_server.journal import EventSink
from ntf_server.push.breaker import BreakerSettings
from ntf_server.push.composing import Composed, compose
from ntf_server.push.provider import (
    CheckMessages,
    Message,
    PushError,
    PushNotification,
    PushProvider,
    Refused,
    RetryLater,
    TokenInvalid,
    Verification,
)
from ntf_server.push.push_events import PushEvents
from ntf_server.push.retries import Attempts, RetryPolicy, attempts_after_failure
from ntf_server.push.scheduler import Added, Job, Kind, PushScheduler, SchedulerSettings, Taken
from protocol.blocks import PAD_LENGTH_SIZE
from protocol.device_token import Provider
from protocol.push_messages import PUSH_PADDING, seal_push
from protocol.statuses import INVALID_FOR_REASON, TokenInput, TokenStatus, move_token
from store.interface import NtfStore, StoreError
from store.records import LastNotification, SentEntry, TokenKey, TokenPush, TokenRecord

log = logging.getLogger(__name__)

NONCE_SIZE = 24
PUSH_ID_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSettings:
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    padding: int = PUSH_PADDING
    "Bytes of every push before encryption."
    deadline: float = 30.0
    "Seconds that a delivery may take whatever its provider does; providers have a shorter limit of their own."
    commit_delay: float = 0.003
    "Seconds in which outcomes gather before they are stored together."
    sweep_page: int = 256
    "Unsent tokens read from the store at once, at start-up and after an outage."
    store_pause: float = 1.0
    "Seconds until a store that is unavailable is asked again."
    stop_grace: float = 10.0
    "Seconds that pushes under way have to end when the server stops."


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"Calls back after so many seconds of the clock that the dispatcher reads."


class _Outcome(NamedTuple):
    """What is to be stored, and what the scheduler is told then: a retry, or the end of the push."""

    job: Job
    sent: Sequence[SentEntry]
    more: bool = False
    retry: tuple[Attempts, float] | None = None


class _Attempt(NamedTuple):
    """One push on its way. Do not print."""

    taken: Taken
    token: TokenRecord
    push_id: uuid.UUID
    composed: Composed | None


class PushDispatcher:
    """The PushSink of the daemon. `run()` does the work until `stop()`."""

    def __init__(
        self,
        store: NtfStore,
        providers: Mapping[Provider, PushProvider],
        journal: EventSink,
        clock: Clock,
        settings: DispatcherSettings | None = None,
        *,
        random_bytes: Callable[[int], bytes] = os.urandom,
        random: Callable[[], float] = randomness.random,
        call_later: CallLater | None = None,
    ) -> None:
        self._store = store
        self._providers = providers
        self._clock = clock
        self._settings = settings or DispatcherSettings()
        self._random_bytes = random_bytes
        self._random = random
        self._call_later = call_later
        self._events = PushEvents(journal, clock.now)
        self._scheduler = PushScheduler(self._settings.scheduler, self._settings.breaker, random)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._sweep = asyncio.Event()
        self._outcomes: list[_Outcome] = []
        self._stored = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._deliveries: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None

    # PushSink

    async def verify(self, token_key: TokenKey) -> None:
        """See PushSink."""
        await self._add(Job(Kind.VERIFICATION, token_key), self._clock.monotonic())

    async def notify(self, token_keys: Sequence[TokenKey], received_at: float) -> None:
        """See PushSink. A key that is named twice stands for two notifications."""
        for token_key in token_keys:
            await self._add(Job(Kind.MESSAGE, token_key), received_at)

    async def check_messages(self, token_key: TokenKey) -> None:
        """Wake the device of a token; nothing about it is stored."""
        await self._add(Job(Kind.CHECK, token_key), self._clock.monotonic())
