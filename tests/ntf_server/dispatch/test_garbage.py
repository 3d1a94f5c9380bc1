"""What a push needed is freed when it ends, however it ends; and what only a look for cycles finds, soon."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ntf_demo.fake_push.faults import Fault
from ntf_server import memory
from ntf_server.memory import Tidying
from ntf_server.push.http2 import NoAnswer
from ntf_server.push.provider import PushError, detached, unanswered
from tests.ntf_server.dispatch.world import World
from tests.waiting import until


class Knot:
    def __init__(self) -> None:
        self.itself: Knot | None = self


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_young_cycles_are_freed(no_collector: None) -> None:
    knot = weakref.ref(Knot())
    assert knot() is not None
    Tidying().tidy()
    assert knot() is None


def test_old_cycles_are_freed_when_there_are_many(
    no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MORE", 1.0)
    monkeypatch.setattr(memory, "AT_LEAST", 100)
    tidying = Tidying()
    tidying.tidy()
    knots = [Knot() for _ in range(50)]
    gc.collect()  # they are old now
    some = weakref.ref(knots[0])
    knots.clear()
    tidying.tidy()
    assert some() is not None
    more = [Knot() for _ in range(200)]
    tidying.tidy()
    assert len(more) == 200
    tidying.tidy()
    assert some() is None


def errors() -> list[Exception]:
    return [each for each in gc.get_objects() if isinstance(each, NoAnswer | PushError)]


def unanswered_push(body: Knot) -> None:
    try:
        raise NoAnswer("reset by the peer", whole_origin=False)
    except NoAnswer as error:
        raise unanswered(error.reason, whole_origin=error.whole_origin) from None


def test_an_error_that_is_kept_keeps_no_frame_alive(no_collector: None) -> None:
    knot = Knot()
    body = weakref.ref(knot)
    knot.itself = None
    kept = None
    try:
        unanswered_push(knot)
    except PushError as error:
        kept = detached(error)
    del knot
    assert kept is not None
    assert body() is None


@pytest.mark.parametrize(
    "fault",
    [Fault(status=429, reason="TooManyRequests", count=1), Fault(action="reset", count=1)],
    ids=["refused", "reset"],
)
async def test_a_failed_push_leaves_nothing_behind(no_collector: None, world: World, fault: Fault) -> None:
    before = len(errors())  # other tests keep some as examples
    device = await world.add_device(queues=1)
    world.fake.add_fault(fault)
    await world.receive(*device.queues)
    await until(lambda: len(world.lists(device)) == 1)  # the second attempt
    await until(lambda: len(errors()) <= before)
