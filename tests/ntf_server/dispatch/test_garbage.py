"""What a push needed is freed when it ends, however it ends; and what only a look for cycles finds, soon."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_server.memory import tidy
from ntf_server.push.http2 import NoAnswer
from ntf_server.push.provider import PushError
from tests.ntf_server.dispatch.world import World, until


class Knot:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_cycles_are_freed(no_collector: None) -> None:
    knot = weakref.ref(Knot())
    assert knot() is not None
    tidy()
    assert knot() is None


def errors() -> list[Exception]:
    return [each for each in gc.get_objects() if isinstance(each, NoAnswer | PushError)]


@pytest.mark.parametrize(
    "fault", [Fault(status=429, reason="TooManyRequests", count=1), Fault(action="reset", count=1)], ids=str
)
async def test_a_failed_push_leaves_nothing_behind(no_collector: None, world: World, fault: Fault) -> None:
    device = await world.add_device(queues=1)
    world.fake.add_fault(fault)
    await world.receive(*device.queues)
    await until(lambda: len(world.lists(device)) == 1)  # the second attempt
    await until(lambda: not errors())
