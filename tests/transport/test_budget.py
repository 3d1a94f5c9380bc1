"""CPU time is shared out fairly between sources, and charged to them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from transport import budget as module
from transport.budget import GRANTS, SLICE, TURN, BudgetConfig, CpuBudget
from transport.limits import Rate

DEADLINE = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def work(
    budget: CpuBudget, source: str, done: list[str], seconds: float = SLICE, times: int = 1
) -> None:
    """Slices that cost so much each."""
    for _ in range(times):
        with await budget.take(source):
            done.append(source)
        budget.charge(source, seconds)


async def test_a_quiet_source_goes_before_busy_ones() -> None:
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for _ in range(200):
            tasks.create_task(work(budget, "busy", done))
        while len(done) < 20:
            await asyncio.sleep(0)
        before = len(done)
        await tasks.create_task(work(budget, "quiet", done))
        assert done.index("quiet") <= before + 4
        assert len(done) < 50
    assert done.count("busy") == 200


async def test_sources_get_the_same_however_many_connections_they_have() -> None:
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(work(budget, "many", done, times=4))
        for _ in range(10):
            tasks.create_task(work(budget, "few", done, times=20))
    assert abs(done[:300].count("few") - done[:300].count("many")) < 15


async def test_thousands_of_sources_of_one_network_get_its_part() -> None:
    """A /48 of IPv6 has 65,536 sources: each is new, and none has used anything."""
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for number in range(300):
            tasks.create_task(work(budget, f"2001:db8:1:{number:x}::/64", done))
        for _ in range(3):
            tasks.create_task(work(budget, "2001:db8:1:ffff::/64", done))
        while len(done) < 20:
            await asyncio.sleep(0)
        await tasks.create_task(work(budget, "2001:db8:2::/64", done))
        assert len(done) < 50
    assert len(done) == 304


async def test_what_costs_more_comes_less_often() -> None:
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(work(budget, "dear", done, SLICE, 10))
            tasks.create_task(work(budget, "cheap", done, SLICE / 4, 10))
    first = done[:100]
    assert first.count("cheap") > 1.5 * first.count("dear") > 20


async def test_sources_of_one_network_take_turns() -> None:
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(work(budget, "2001:db8:1:1::/64", done))
        while len(done) < 10:
            await asyncio.sleep(0)
        before = len(done)
        await tasks.create_task(work(budget, "2001:db8:1:2::/64", done))
        assert len(done) <= before + 8


async def test_everything_else_goes_on_between_slices() -> None:
    """A turn of the event loop has no more than a few slices, and fewer after dear ones."""
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    turns = 0
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(work(budget, str(number), done, TURN))
        while len(done) < 40:
            turns += 1
            await asyncio.sleep(0)
    assert turns >= 30


async def test_the_block_is_charged_by_the_cpu_time_it_took() -> None:
    budget = CpuBudget(BudgetConfig(share=0.5, burst=0.05))
    with await budget.take("a") as slice_:
        assert not slice_.is_over
        until = time.thread_time() + 0.06
        while time.thread_time() < until:
            pass
        assert slice_.is_over
    assert not budget.has_share("a")
    assert budget.has_share("b")


async def test_a_source_above_its_share_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    clock, done = Clock(), list[str]()
    budget = CpuBudget(BudgetConfig(share=0.5, burst=1.0), clock)
    budget.charge("busy", 2.0)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(work(budget, "busy", done)) for _ in range(2)]
        await tasks.create_task(work(budget, "other", done))
        for _ in range(20):
            await asyncio.sleep(0)
        assert done == ["other"]
        clock.now += 1.9
        for _ in range(20):
            await asyncio.sleep(0)
        assert done == ["other"]
        clock.now += 0.2
        await asyncio.wait(waiting)
    assert done == ["other", "busy", "busy"]


def goes_at_once(budget: CpuBudget, source: str) -> bool:
    taking = budget.take(source)
    try:
        taking.send(None)
    except StopIteration:
        return True
    taking.close()
    return False


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_who_waits_is_not_overtaken() -> None:
    """By newcomers of another source, while there is time left; and by those of its own."""
    clock, done = Clock(), list[str]()
    budget = CpuBudget(BudgetConfig(share=0.5, burst=1.0), clock)
    budget.charge("used up this turn", TURN)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for _ in range(GRANTS + 1):
            tasks.create_task(work(budget, "waits", done, 0.0))
        await turns(2)
        assert not goes_at_once(budget, "newcomer")
    assert done == ["waits"] * (GRANTS + 1), "the last one has a turn of its own"
    budget.charge("above its share", 2.0)
    assert not goes_at_once(budget, "newcomer"), "so much time has to pass first"
    await turns(int(2.0 / TURN) + 20)
    assert not goes_at_once(budget, "above its share")
    await turns()
    clock.now += 10.0
    assert not goes_at_once(budget, "above its share"), "another of it waits"
    assert goes_at_once(budget, "newcomer")


async def test_idle_time_counts() -> None:
    budget = CpuBudget(BudgetConfig(share=0))
    assert goes_at_once(budget, "a")
    budget.charge("a", 10 * TURN)
    await turns()
    assert goes_at_once(budget, "b")


async def test_one_timer_watches_all_sources_above_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[float]()
    later = loop.call_later

    def counted(delay: float, *arguments: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return later(delay, *arguments)

    monkeypatch.setattr(loop, "call_later", counted)
    monkeypatch.setattr(module, "PAUSE", DEADLINE)
    budget, done = CpuBudget(BudgetConfig(share=0.5, burst=1.0), Clock()), list[str]()
    await work(budget, "a", done, TURN, times=20)
    assert DEADLINE not in timers
    budget.charge("b", 1.1)
    waiting = asyncio.ensure_future(work(budget, "b", done))
    await turns(int(1.1 / TURN) + 20)
    await work(budget, "a", done, TURN, times=20)
    assert timers.count(DEADLINE) == 1
    waiting.cancel()


async def test_there_is_one_turn_of_the_budget_in_a_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    clock, done = Clock(), list[str]()
    budget = CpuBudget(BudgetConfig(share=0.5, burst=1.0), clock)
    ours, next_turn = list[int](), budget._next_turn

    def counted(loop: asyncio.AbstractEventLoop) -> None:
        ours.append(1)
        next_turn(loop)

    monkeypatch.setattr(budget, "_next_turn", counted)
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for number in range(10):
            budget.charge(f"above its share {number}", 1.5)
            tasks.create_task(work(budget, f"above its share {number}", done, TURN))
        await turns(int(15 / TURN))
        for number in range(20):
            tasks.create_task(work(budget, f"busy {number}", done, TURN, 10))
        ours.clear()
        for loops in range(1, 150):
            clock.now += 0.02
            await asyncio.sleep(0)
            assert len(ours) <= loops + 1
    assert len(done) == 210


def test_a_limit_that_is_lifted_holds_nobody() -> None:
    budget = CpuBudget(BudgetConfig(share=0.5, burst=1.0), Clock())
    budget.charge("a", 2.0)
    assert not budget.has_share("a")
    budget.config = BudgetConfig(share=0)
    assert budget.has_share("a")


async def test_who_stops_waiting_keeps_nobody_from_it() -> None:
    budget, done = CpuBudget(BudgetConfig(share=0)), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(budget, "a", done, TURN)) for _ in range(10)]
        lone = tasks.create_task(work(budget, "b", done, TURN))
        await asyncio.sleep(0)
        for worker in (*workers[3:8], lone):
            worker.cancel()
    assert done.count("a") == 5
    await asyncio.wait_for(work(budget, "b", done), DEADLINE)


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_SOURCES", 3)
    budget, done = CpuBudget(), list[str]()
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for number in range(100):  # those that wait are not forgotten
            tasks.create_task(work(budget, str(number), done))
    assert len(done) == 100
    for number in range(100):
        budget.charge(str(number), 0.001)
    assert len(budget._sources) <= 3
    assert budget.authorised("succeeds", succeeded=1, failed=0)
    assert "succeeds" not in budget._sources


def test_hundreds_of_failures_make_a_source_suspect_for_a_while() -> None:
    clock = Clock()
    config = BudgetConfig(
        failures=Rate(per_second=1, burst=100), suspicion=60, admissions=Rate(per_second=1, burst=2)
    )
    budget = CpuBudget(config, clock)
    assert budget.authorised("a", succeeded=10, failed=100)
    assert [budget.admits("a") for _ in range(5)] == [True] * 5
    assert not budget.authorised("a", succeeded=0, failed=1)
    assert [budget.admits("a") for _ in range(5)] == [True, True, False, False, False]
    assert budget.authorised("a", succeeded=5, failed=0)  # an honest client of the same address
    assert not budget.authorised("a", succeeded=0, failed=1)
    assert budget.authorised("b", succeeded=0, failed=1)
    assert budget.admits("b")
    clock.now += 1
    assert budget.admits("a")
    assert not budget.admits("a")
    clock.now += 60
    assert budget.authorised("a", succeeded=0, failed=1)
    assert [budget.admits("a") for _ in range(5)] == [True] * 5


def test_a_success_makes_up_for_a_failure() -> None:
    clock = Clock()
    budget = CpuBudget(BudgetConfig(failures=Rate(per_second=1, burst=100)), clock)
    for _ in range(1000):
        assert budget.authorised("router of many queues", succeeded=9, failed=1)
    for _ in range(1000):
        assert budget.authorised("one after the other", succeeded=0, failed=1)
        assert budget.authorised("one after the other", succeeded=1, failed=0)
    assert budget.authorised("a", succeeded=10_000, failed=100)  # but not in advance
    assert not budget.authorised("a", succeeded=0, failed=1)
