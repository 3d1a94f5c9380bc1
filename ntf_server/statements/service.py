"""The statement gateway inside the daemon: its API, the watcher of the node, and what keeps both in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from ntf_server.clock import Clock
from ntf_server.config import ConfigError, StatementsConfig
from ntf_server.outage import STORE_PAUSE
from ntf_server.statements.api import GatewayApi
from ntf_server.statements.pipeline import Pipeline, StatementSink
from ntf_server.statements.watcher import TopicWatcher
from store.interface import GatewayStore, LeaseLost, StatementStore, StoreError
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
PURGE_INTERVAL = 60.0
PURGE_PAGE = 500


class ServiceStore(GatewayStore, StatementStore, Protocol):
    """Both sides of the gateway."""


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
        pipeline = Pipeline(store, sink, clock)
        self._watcher = TopicWatcher(config.node, pipeline.take, most_topics=config.watched_topics)

    async def run(self) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="statement watch")
            tasks.create_task(self._follow_rules(), name="statement topics")
            tasks.create_task(self._purge(), name="statement housekeeping")

    async def _watch(self) -> None:
        """One daemon watches; another goes on when it is gone. Each begins with all that the node has stored,
        and what was pushed before is known."""
        while True:
            term = await self._is_watching()
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
        watched: list[bytes] | None = None
        while True:
            await self._is_watching()
            self.api.rules_changed.clear()
            try:
                topics = await self._store.watched_topics(self._config.watched_topics + 1)
            except StoreError as error:
                log.error("topics of statements wait for the store: %s", error)
                await asyncio.sleep(STORE_PAUSE)
                continue
            if topics != watched:
                self._watcher.watch(topics)
                watched = topics
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._topics_interval):
                    await self.api.rules_changed.wait()
                    await asyncio.sleep(TOPICS_PAUSE)

    async def _purge(self) -> None:
        while True:
            try:
                while await self._store.purge_statements(int(self._clock.now()), PURGE_PAGE):
                    pass
            except StoreError as error:
                log.error("housekeeping of statements waits for the store: %s", error)
            await asyncio.sleep(PURGE_INTERVAL)
