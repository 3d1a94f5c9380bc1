"""Real servers and an agent, or its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.agent import Agent, open_agent
from agent.sessions import Sessions
from agent.store import AgentStore
from ntf_demo.demo import Playground, playground
from smp_client.dialer import Dialer
from smp_client.requests import SessionConfig
from tests.agent.world import agent_config


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Playground]:
    async with playground(tmp_path / "servers") as running:
        yield running


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    async with open_agent(agent_config(tmp_path / "agent")) as opened:
        yield opened


@pytest.fixture
async def bob(tmp_path: Path) -> AsyncIterator[Agent]:
    """Somebody who sends."""
    async with open_agent(agent_config(tmp_path / "bob")) as opened:
        yield opened


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AgentStore]:
    async with AgentStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    made = Sessions(Dialer(), config=SessionConfig(connect=5.0, answer=5.0))
    yield made
    await made.close()
