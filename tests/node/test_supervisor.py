from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from neuroshard.network.tasks import LONGEST_PAUSE_SECONDS, cause_words, keep_running, pause_after


def run_virtual(main: object, *arguments: object) -> object:
    return trio.run(main, *arguments, clock=MockClock(autojump_threshold=0))  # pyright: ignore


def test_failing_work_is_told_and_tried_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    starts: list[float] = []
    told: list[tuple[str, float]] = []

    async def work() -> None:
        starts.append(trio.current_time())
        if len(starts) < 5:
            raise OSError("no route")

    async def main() -> None:
        await keep_running("The network", work, lambda reason, seconds: told.append((reason, seconds)))

    run_virtual(main)
    gaps = [b - a for a, b in pairwise(starts)]
    assert gaps == pytest.approx([1, 2, 4, 8])
    assert told == [("no route", 1), ("no route", 2), ("no route", 4), ("no route", 8)]


def test_work_that_lived_long_is_tried_again_soon(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    told: list[float] = []
    lives = iter([1.0, 1.0, 1000.0, None])

    async def work() -> None:
        life = next(lives)
        if life is not None:
            await trio.sleep(life)
            raise RuntimeError("gone")

    async def main() -> None:
        await keep_running("The network", work, lambda _reason, seconds: told.append(seconds))

    run_virtual(main)
    assert told == [1, 2, 1]


def test_cancelling_ends_it() -> None:
    async def main() -> bool:
        with trio.move_on_after(5) as scope:
            await keep_running("The network", trio.sleep_forever, lambda _reason, _seconds: None)
        return scope.cancelled_caught

    assert run_virtual(main)


def test_pauses_are_bounded() -> None:
    assert max(pause_after(failures) for failures in range(1, 200)) == LONGEST_PAUSE_SECONDS


def test_the_reason_is_the_first_cause_inside_groups() -> None:
    assert cause_words(ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("port in use")])])) == "port in use"
