"""Whatever goes wrong, in whatever order: soon after it ends, what is stored is what is subscribed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ntf_server.clock import SECONDS_PER_DAY
from protocol.encoding import EntityId
from protocol.errors import INTERNAL, SERVICE
from protocol.statuses import SubState
from protocol.versions import VersionRange
from smp_router.load import LoadQueue
from smp_router.router import Router
from store.sqlite import SqliteStore
from tests.ntf_server.subscriber.conftest import DATABASE, QUICK, Daemon, tune
from tests.waiting import until

FAULTS = 14
SETTLED_WITHIN = 25.0
FINAL = (SubState.DELETED, SubState.AUTH)
EAGER = replace(QUICK, ping_interval=0.2)


class Trial:
    """A daemon, a router, and what is done to them; `log` tells how to get there again."""

    def __init__(self, seed: int, daemon: Daemon) -> None:
        self.random = random.Random(seed)
        # A router that forgets what services are makes everything start afresh, which hides lost queues.
        self.versions = [15, 18, 19] if seed % 4 == 3 else [18, 19]
        self.daemon = daemon
        self.log: list[str] = []
        self.queues: list[LoadQueue] = []
        self.given_up: set[EntityId] = set()
        self.router: Router
        self._routers = AsyncExitStack()
        self._daemons = AsyncExitStack()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._routers, self._daemons:
            self.router = await self._routers.enter_async_context(
                Router.start(versions=VersionRange(6, self.random.choice(self.versions)))
            )
            self.address = self.router.address
            await self._daemons.enter_async_context(self.daemon.running())
            await self.add_queues()
            yield

    async def add_queues(self) -> None:
        queues = self.router.load.create_queues(self.random.randint(1, 60))
        self.queues += queues
        await self.daemon.add(self.address, queues)

    async def delete_subscriptions(self) -> None:
        for queue in self.some_queues(5):
            await self.daemon.delete(queue)
            self.given_up.add(queue.notifier_id)

    async def restart_router(self) -> None:
        port, state = self.router.port, self.router.state
        await self._routers.aclose()
        await self.pause()
        versions = VersionRange(6, self.random.choice(self.versions))
        self.router = await self._routers.enter_async_context(
            Router.start(port=port, state=state, versions=versions)
        )

    async def restart_daemon(self) -> None:
        await self._daemons.aclose()
        self.daemon.configure(self.daemon.config)
        await self._daemons.enter_async_context(self.daemon.running())

    async def drop(self) -> None:
        self.router.faults.drop_connections()

    async def refuse(self) -> None:
        self.router.faults.refuse()
        await self.drop()
        await self.pause()
        self.router.faults.refuse(False)

    async def black_hole(self) -> None:
        self.router.faults.black_hole()
        await asyncio.sleep(self.random.uniform(0, 0.7))
        self.router.faults.black_hole(False)

    async def delay(self) -> None:
        self.router.faults.delay(0.05)
        await self.pause()
        self.router.faults.delay(0)

    async def forget_services(self) -> None:
        self.router.faults.forget_services()

    async def change_service_ids(self) -> None:
        self.router.faults.change_service_ids()
        await self.drop()

    async def lose_associations(self) -> None:
        self.router.faults.lose_associations(self.random.choice([0.01, 0.1, 0.5, 1.0]))

    async def delete_queues(self) -> None:
        self.router.faults.delete_queues([queue.notifier_id for queue in self.some_queues(5)])
        await self.drop()

    async def end(self) -> None:
        self.router.faults.send_end([queue.notifier_id for queue in self.some_queues(5)])

    async def deld(self) -> None:
        self.router.faults.send_deld([queue.notifier_id for queue in self.some_queues(5)])

    async def ends(self) -> None:
        self.router.faults.send_ends()

    async def errors(self) -> None:
        command = self.random.choice(["NSUB", "NSUBS"])
        error = self.random.choice([SERVICE, INTERNAL])
        self.router.faults.answer_errors(command, error, self.random.randint(1, 20))

    def some_queues(self, most: int) -> list[LoadQueue]:
        return self.random.sample(self.queues, min(len(self.queues), self.random.randint(1, most)))

    async def pause(self) -> None:
        await asyncio.sleep(self.random.choice([0, 0.01, 0.1, 0.3]))

    async def misfortune(self) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.add_queues,
            self.delete_subscriptions,
            self.restart_router,
            self.restart_daemon,
            self.drop,
            self.refuse,
            self.black_hole,
            self.delay,
            self.forget_services,
            self.change_service_ids,
            self.lose_associations,
            self.delete_queues,
            self.end,
            self.deld,
            self.ends,
            self.errors,
        ]
        kind = self.random.choice(kinds)
        self.log.append(kind.__name__)
        await kind()
        await self.pause()

    def clear_up(self) -> None:
        """The end of all faults; a day later the slow retries are due."""
        for command in ("NSUB", "NSUBS"):
            self.router.faults.answer_errors(command, None)
        self.daemon.clock.ahead += 2 * SECONDS_PER_DAY

    def is_settled(self) -> bool:
        states = self.daemon.states()
        gone = self.given_up | {queue for queue, state in states.items() if state in FINAL}
        alive = {queue for queue, state in states.items() if state is SubState.ACTIVE}
        return alive == states.keys() - gone and alive == self.router.subscribed_notifiers() - gone


@pytest.mark.parametrize(
    ("with_service", "seed"), [(True, seed) for seed in range(8)] + [(False, seed) for seed in range(3)]
)
async def test_after_any_faults_the_store_and_the_router_agree(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_service: bool, seed: int
) -> None:
    tune(monkeypatch, BATCH_SIZE=15, WAITING_LIMIT=25, VERIFY_INTERVAL=0.3, FIRST_LEAVE=0.1)
    daemon = Daemon(tmp_path / DATABASE, store, replace(EAGER, use_service_credentials=with_service))
    trial = Trial(seed, daemon)
    async with trial.running():
        for _ in range(FAULTS):
            await trial.misfortune()
        trial.clear_up()
        try:
            await until(trial.is_settled, SETTLED_WITHIN)
        except TimeoutError:
            pytest.fail(f"not settled after {trial.log}")
