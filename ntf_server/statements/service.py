"""The statement gateway inside the daemon: its API, the watcher of the node, and what keeps both in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from typing import Protocol

from ntf_server.clock import Clock
from ntf_server.config import ConfigError, StatementsConfig
from ntf_server.metrics import counter, gauge
from ntf_server.outage import STORE_PAUSE
from ntf_server.statements.api import GatewayApi
from ntf_server.statements.pipeline import Pipeline, StatementSink
from ntf_server.statements.topic_groups import MAX_GROUP
from ntf_server.statements.watcher import TopicWatcher
from store.interface import GatewayStore, LeaseLost, ReportStore, StatementStore, StoreError
from store.leases import SOLE_OWNER, STATEMENTS, Ownership
from transport.cancellation import TaskGroup, raise_if_cancelled

log = logging.getLogger(__name__)

TOPICS_PAUSE = 0.05
"Seconds in which changes of rules gather."
TOPICS_INTERVAL = 10.0
"Seconds until the topics are read again anyway,"
SHARED_TOPICS_INTERVAL = 0.5
"and where other daemons change rules too."
OWNERSHIP_INTERVAL = 0.5
"Seconds between looks whether this daemon is the one that watches."
LISTENING_INTERVAL, LISTENING_STORED = 0.1, 1.0
"Seconds between looks whether the node is heard, and between times that it is written down."
PURGE_INTERVAL = 60.0
PURGE_PAGE = 500
SECONDS_PER_DAY = 86_400

EXPIRED_PUSHES = counter("statement_pushes_expired", "Pushes not made before their statements expired")
UNRENEWED = counter(
    "statement_subscriptions_unrenewed",
    "Subscriptions deleted because their client was not heard of for long",
)
RULES = gauge("statements_rules", "Rules of the statement gateway's subscriptions")


class ServiceStore(GatewayStore, StatementStore, ReportStore, Protocol):
    """Both sides of the gateway, and its figures."""


class StatementGateway:
    """`run` until cancelled; `api` is served beside it."""

    def __init__(
        self,
        store: ServiceStore,
        sink: StatementSink,
        config: StatementsConfig,
        clock: Clock,
        api: GatewayApi,
        ownership: Ownership = SOLE_OWNER,
    ) -> None:
        if not config.node:
            raise ConfigError("[STATEMENTS] needs node: the address of a statement store's node")
        self._store = store
        self._config = config
        self._clock = clock
        self._ownership = ownership
        self._topics_interval = SHARED_TOPICS_INTERVAL if ownership.is_shared else TOPICS_INTERVAL
        self.api = api
        api.are_rules_read = self._are_rules_read
        self._pipeline = Pipeline(store, sink, clock, config.push_limits)
        self._listening_until = 0.0
        "When the node was last heard of; what it has stored when it is next may have come since then."
        self._watcher = TopicWatcher(
            config.node, self._take, most_topics=config.watched_topics, new_rules=self
        )

    async def run(self) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="statement watch")
            tasks.create_task(self._follow_rules(), name="statement topics")
            tasks.create_task(self._purge(), name="statement housekeeping")
            tasks.create_task(self._note_listening(), name="statement listening")

    async def _take(self, statements: list[bytes], is_stored: bool) -> None:
        await self._pipeline.take(statements, self._listening_until if is_stored else None)

    async def _note_listening(self) -> None:
        """While the node is heard, nothing that it sends later is older. Other daemons, and this one after a
        restart, need not know it so exactly."""
        stored = 0.0
        while True:
            if self._watcher.is_listening:
                self._listening_until = now = self._clock.now()
                if not 0 <= now - stored < LISTENING_STORED:
                    stored = now
                    with contextlib.suppress(
                        StoreError
                    ):  # whatever is wrong with the store is told by others
                        await self._store.note_listening(now)
            await asyncio.sleep(LISTENING_INTERVAL)

    async def _read_listening(self) -> None:
        """What this process, or another daemon, heard before."""
        try:
            self._listening_until = await self._store.listened_until()
        except StoreError as error:
            log.error("calls that the node has stored are not pushed: %s", error)
            self._listening_until = 0.0

    def _are_rules_read(self) -> bool:
        """As far as this daemon knows, by it or by another one; soon, if it is just about to connect."""
        return not (self._watcher.is_away and self._ownership.owns(STATEMENTS))

    def problem(self) -> str:
        """Why this daemon does not hear the node, in a few words; empty if it does or another one should."""
        if self._watcher.is_away and self._ownership.owns(STATEMENTS):
            return f"{self._config.node} is unreachable: no statements are pushed"
        return ""

    # NewRules

    async def begin_baseline(self, watched: Collection[bytes] | None) -> list[bytes]:
        """See NewRules."""
        topics = await self._store.new_rule_topics(MAX_GROUP)
        topics = [topic for topic in topics if watched is None or topic in watched]
        if topics:
            await self._store.begin_baseline(topics)
        return topics

    async def settle(self, topics: Sequence[bytes]) -> None:
        """See NewRules."""
        await self._store.settle_rules(topics)
        self.api.rules_settled()

    async def _watch(self) -> None:
        """One daemon watches; another goes on when it is gone. Each begins with all that the node has stored,
        and what was pushed before is known."""
        while True:
            term = await self._is_watching()
            await self._read_listening()
            try:
                async with TaskGroup() as tasks:
                    watching = tasks.create_task(self._watcher.run(), name="statement watcher")
                    while self._term() == term:  # noqa: ASYNC110
                        await asyncio.sleep(OWNERSHIP_INTERVAL)
                    watching.cancel()
            except* LeaseLost as lost:
                raise_if_cancelled()
                log.warning("the statement store is watched anew: %s", lost.exceptions[0])
                await asyncio.sleep(OWNERSHIP_INTERVAL)

    async def _is_watching(self) -> int:
        """The term, as soon as this daemon is the one that watches."""
        while (term := self._term()) == 0:  # noqa: ASYNC110 -- leases end by the clock
            await asyncio.sleep(OWNERSHIP_INTERVAL)
        return term

    def _term(self) -> int:
        """0: another daemon watches, or nobody."""
        return self._ownership.term(STATEMENTS) if self._ownership.owns(STATEMENTS) else 0

    async def _follow_rules(self) -> None:
        while True:
            await self._is_watching()
            self.api.rules_changed.clear()
            try:
                topics = await self._store.watched_topics(self._config.watched_topics + 1)
            except StoreError as error:
                log.error("topics of statements wait for the store: %s", error)
                await asyncio.sleep(STORE_PAUSE)
                continue
            self._watcher.watch(topics)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._topics_interval):
                    await self.api.rules_changed.wait()
                    await asyncio.sleep(TOPICS_PAUSE)

    async def _purge(self) -> None:
        while True:
            try:
                while await self._purge_page():
                    pass
                RULES.set((await self._store.gateway_counts()).rules)
            except StoreError as error:
                log.error("housekeeping of statements waits for the store: %s", error)
            await asyncio.sleep(PURGE_INTERVAL)

    async def _purge_page(self) -> bool:
        """False: that was all."""
        now, days = int(self._clock.now()), self._config.subscription_days
        before = now - days * SECONDS_PER_DAY if days else 0
        purged = await self._store.purge_statements(now, PURGE_PAGE, unrenewed_before=before)
        EXPIRED_PUSHES.inc(purged.expired)
        UNRENEWED.inc(purged.unrenewed)
        return any(purged)
