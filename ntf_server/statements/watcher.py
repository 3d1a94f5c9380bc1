"""Keeps the topics that rules name subscribed at the statement store's node, whatever happens to either."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ntf_server.metrics import counter, gauge
from ntf_server.statements.node_client import NodeClient, NodeError, NodeSilent, OnStatements, connected
from ntf_server.statements.topic_groups import TopicGroups
from smp_client.backoff import Backoff
from transport.cancellation import TaskGroup, raise_if_cancelled

logger = logging.getLogger(__name__)

FIRST_DELAY = 1.0
LONGEST_DELAY = 30.0

CONNECTED = gauge("statements_connected", "1: connected to the statement store's node")
CONNECTS = counter("statements_connects", "Connections to the statement store's node")
SUBSCRIPTIONS = gauge("statements_subscriptions", "Subscriptions at the statement store's node")
TOPICS = gauge("statements_topics", "Topics that rules name")

Group = frozenset[bytes] | None
"Topics of one subscription; None: all statements there are."


class NewRules(Protocol):
    """Rules of which it is not known what the node stored before them."""

    async def begin_baseline(self, watched: Collection[bytes] | None) -> list[bytes]:
        """Their topics, as many as fit in a subscription; `watched`: no others, None: any."""

    async def settle(self, topics: Sequence[bytes]) -> None:
        """All that the node had stored of the topics was taken."""


class TopicWatcher:
    """Run `run()`; tell it the topics with `watch`, at any time."""

    def __init__(
        self,
        url: str,
        on_statements: OnStatements,
        *,
        most_topics: int,
        new_rules: NewRules | None = None,
        on_silence: Callable[[float], None] = lambda seconds: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`on_silence` hears for how many seconds the watcher only seemed to listen."""
        self._new_rules = new_rules
        self._on_silence = on_silence
        self._url = url
        self._on_statements = on_statements
        self._most_topics = most_topics
        self._backoff = Backoff(FIRST_DELAY, LONGEST_DELAY, chance)
        self._topics: frozenset[bytes] = frozenset()
        self._changed = asyncio.Event()
        self.is_listening = False
        "All topics are subscribed, and what the node had stored was taken."
        self.is_away = False
        "The last connection failed or ended, and there is no other one yet."
        self._is_complete = True

    @property
    def watches_all(self) -> bool:
        """There are so many topics that the node is asked for all statements."""
        return len(self._topics) > self._most_topics

    def pause(self) -> None:
        """More topics are this daemon's to watch: it does not listen until `watch` has named them."""
        self._is_complete = self.is_listening = False

    def watch(self, topics: Collection[bytes]) -> None:
        """From now on exactly these."""
        self._is_complete = True
        self._topics = frozenset(topics)
        TOPICS.set(len(self._topics))
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        self.is_away = False
        while True:
            try:
                async with connected(self._url, self._on_statements) as client:
                    CONNECTS.inc()
                    await self._serve(client)
            except NodeError as error:
                logger.warning("statement store: %s; trying again", error)
                self.is_away = True
                if isinstance(error, NodeSilent) and self.is_listening:
                    self._on_silence(error.seconds)
            finally:
                self.is_listening = False
                CONNECTED.set(0)
                SUBSCRIPTIONS.set(0)
            await asyncio.sleep(self._backoff.next())

    async def _serve(self, client: NodeClient) -> None:
        """Ends with NodeError, when the connection does."""
        try:
            async with TaskGroup() as tasks:
                tasks.create_task(client.run(), name="statement store")
                tasks.create_task(self._keep_subscribed(client), name="statement store subscriptions")
        except ExceptionGroup as failed:
            raise_if_cancelled()
            raise failed.exceptions[0] from None

    async def _keep_subscribed(self, client: NodeClient) -> None:
        groups = TopicGroups()
        names: dict[Group, str] = {}
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            topics = self._topics
            if self.watches_all:
                await _change(client, names, [None], [group for group in names if group is not None])
                groups = TopicGroups()
            else:
                changes = groups.set(topics)
                ended = [*changes.ended, *([None] if None in names else [])]
                await _change(client, names, changes.started, ended)
            SUBSCRIPTIONS.set(len(names))
            CONNECTED.set(1)
            self._backoff.reset()
            for name in names.values():
                await client.replayed(name)
            self.is_away = False
            if self._is_complete and not self._changed.is_set():
                self.is_listening = True
            if self._new_rules is not None:
                await self._read_baselines(client, self._new_rules, None if None in names else topics)

    async def _read_baselines(
        self, client: NodeClient, new_rules: NewRules, watched: Collection[bytes] | None
    ) -> None:
        """What the node stores of the topics of new rules, in a subscription of its own: the topics are
        watched, so that what comes meanwhile is known to be new."""
        while topics := await new_rules.begin_baseline(watched):
            name = await client.subscribe(topics)
            await client.replayed(name)
            await client.unsubscribe(name)
            await new_rules.settle(topics)


async def _change(
    client: NodeClient, names: dict[Group, str], started: Collection[Group], ended: Collection[Group]
) -> None:
    """First the new ones, so that no topic is unwatched in between: what comes twice is pushed once."""
    for group in started:
        if group not in names:
            names[group] = await client.subscribe(group)
    for group in ended:
        await client.unsubscribe(names.pop(group))
