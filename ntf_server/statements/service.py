"""The statement gateway inside the daemon: its API, the watcher of the node, and what keeps both in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ntf_server.clock import Clock
from ntf_server.config import ConfigError, StatementsConfig
from ntf_server.metrics import counter, gauge
from ntf_server.outage import STORE_PAUSE
from ntf_server.statements.api import GatewayApi
from ntf_server.statements.pipeline import Pipeline, StatementSink
from ntf_server.statements.summary import node_name
from ntf_server.statements.topic_groups import MAX_GROUP
from ntf_server.statements.watcher import TopicWatcher
from store.interface import GatewayStore, LeaseLost, ReportStore, StatementStore, StoreError
from store.leases import SOLE_OWNER, TOPIC_PARTS, Ownership, of_topic_part, topic_part
from transport.cancellation import TaskGroup, raise_if_cancelled

log = logging.getLogger(__name__)

TOPICS_PAUSE = 0.05
"Seconds in which changes of rules gather."
TOPICS_INTERVAL = 10.0
"Seconds until the topics are read again anyway,"
SHARED_TOPICS_INTERVAL = 0.5
"and where other daemons change rules too,"
READING_SHARE = 5.0
"but not before this multiple of the time that reading them took: there may be 100,000 topics."
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
        self._parts: Mapping[int, int] = {}
        "Parts of the topics that this daemon watches, with the terms in which they are its own."
        self._has_parts = asyncio.Event()
        self._pipeline = Pipeline(store, sink, clock, config.push_limits, self._is_watched)
        self._listening_until = 0.0
        "When the node was last heard of; what it has stored when it is next may have come since then."
        self._watcher = TopicWatcher(
            config.node,
            self._take,
            most_topics=config.watched_topics,
            new_rules=self,
            on_silence=self._note_silence,
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
                        await self._store.note_listening(list(self._parts), now)
            await asyncio.sleep(LISTENING_INTERVAL)

    def _note_silence(self, seconds: float) -> None:
        """What the node stored meanwhile may be as old."""
        self._listening_until -= seconds

    async def _read_listening(self, parts: Collection[int]) -> float:
        """Until when this process, or another daemon, heard of topics of these parts before."""
        try:
            return await self._store.listened_until(parts)
        except StoreError as error:
            log.error("calls that the node has stored are not pushed: %s", error)
            return 0.0

    def _is_watched(self, topic: bytes) -> bool:
        return topic_part(topic) in self._parts

    def _are_rules_read(self) -> bool:
        """As far as this daemon knows, by it or by another one; soon, if it is just about to connect."""
        return not (self._watcher.is_away and self._parts)

    def problem(self) -> str:
        """Why this daemon does not hear the node, in a few words; empty if it does or another one should."""
        if self._watcher.is_away and self._parts:
            return f"{node_name(self._config.node)} is unreachable: no statements are pushed"
        return ""

    # NewRules

    async def begin_baseline(self, watched: Collection[bytes] | None) -> list[bytes]:
        """See NewRules."""
        found: list[bytes] = []
        after = b""
        while len(found) < MAX_GROUP and (page := await self._store.new_rule_topics(MAX_GROUP, after)):
            here = filter(self._is_watched, page)
            found += [topic for topic in here if watched is None or topic in watched]
            after = page[-1]
        found = found[:MAX_GROUP]
        if found:
            await self._store.begin_baseline(found)
        return found

    async def settle(self, topics: Sequence[bytes]) -> None:
        """See NewRules."""
        await self._store.settle_rules(topics)
        self.api.rules_settled()

    async def _watch(self) -> None:
        """Each part of the topics is watched by one daemon; another goes on when that one is gone. Whoever
        begins reads all that the node has stored of them, and what was pushed before is known."""
        while True:
            await self._begin(await self._some_parts())
            try:
                async with TaskGroup() as tasks:
                    watching = tasks.create_task(self._watcher.run(), name="statement watcher")
                    await self._follow_ownership()
                    watching.cancel()
            except* LeaseLost as lost:
                raise_if_cancelled()
                log.warning("watching the statement store again from the start: %s", lost.exceptions[0])
                await asyncio.sleep(OWNERSHIP_INTERVAL)
            finally:
                self._parts = {}
                self._has_parts.clear()

    async def _some_parts(self) -> Mapping[int, int]:
        """As soon as there are any that this daemon watches."""
        while not (owned := self._owned_parts()):  # noqa: ASYNC110 -- leases end by the clock
            await asyncio.sleep(OWNERSHIP_INTERVAL)
        return owned

    async def _begin(self, owned: Mapping[int, int]) -> None:
        """With parts that this daemon did not watch before."""
        self._watcher.pause()
        heard_at = await self._read_listening(owned.keys() - self._parts.keys())
        self._listening_until = min(heard_at, self._listening_until) if self._parts else heard_at
        self._parts = owned
        self._has_parts.set()
        self.api.rules_changed.set()

    async def _follow_ownership(self) -> None:
        """Return when there is nothing to watch, or all that is stored has to be read again."""
        while True:
            await asyncio.sleep(OWNERSHIP_INTERVAL)
            owned = self._owned_parts()
            if owned == self._parts:
                continue
            is_gain = bool(owned.keys() - self._parts.keys())
            was_lost = any(owned.get(part, term) != term for part, term in self._parts.items())
            if not owned or was_lost or (is_gain and self._watcher.watches_all):
                return
            if is_gain:
                await self._begin(owned)
            else:
                self._parts = owned
                self.api.rules_changed.set()

    def _owned_parts(self) -> Mapping[int, int]:
        """Parts of the topics that are this daemon's to watch, with their terms."""
        leases = map(of_topic_part, range(TOPIC_PARTS))
        return {lease.id: self._ownership.term(lease) for lease in leases if self._ownership.owns(lease)}

    async def _follow_rules(self) -> None:
        while True:
            await self._has_parts.wait()
            self.api.rules_changed.clear()
            parts, began = self._parts, self._clock.monotonic()
            limit = (self._config.watched_topics + 1) * TOPIC_PARTS // max(1, len(parts))
            try:
                topics = await self._store.watched_topics(limit)
            except StoreError as error:
                log.error("topics of statements wait for the store: %s", error)
                await asyncio.sleep(STORE_PAUSE)
                continue
            if parts is not self._parts:
                continue
            is_all = len(topics) < limit
            self._watcher.watch(
                [topic for topic in topics if topic_part(topic) in parts] if is_all else topics
            )
            pause = max(self._topics_interval, READING_SHARE * (self._clock.monotonic() - began))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
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
