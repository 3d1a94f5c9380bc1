"""What the store knows about pushes: which are unsent, and what is needed to make those whose turn it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from ntf_server.push.composing import Content, Push
from ntf_server.push.lanes import Job, Kind, statement_job
from ntf_server.push.patience import Patience
from ntf_server.push.push_events import PushEvents
from ntf_server.push.scheduler import Taken
from store.interface import DeliveryStore, LeaseLost
from store.leases import STATEMENTS, Ownership, of_pushes
from store.records import TokenKey, TokenPush, TokenRecord
from store.statement_records import PushKey, StatementPush

log = logging.getLogger(__name__)

T = TypeVar("T")

SWEEP_PAGE = 256
"Unsent tokens read from the store at once."


class Found(NamedTuple):
    """What was read about the jobs whose turn it is. Do not print."""

    tokens: Mapping[TokenKey, TokenRecord]
    messages: Mapping[TokenKey, TokenPush]
    statements: Mapping[PushKey, StatementPush]
    ownership: Ownership

    def content(self, job: Job) -> Content | None:
        """None: there is nothing to push, or by now it is another daemon's to push."""
        if job.kind is Kind.MESSAGE:
            if self.ownership.is_shared and not self.ownership.owns(of_pushes(job.token_key)):
                return None
            return self.messages.get(job.token_key)
        if job.kind is Kind.STATEMENT:
            return self.statements.get(job.push_key)
        return self.tokens.get(job.token_key)


class PushReader:
    """Reads for the dispatcher, however long the store is unavailable, and claims what may be pushed once."""

    def __init__(
        self, store: DeliveryStore, ownership: Ownership, events: PushEvents, patience: Patience
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._events = events
        self._patience = patience
        self._statements_term: int | None = None
        self._taking_over = asyncio.Lock()

    async def unsent(self) -> AsyncIterator[Job]:
        """All that the store knows as unsent, page by page."""
        after = TokenKey(0)
        while page := await self._next(partial(self._store.unsent_tokens, after=after)):
            for after in page:
                yield Job(Kind.MESSAGE, after)
        if not self._owns_statements:
            return
        await self._take_statements_over()
        last = PushKey(0)
        while pushes := await self._next(partial(self._store.unsent_statement_pushes, after=last)):
            for last in pushes:
                yield statement_job(last)

    async def _next(self, read: Callable[..., Awaitable[list[T]]]) -> list[T]:
        return await self._patience.ask(partial(read, limit=SWEEP_PAGE)) or []

    async def read(self, taken: Sequence[Taken]) -> Found:
        """What the store knows about them, in one read for each kind."""
        messages = [item.job.token_key for item in taken if item.job.kind is Kind.MESSAGE]
        if self._ownership.is_shared:
            messages = [key for key in messages if self._ownership.owns(of_pushes(key))]
        urgent = [item.job.token_key for item in taken if item.job.urgent]
        statements = [item.job.push_key for item in taken if item.job.kind is Kind.STATEMENT]
        tokens: list[TokenRecord] = []
        pushes: list[TokenPush] = []
        to_tell: list[StatementPush] = []
        if urgent:
            tokens = await self._patience.ask(partial(self._store.tokens_by_key, urgent)) or []
        if messages:
            pushes = await self._patience.ask(partial(self._store.pushes, messages)) or []
        if statements and self._owns_statements:
            await self._take_statements_over()
            to_tell = await self._patience.ask(partial(self._store.statement_pushes, statements)) or []
        return Found(
            {token.key: token for token in tokens},
            {push.token.key: push for push in pushes},
            {push.key: push for push in to_tell},
            self._ownership,
        )

    async def claim(self, composed: Sequence[Push]) -> set[Job]:
        """Returns those that are not to be pushed any more. Those of statements are marked: should this
        process die, nobody knows whether they were sent, and none is to be made twice."""
        once = {push.token.key: push.taken.job for push in composed if isinstance(push.token, StatementPush)}
        if not once:
            return set()
        claim = partial(self._store.claim_statement_pushes, list(once))
        claimed = await self._patience.ask(partial(_unless_lost, claim)) or set()
        return {job for key, job in once.items() if key not in claimed}

    @property
    def _owns_statements(self) -> bool:
        """One daemon pushes all of them: the one that watches."""
        return self._ownership.owns(STATEMENTS)

    async def _take_statements_over(self) -> None:
        """Before anything is claimed: what an earlier run, or another daemon, handed to a provider and has no
        answer for is not pushed again."""
        async with self._taking_over:
            term = self._ownership.term(STATEMENTS)
            if term == self._statements_term:
                return
            count = await self._patience.ask(partial(_unless_lost, self._store.abandon_claimed_pushes))
            if count is None:
                return
            self._statements_term = term
            if count:
                log.warning("%d pushes of statements have an unknown end: they are not made again", count)
                self._events.abandoned(count)


async def _unless_lost(call: Callable[[], Awaitable[T]]) -> T | None:
    """None: another daemon pushes statements by now."""
    try:
        return await call()
    except LeaseLost:
        return None
