"""What follows from the answer to a push: for its entries, its token and its destination's breaker.

`RULES` is the table, `decide` applies it to one push, `Outcomes` stores the result and tells the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from ntf_server.clock import Clock, day
from ntf_server.config import PushConfig
from ntf_server.push.composing import Push, PushEntry
from ntf_server.push.lanes import Kind
from ntf_server.push.patience import Patience
from ntf_server.push.provider import (
    DeviceGone,
    ProviderDown,
    ProviderRefusesUs,
    PushError,
    PushRefused,
    RetryLater,
)
from ntf_server.push.push_events import PushEvents
from ntf_server.push.retries import MAX_ATTEMPTS, failed_again, retry_delay
from ntf_server.push.scheduler import Ended
from protocol.statuses import INPUT_FOR_REASON, TokenInput
from store.interface import DeliveryStore, StoreError
from store.records import LastNotification, SentEntry, TokenMove, TokenRecord
from store.statement_records import StatementPush

log = logging.getLogger(__name__)

COMMIT_DELAY = 0.02
"Seconds in which outcomes gather before they are stored together: a crash repeats the pushes of so long."


class Fate(Enum):
    """What becomes of the entries that a push carried."""

    SENT = "marked as sent"
    KEPT = "stay unsent; a token that is gone has no further pushes"
    GIVEN_UP = "never pushed again"
    RETRIED = "pushed again, but not too often and not when they are old"
    RETRIED_ALWAYS = "pushed again, however often and late"


class Rule(NamedTuple):
    fate: Fate
    answered: bool
    "For the breaker: the destination works. If not, several in a row open it."


RULES: Final[Mapping[type[PushError] | None, Rule]] = {
    None: Rule(Fate.SENT, answered=True),
    DeviceGone: Rule(Fate.KEPT, answered=True),
    PushRefused: Rule(Fate.GIVEN_UP, answered=True),
    RetryLater: Rule(Fate.RETRIED, answered=True),
    ProviderDown: Rule(Fate.RETRIED_ALWAYS, answered=False),
    ProviderRefusesUs: Rule(Fate.RETRIED_ALWAYS, answered=False),
}
"By what `deliver` raised; None: accepted. A failure that is not the device's never drops anything."


class Decision(NamedTuple):
    """Entries in `done` are never pushed again; those in `lost` reached nobody, because of `why`."""

    ended: Ended
    done: Sequence[PushEntry] = ()
    lost: Sequence[PushEntry] = ()
    why: str = ""


def decide(
    push: Push,
    error: PushError | None,
    *,
    now: float,
    oldest: float,
    chance: Callable[[], float],
) -> Decision:
    """Pure. `now` is of the scheduler's clock; entries received before the wall time `oldest` are too old for
    another try."""
    fate, answered = RULES[type(error) if error is not None else None]
    refused = push.composed.refused if push.composed else ()
    if error is None or fate in (Fate.SENT, Fate.KEPT, Fate.GIVEN_UP):
        done = () if fate is Fate.KEPT else (*push.unsent, *refused)
        lost = push.unsent if fate is Fate.GIVEN_UP else ()
        more = push.composed is not None and push.composed.more and fate is not Fate.KEPT
        return Decision(Ended(answered, more), done, lost, "refused" if fate is Fate.GIVEN_UP else "")
    attempts = failed_again(push.taken.attempts, push.push_id, counts=fate is Fate.RETRIED)
    retry = attempts, now + retry_delay(attempts.level, error.after, chance)
    if fate is Fate.RETRIED_ALWAYS:
        return Decision(Ended(answered, retry=retry, after=error.after), refused)
    if attempts.count >= MAX_ATTEMPTS:
        more = push.composed is not None and push.composed.more
        return Decision(Ended(answered, more), (*push.unsent, *refused), push.unsent, "retried")
    old = [entry for entry in push.unsent if entry.received_at < oldest]
    if old and len(old) == len(push.unsent):
        return Decision(Ended(answered), (*old, *refused), old, "expired")
    return Decision(Ended(answered, retry=retry), (*old, *refused), old, "expired" if old else "")


class Outcomes:
    """Takes what providers say. `tell` hears of each push once its outcome is stored."""

    def __init__(
        self,
        store: DeliveryStore,
        events: PushEvents,
        config: PushConfig,
        clock: Clock,
        chance: Callable[[], float],
        tell: Callable[[Push, Ended, PushError | None], None],
        patience: Patience,
    ) -> None:
        self._store = store
        self._events = events
        self._config = config
        self._clock = clock
        self._chance = chance
        self._tell = tell
        self._patience = patience
        self._waiting: list[tuple[Push, Decision, PushError | None]] = []
        self._came = asyncio.Event()
        self._complete = False

    async def ended(self, push: Push, error: PushError | None) -> None:
        """A push was accepted (None) or not."""
        now, wall_time = self._clock.monotonic(), self._clock.now()
        decision = decide(push, error, now=now, oldest=wall_time - self._config.max_age, chance=self._chance)
        if error is None:
            await self._accepted(push, now)
        elif isinstance(error, DeviceGone):
            await self._device_gone(push, error)
        elif isinstance(error, PushRefused):
            log.error("a push was refused for good: %s", error.reason)
        else:
            self._events.retried(push, "token" if decision.ended.answered else "provider")
        if decision.why:
            self._events.gave_up(push, decision.lost, decision.why)
        if decision.done or isinstance(push.token, StatementPush):
            self._waiting.append((push, decision, error))
            self._came.set()
        else:
            self._tell(push, decision.ended, error)

    def close(self) -> None:
        """No more will come: `run` ends when everything is stored."""
        self._complete = True
        self._came.set()

    async def run(self) -> None:
        """One write for all outcomes that came while the last one was under way."""
        while self._waiting or not self._complete:
            await self._came.wait()
            self._came.clear()
            if not self._complete:
                await asyncio.sleep(COMMIT_DELAY)
            stored, self._waiting = self._waiting, []
            sent = [
                SentEntry(push.token.key, entry.sub_key, entry.seq)
                for push, decision, _ in stored
                if isinstance(push.token, TokenRecord)
                for entry in decision.done
                if isinstance(entry, LastNotification)
            ]
            if sent:
                await self._patience.ask(partial(self._store.set_sent, sent))
            await self._store_statements(stored)
            for push, decision, error in stored:
                self._tell(push, decision.ended, error)

    async def _store_statements(self, stored: Sequence[tuple[Push, Decision, PushError | None]]) -> None:
        ended = [
            (push.token.key, bool(decision.done), error)
            for push, decision, error in stored
            if isinstance(push.token, StatementPush)
        ]
        if ended:
            store = partial(
                self._store.end_statement_pushes,
                sent=[key for key, _, error in ended if error is None],
                given_up=[key for key, done, error in ended if done and error is not None],
                again=[key for key, done, _ in ended if not done],
                now=int(self._clock.now()),
            )
            await self._patience.ask(store)

    async def _accepted(self, push: Push, now: float) -> None:
        if push.taken.job.kind is Kind.VERIFICATION and isinstance(push.token, TokenRecord):
            self._events.verification_sent(push.token, confirmed=await self._confirm(push))
        else:
            self._events.accepted(push, now)

    async def _confirm(self, push: Push) -> bool:
        move = await self._move(push, TokenInput.VERIFICATION_ACCEPTED)
        return move is not None and move.after is not move.before

    async def _device_gone(self, push: Push, error: DeviceGone) -> None:
        if isinstance(push.token, StatementPush):
            await self._subscription_gone(push.token)
        elif await self._move(push, INPUT_FOR_REASON[error.invalid]) is not None:
            self._events.token_invalid(push.token, error.invalid)

    async def _subscription_gone(self, push: StatementPush) -> None:
        try:
            if await self._store.delete_gone_device(push):
                self._events.statement_device_gone()
        except StoreError as error:
            log.error("a subscription of a device that is gone was not deleted: %s", error)

    async def _move(self, push: Push, event: TokenInput) -> TokenMove | None:
        """Does nothing if the token has another device or code by now: the push was for the former one."""
        if isinstance(push.token, StatementPush):
            return None
        try:
            return await self._store.move_token(push.token, event, day(self._clock.now()))
        except StoreError as error:
            log.error("a token was not marked as %s: %s", event.name, error)
            return None
