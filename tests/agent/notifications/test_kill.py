"""A phone that dies at any commit, or when any answer of a server is lost, goes on from its file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.duplex.events import Fetched, MessageReceived, ServerUp
from agent.duplex.replies import RouterRefused
from agent.duplex.store import DuplexStore
from agent.errors import Stopped
from agent.notifications.records import Mode, SubAction
from ntf_demo.demo import Playground
from protocol.addresses import NtfServer, SmpServer
from protocol.statuses import TokenStatus
from tests.agent.duplex.test_kill import Killed, MortalStore, mortal, until_dead
from tests.agent.duplex.world import Person, connect
from tests.agent.notifications.world import (
    DEVICE,
    OTHER_DEVICE,
    known_token,
    message_push,
    phone,
    settle,
    until,
    verification,
    verified,
    watched,
)
from tests.agent.proxy import LossyProxy, lossy_proxy

BODIES = [b"one", b"two", b"three"]
ALL_QUEUES = '{"checkMessages":true}'


@dataclass
class Life:
    """One phone over all its restarts."""

    world: Playground
    path: Path
    router: SmpServer
    server: NtfServer
    read: list[bytes] = field(default_factory=list)

    @asynccontextmanager
    async def phone(
        self, store: type[DuplexStore] = DuplexStore, *, asleep: bool = False
    ) -> AsyncIterator[Person]:
        async with phone(self.path, self.router, asleep=asleep, store=store) as alice:
            yield alice

    async def until_killed(
        self,
        kind: type[MortalStore],
        script: Callable[[Person], Awaitable[None]],
        *,
        asleep: bool = False,
    ) -> None:
        try:
            async with self.phone(kind, asleep=asleep) as alice:
                await until_dead(kind, script(alice))
        except* (Killed, Stopped):
            pass
        assert kind.dead.is_set(), "it never came so far"

    async def set_up(self, alice: Person) -> None:
        """What an app does at every start, from whatever state it finds."""
        notifications, pushes = alice.agent.notifications, len(self.world.accepted())
        if await notifications.register(DEVICE, Mode.INSTANT, self.server) is not TokenStatus.ACTIVE:
            await notifications.on_push((await verification(self.world, pushes)).body)
        if not await alice.agent.connections():
            await alice.agent.create_invitation(pq=False)
        await watched(self.world, alice)
        await settle(alice)

    async def read_all(self, alice: Person) -> None:
        """What a push leads to: everything that waits."""
        await alice.agent.notifications.on_push(ALL_QUEUES)
        while not isinstance(event := await alice.agent.next_event(), Fetched):
            if isinstance(event, MessageReceived):
                self.read.append(event.body)
                await alice.agent.ack(event.connection_id, event.message_id)

    async def is_set_up(self) -> None:
        """Everything is as if nobody had ever died."""
        async with self.phone() as alice:
            await self.set_up(alice)
            token = await known_token(alice.agent.notifications)
            (row,) = await alice.agent.notifications.subscriptions()
        assert (token.status, token.is_unfinished) == (TokenStatus.ACTIVE, False)
        assert row.action is SubAction.NTF_CHECK
        assert row.notifier_id is not None
        queue = self.world.router.state.queues.by_notifier(row.notifier_id)
        assert queue is not None
        assert queue.notifier is not None
        assert queue.notifier.key == row.notifier_key.public
        assert (await self.world.server.store.counts()).tokens == 1

    async def has_ended(self) -> None:
        """After one more run there is no notifier anywhere."""
        async with self.phone() as alice:
            await settle(alice)
            assert await alice.agent.notifications.subscriptions() == []
        assert [queue.notifier for queue in self.world.router.state.queues] == [None]


@pytest.fixture
async def life(world: Playground, tmp_path: Path) -> Life:
    return Life(world, tmp_path / "phone.db", world.router.address, world.server.address)


both_sides = pytest.mark.parametrize("before", [False, True], ids=["after", "before"])


@asynccontextmanager
async def dying_with_an_answer(life: Life, kind: type[MortalStore], side: str) -> AsyncIterator[LossyProxy]:
    """Everything goes through proxies; when one loses an answer, the phone dies too."""
    async with AsyncExitStack() as stack:
        to_router = await stack.enter_async_context(lossy_proxy(life.router))
        to_server = await stack.enter_async_context(lossy_proxy(life.server))
        life.router, life.server = to_router.in_front_of(life.router), to_server.in_front_of(life.server)
        proxy = to_router if side == "router" else to_server

        def die() -> None:
            kind.lives_for = 0
            kind.dead.set()

        proxy.on_loss = die
        yield proxy


# Registering and subscribing


@both_sides
@pytest.mark.parametrize("commits", range(1, 9))
async def test_killed_at_a_commit_while_it_is_set_up(life: Life, commits: int, before: bool) -> None:
    await life.until_killed(mortal(commits, before), life.set_up)
    await life.is_set_up()


@pytest.mark.parametrize(
    ("side", "answers"), [*(("router", n) for n in range(3)), *(("server", n) for n in range(3))]
)
async def test_killed_with_an_answer_while_it_is_set_up(life: Life, side: str, answers: int) -> None:
    kind = mortal(10_000, True)
    async with dying_with_an_answer(life, kind, side) as proxy:
        proxy.lose(answers)
        await life.until_killed(kind, life.set_up)
        assert proxy.lost == 1
        await life.is_set_up()


# The end


async def to_periodic(life: Life, alice: Person) -> None:
    await alice.agent.notifications.register(DEVICE, Mode.PERIODIC, life.server)


async def switch_off(life: Life, alice: Person) -> None:
    (connection,) = await alice.agent.connections()
    await alice.agent.notifications.set_wanted(connection.connection_id, False)


async def give_up(life: Life, alice: Person) -> None:
    await alice.agent.notifications.delete()


@both_sides
@pytest.mark.parametrize("commits", [1, 2])
@pytest.mark.parametrize("change", [to_periodic, switch_off, give_up])
async def test_killed_while_notifications_end(
    life: Life, change: Callable[[Life, Person], Awaitable[None]], commits: int, before: bool
) -> None:
    async with life.phone() as alice:
        await life.set_up(alice)
    kind = mortal(10_000, before)

    async def script(alice: Person) -> None:
        await settle(alice)
        kind.lives_for = kind.used + commits
        await change(life, alice)
        await settle(alice)

    await life.until_killed(kind, script)
    if before and commits == 1:  # nobody can know what was wanted
        async with life.phone() as alice:
            await change(life, alice)
    await life.has_ended()
    if change is give_up:
        assert (await life.world.server.store.counts()).tokens == 0


async def delete_contact(alice: Person) -> None:
    for connection in await alice.agent.connections():
        if not connection.deleted:
            await alice.agent.delete(connection.connection_id)
    await settle(alice)


async def contact_is_gone(life: Life) -> None:
    """Without another word of the application, unless nothing was stored of its first one."""
    async with life.phone() as alice:
        if any(not connection.deleted for connection in await alice.agent.connections()):
            await alice.agent.delete(1)

        async def is_gone() -> bool:
            counts = await life.world.server.store.counts()
            left = (len(life.world.router.state.queues), counts.subscriptions)
            return left == (0, 0) and not await alice.agent.connections()

        await until(is_gone)


@both_sides
@pytest.mark.parametrize("commits", range(1, 6))
async def test_killed_while_a_contact_is_deleted(life: Life, commits: int, before: bool) -> None:
    async with life.phone() as alice:
        await life.set_up(alice)
    kind = mortal(10_000, before)

    async def script(alice: Person) -> None:
        await settle(alice)
        kind.lives_for = kind.used + commits
        await delete_contact(alice)

    await life.until_killed(kind, script)
    await contact_is_gone(life)


@pytest.mark.parametrize("side", ["router", "server"])
async def test_killed_with_an_answer_while_a_contact_is_deleted(life: Life, side: str) -> None:
    kind = mortal(10_000, True)
    async with dying_with_an_answer(life, kind, side) as proxy:
        async with life.phone() as alice:
            await life.set_up(alice)

        async def script(alice: Person) -> None:
            await alice.event(ServerUp)
            await settle(alice)
            proxy.lose()
            await delete_contact(alice)

        await life.until_killed(kind, script)
        assert proxy.lost == 1
        await contact_is_gone(life)


# Another device token


async def replace_device(life: Life, alice: Person) -> None:
    await alice.agent.notifications.register(OTHER_DEVICE, Mode.INSTANT, life.server)


async def device_is_replaced(life: Life, pushes: int) -> None:
    """The agent finishes what was stored, and never takes the token for active before the server does."""
    async with life.phone() as alice:
        notifications = alice.agent.notifications
        if (await known_token(notifications)).replacement is None:
            await replace_device(life, alice)
        await settle(alice)
        assert (await known_token(notifications)).status is TokenStatus.REGISTERED

        async def is_active() -> bool:
            """A replacement that was repeated has another code: the push of the first one is outdated."""
            for push in life.world.accepted()[pushes:]:
                if '"verification"' in push.body and push.token == OTHER_DEVICE.token.decode():
                    with suppress(RouterRefused):
                        await notifications.on_push(push.body)
            return (await known_token(notifications)).status is TokenStatus.ACTIVE

        await until(is_active)
        token = await known_token(notifications)
        assert (token.status, token.device_token) == (TokenStatus.ACTIVE, OTHER_DEVICE)
        assert await notifications.check() is TokenStatus.ACTIVE
        await watched(life.world, alice)
    assert (await life.world.server.store.counts()).tokens == 1


@both_sides
@pytest.mark.parametrize("commits", [1, 2])
async def test_killed_while_the_device_is_replaced(life: Life, commits: int, before: bool) -> None:
    async with life.phone() as alice:
        await life.set_up(alice)
    pushes, kind = len(life.world.accepted()), mortal(10_000, before)

    async def script(alice: Person) -> None:
        await settle(alice)
        kind.lives_for = kind.used + commits
        await replace_device(life, alice)

    await life.until_killed(kind, script)
    await device_is_replaced(life, pushes)


async def test_killed_with_the_answer_to_the_replacement(life: Life) -> None:
    kind = mortal(10_000, True)
    async with dying_with_an_answer(life, kind, "server") as proxy:
        async with life.phone() as alice:
            await life.set_up(alice)
        pushes = len(life.world.accepted())

        async def script(alice: Person) -> None:
            await settle(alice)
            proxy.lose()
            await replace_device(life, alice)

        await life.until_killed(kind, script)
        assert proxy.lost == 1
        await device_is_replaced(life, pushes)


# Sleeping


@asynccontextmanager
async def three_messages_wait(life: Life, bob: Person) -> AsyncIterator[None]:
    async with life.phone() as alice:
        await verified(life.world, alice.agent.notifications, server=life.server)
        _, his = await connect(alice, bob, pq=False)
        await watched(life.world, alice)
        await settle(alice)
    before = len(life.world.accepted())
    for body in BODIES:
        await bob.agent.send(his, body)
    await settle(bob)
    await message_push(life.world, before)
    yield
    async with life.phone(asleep=True) as alice:
        await life.read_all(alice)
    once = list(dict.fromkeys(life.read))
    assert once == BODIES
    assert len(life.read) - len(once) <= 1, "only the one whose ACK died may be shown again"
    assert not [queue for queue in life.world.router.state.queues if queue.messages]


@both_sides
@pytest.mark.parametrize("commits", range(1, 8))
async def test_killed_at_a_commit_while_it_reads(life: Life, bob: Person, commits: int, before: bool) -> None:
    async with three_messages_wait(life, bob):
        await life.until_killed(mortal(commits, before), life.read_all, asleep=True)


@pytest.mark.parametrize("answers", range(7))
async def test_killed_with_an_answer_while_it_reads(life: Life, bob: Person, answers: int) -> None:
    kind = mortal(10_000, True)
    async with dying_with_an_answer(life, kind, "router") as proxy, three_messages_wait(life, bob):
        proxy.lose(answers)
        await life.until_killed(kind, life.read_all, asleep=True)
        assert proxy.lost == 1


@pytest.mark.parametrize("answers", range(7))
async def test_answer_lost_while_it_reads(life: Life, bob: Person, answers: int) -> None:
    async with dying_with_an_answer(life, mortal(10_000, True), "router") as proxy:
        proxy.on_loss = lambda: None
        async with three_messages_wait(life, bob):
            proxy.lose(answers)
            async with life.phone(asleep=True) as alice:
                await life.read_all(alice)
            assert proxy.lost == 1
            assert life.read == BODIES
