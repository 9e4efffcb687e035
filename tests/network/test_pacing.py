from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from neuroshard.network.limits import BURST_SECONDS, UploadPacer


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@given(
    rate=st.floats(1_000, 1e8),
    spenders=st.lists(
        st.tuples(st.floats(0, 3), st.lists(st.integers(1, 100_000), max_size=8)), min_size=1, max_size=5
    ),
)
def test_no_span_of_time_carries_more_than_the_limit(rate: float, spenders: list[tuple[float, list[int]]]) -> None:
    sent: list[tuple[float, int]] = []

    async def scenario() -> None:
        pacer = UploadPacer(rate)

        async def spend(after: float, portions: list[int]) -> None:
            await anyio.sleep(after)
            for portion in portions:
                await pacer.spend(portion)
                sent.append((anyio.current_time(), portion))

        async with anyio.create_task_group() as tasks:
            for after, portions in spenders:
                tasks.start_soon(spend, after, portions)

    run(scenario)
    largest = max((portion for _, portion in sent), default=0)
    for first, (start, _) in enumerate(sent):
        total = 0
        for time, portion in sent[first:]:
            total += portion
            assert total <= rate * (time - start + BURST_SECONDS) + largest + 1


def test_what_is_always_there_leaves_at_the_limit() -> None:
    async def scenario() -> None:
        pacer = UploadPacer(1000)
        started = anyio.current_time()
        for _ in range(100):
            await pacer.spend(100)
        assert 9.5 <= anyio.current_time() - started <= 10

    run(scenario)


def test_without_a_limit_nothing_waits() -> None:
    async def scenario() -> None:
        pacer = UploadPacer()
        for _ in range(10):
            await pacer.spend(10**12)
        assert anyio.current_time() == 0
        assert pacer.bytes_per_second is None
        assert pacer.portion(10**12) == 10**12

    run(scenario)


def test_the_limit_can_change() -> None:
    async def scenario() -> None:
        pacer = UploadPacer(100)
        await pacer.spend(100)
        pacer.limit(10_000)
        await pacer.spend(10_000)
        started = anyio.current_time()
        await pacer.spend(1)
        assert anyio.current_time() - started == pytest.approx(1)

    run(scenario)


def test_a_limit_holds_again_after_a_time_without_one() -> None:
    async def scenario() -> None:
        pacer = UploadPacer(1000)
        await pacer.spend(1000)
        pacer.limit(None)
        await pacer.spend(10**9)
        pacer.limit(1000)
        started = anyio.current_time()
        for _ in range(11):
            await pacer.spend(1000)
        assert anyio.current_time() - started >= 10 - BURST_SECONDS

    run(scenario)


@pytest.mark.parametrize(("later", "seconds"), [(10_000, 0.1), (None, 0.0), (100, 10.0)])
def test_what_was_granted_is_paid_for_at_the_new_limit(later: float | None, seconds: float) -> None:
    async def scenario() -> None:
        pacer = UploadPacer(1000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pacer.spend, 1000 + int(1000 * BURST_SECONDS))  # leaves at once, paid for after 1 s
            await anyio.wait_all_tasks_blocked()
        pacer.limit(later)
        assert pacer.seconds_behind() == pytest.approx(seconds)

    run(scenario)


def test_portions_are_short_under_a_small_limit() -> None:
    assert UploadPacer(1_000_000).portion(1 << 20) == 250_000
    assert UploadPacer(1_000).portion(1 << 20) == 16 * 1024
    assert UploadPacer(1_000).portion(10) == 10


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_limit_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        UploadPacer(rate)
