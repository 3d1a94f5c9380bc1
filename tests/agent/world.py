"""What tests of the agent need: short deadlines, a device, and waiting for what real servers do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from agent.agent import Agent, AgentConfig
from agent.records import Mode, Token
from agent.supervisor import SupervisorConfig
from ntf_demo.demo import Playground
from ntf_demo.fake_push.recorder import RecordedPush
from protocol.device_token import ApnsToken, Provider
from protocol.statuses import TokenStatus
from smp_client.requests import SessionConfig

DEADLINE = 60.0
DEVICE = ApnsToken(Provider.APNS_TEST, b"a1" * 32)
OTHER_DEVICE = ApnsToken(Provider.APNS_TEST, b"b2" * 32)

FAST = SupervisorConfig(first_retry=0.02, longest_retry=0.1)

T = TypeVar("T")


class Clock:
    """Real time, and jumps."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return datetime.now(UTC).timestamp() + self.ahead


def agent_config(folder: Path, clock: Clock | None = None) -> AgentConfig:
    return AgentConfig(
        folder=folder,
        session=SessionConfig(connect=10.0, answer=10.0),
        supervisor=FAST,
        now=clock or Clock(),
    )


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


async def verification(world: Playground, after: int = 0) -> RecordedPush:
    return await arrives(world, lambda push: '"verification"' in push.body, after)


async def verified(
    world: Playground, agent: Agent, mode: Mode = Mode.INSTANT, device: ApnsToken = DEVICE
) -> TokenStatus:
    """Register and answer the verification push."""
    before = len(world.accepted())
    await agent.register(device, mode, world.server.address)
    await agent.on_push((await verification(world, before)).body)
    return (await known_token(agent)).status


async def known_token(agent: Agent) -> Token:
    token = await agent.token()
    assert token is not None
    return token


async def subscribed(world: Playground, agent: Agent, *connection_ids: int) -> None:
    """Wait until the router would tell the notification server about these connections."""
    async with asyncio.timeout(DEADLINE):
        await agent.settled()

    async def watched() -> bool:
        rows = {row.connection_id: row.notifier_id for row in await agent.subscriptions()}
        return {
            rows[connection_id] for connection_id in connection_ids
        } <= world.router.subscribed_notifiers()

    await until(watched)
