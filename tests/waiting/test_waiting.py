"""Waiting for changes: no change is missed, every waiter wakes, and interrupted work leaves nothing behind."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from neuroshard.waiting import Signal, first_of, next_tick, sleep_to_tick


def test_every_waiting_task_wakes_and_later_waits_need_another_change() -> None:
    async def scenario() -> None:
        signal = Signal()
        woken: list[int] = []

        async def wait(number: int) -> None:
            await signal.wait()
            woken.append(number)
            await signal.wait()
            woken.append(number)

        async with trio.open_nursery() as tasks:
            for number in range(3):
                tasks.start_soon(wait, number)
            await wait_all_tasks_blocked()
            assert woken == []
            signal.notify()
            await wait_all_tasks_blocked()
            assert sorted(woken) == [0, 1, 2]
            signal.notify()
        assert sorted(woken) == [0, 0, 1, 1, 2, 2]

    trio.run(scenario)


def test_a_change_between_noting_the_count_and_waiting_is_not_missed() -> None:
    async def scenario() -> None:
        signal = Signal()
        count = signal.count
        signal.notify()
        with trio.fail_after(1):
            await signal.wait(after=count)
        with trio.move_on_after(0.01) as waiting:
            await signal.wait(after=signal.count)
        assert waiting.cancelled_caught

    trio.run(scenario)


def test_until_waits_through_changes_that_do_not_make_the_condition_true() -> None:
    async def scenario() -> None:
        signal, values, looks = Signal(), [0], list[int]()

        def is_two() -> bool:
            looks.append(values[0])
            return values[0] == 2

        async with trio.open_nursery() as tasks:
            tasks.start_soon(signal.until, is_two)
            for value in (1, 2):
                await wait_all_tasks_blocked()
                values[0] = value
                signal.notify()
        assert looks == [0, 1, 2]

    trio.run(scenario)


def test_work_ends_at_the_next_change_or_returns_its_value() -> None:
    async def scenario() -> None:
        signal, ended = Signal(), list[str | None]()

        async def interrupted() -> None:
            ended.append(await signal.interrupt(lambda: first_of(anyio.sleep_forever)))

        async def value() -> str:
            await anyio.lowlevel.checkpoint()
            return "value"

        async with trio.open_nursery() as tasks:
            tasks.start_soon(interrupted)
            await wait_all_tasks_blocked()
            assert await signal.interrupt(value) == "value"
            assert ended == []
            signal.notify()
        assert ended == [None]
        signal.notify()  # no scope of ended work is left to cancel
        assert await signal.interrupt(value) == "value"

    trio.run(scenario)


def test_a_signal_outside_an_event_loop_can_be_created_and_changed() -> None:
    signal = Signal()
    signal.notify()
    assert signal.count == 1


def test_a_change_of_one_signal_is_a_change_of_the_signals_it_feeds() -> None:
    async def main() -> None:
        request, stage = Signal(), Signal()
        request.feed(stage)
        async with trio.open_nursery() as tasks:
            with trio.fail_after(1):
                tasks.start_soon(stage.wait)
                await wait_all_tasks_blocked()
                request.notify()
        assert (request.count, stage.count) == (1, 1)
        stage.notify()
        assert (request.count, stage.count) == (1, 2)

    trio.run(main)


def test_a_block_is_cancelled_by_the_next_change_and_only_by_that() -> None:
    async def main() -> None:
        signal, reached = Signal(), list[str]()
        signal.notify()
        async with trio.open_nursery() as tasks:
            with signal.cancels() as scope:
                reached.append("begun")
                tasks.start_soon(_notify_soon, signal)
                await trio.sleep_forever()
            assert scope.cancelled_caught
        signal.notify()  # the block has ended: nothing is left to cancel
        assert reached == ["begun"]

    async def _notify_soon(signal: Signal) -> None:
        await wait_all_tasks_blocked()
        signal.notify()

    trio.run(main)


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.3, 0.7, 1.0, 2.0, 15.0])
def test_the_next_tick_is_later_than_now_also_at_a_tick(seconds: float) -> None:
    """0.9 // 0.1 is 8: a look at a tick would come again at once, for ever with a clock that waits for it."""

    async def main() -> None:
        for _ in range(200):
            before, tick = trio.current_time(), next_tick(seconds)
            assert before < tick <= before + seconds * (1 + 1e-9)
            await trio.sleep_until(tick)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_looks_that_began_apart_and_have_other_periods_happen_at_the_same_moments() -> None:
    woken = set[float]()

    async def look(seconds: float) -> None:
        for _ in range(round(60 / seconds)):
            await sleep_to_tick(seconds)
            woken.add(trio.current_time())

    async def main() -> None:
        async with trio.open_nursery() as tasks:
            for begins, seconds in ((0.0, 1.0), (0.3, 1.0), (0.7, 2.0), (1.9, 0.5), (2.2, 10.0)):
                await trio.sleep_until(begins)
                tasks.start_soon(look, seconds)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert all(2 * moment == round(2 * moment) for moment in woken)
