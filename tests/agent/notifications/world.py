"""What tests of notifications need: a device, a clock that jumps, and waiting for what real servers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from agent.duplex.agent import open_duplex
from agent.duplex.events import Fetched, MessageReceived
from agent.duplex.store import DuplexStore
from agent.notifications.notifications import Notifications
from agent.notifications.records import Mode, Subscription, Token
from agent.notifications.subscribing import NotificationConfig
from ntf_demo.demo import Playground
from ntf_demo.fake_push.recorder import RecordedPush
from protocol.addresses import NtfServer, SmpServer
from protocol.device_token import ApnsToken, Provider
from protocol.statuses import TokenStatus
from tests.agent.duplex.world import DEADLINE, Person, config

DEVICE = ApnsToken(Provider.APNS_TEST, b"a1" * 32)
OTHER_DEVICE = ApnsToken(Provider.APNS_TEST, b"b2" * 32)

T = TypeVar("T")


class Clock:
    """Real time, and jumps."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return datetime.now(UTC).timestamp() + self.ahead


@asynccontextmanager
async def phone(
    path: Path,
    *servers: SmpServer,
    asleep: bool = False,
    clock: Clock | None = None,
    times: NotificationConfig | None = None,
    store: type[DuplexStore] = DuplexStore,
) -> AsyncIterator[Person]:
    made = replace(
        config(path, *servers),
        subscribe=not asleep,
        now=clock or Clock(),
        notifications=times or NotificationConfig(),
    )
    async with open_duplex(made, store) as agent:
        yield Person(agent)


async def until(condition: Callable[[], Awaitable[T | None]]) -> T:
    """Wait for something true."""
    async with asyncio.timeout(DEADLINE):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
    return found


async def arrives(world: Playground, matches: Callable[[RecordedPush], bool], after: int = 0) -> RecordedPush:
    """The first push the provider took that matches, behind the first `after` ones."""

    async def find() -> RecordedPush | None:
        return next(filter(matches, world.accepted()[after:]), None)

    return await until(find)


async def verification(world: Playground, after: int = 0, device: ApnsToken = DEVICE) -> RecordedPush:
    token = device.token.decode()
    return await arrives(world, lambda push: '"verification"' in push.body and push.token == token, after)


async def message_push(world: Playground, after: int = 0) -> RecordedPush:
    return await arrives(world, lambda push: '"message"' in push.body, after)


async def verified(
    world: Playground,
    notifications: Notifications,
    mode: Mode = Mode.INSTANT,
    device: ApnsToken = DEVICE,
    server: NtfServer | None = None,
) -> TokenStatus:
    """Register and answer the verification push."""
    before = len(world.accepted())
    await notifications.register(device, mode, server or world.server.address)
    await notifications.on_push((await verification(world, before, device)).body)
    return (await known_token(notifications)).status


async def known_token(notifications: Notifications) -> Token:
    token = await notifications.token()
    assert token is not None
    return token


async def settle(person: Person) -> None:
    async with asyncio.timeout(DEADLINE):
        await person.agent.settled()


async def watched(world: Playground, person: Person, count: int = 1) -> list[Subscription]:
    """Wait until the router would tell the notification server about so many queues."""

    async def are_watched() -> list[Subscription]:
        rows = await person.agent.notifications.subscriptions()
        known = world.router.subscribed_notifiers()
        return rows if len(rows) == count and all(row.notifier_id in known for row in rows) else []

    return await until(are_watched)


async def fetched(person: Person) -> list[bytes]:
    """What the pushes so far have led to: read, and acknowledged."""
    bodies: list[bytes] = []
    async with asyncio.timeout(DEADLINE):
        while True:
            event = person.unseen.pop(0) if person.unseen else await person.agent.next_event()
            if isinstance(event, Fetched):
                return bodies
            if isinstance(event, MessageReceived):
                bodies.append(event.body)
                await person.agent.ack(event.connection_id, event.message_id)
