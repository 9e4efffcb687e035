from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    RefusedTensorError,
    Retry,
    SpoiltMicrobatchError,
    StageBusyError,
    UnknownMicrobatchError,
)
from neuroshard.pipeline.sessions import SessionLimits
from neuroshard.pipeline.stage_server import FEWEST, MEDIANS, SPOILT_MICROBATCHES, GradientLimit, ServiceLimits
from neuroshard.types import NodeId
from tests.worlds.stages import (
    ARCHITECTURE,
    HIDDEN,
    LABELS,
    OTHER,
    activations,
    gradients,
    key,
    play,
    refused_in_the_end,
    service_of,
)

LIMITS = ServiceLimits(SessionLimits(sessions=4, sessions_of_driver=2, open_microbatches=4, open_of_driver=3))


def test_a_driver_has_a_bounded_share_and_the_others_go_on(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, sequences_per_step=100, limits=LIMITS)

    async def scenario(clock: MockClock) -> None:
        for number in range(3):
            await service.forward(key(number), activations())
        assert "3 microbatches open" in await refused_in_the_end(clock, service, key(3))
        await service.forward(key(0, driver=OTHER), activations())
        assert "4 microbatches are open" in await refused_in_the_end(clock, service, key(1, driver=OTHER))
        async with trio.open_nursery() as tasks:  # one that waits gets the place of one that ends
            tasks.start_soon(service.forward, key(1, driver=OTHER), activations())
            await wait_all_tasks_blocked()
            await service.backward(key(0), activations())
        assert service.counts.microbatches == 1

    play(scenario)


def test_a_driver_that_opens_a_million_sessions_gets_a_few(compute: ComputeThread) -> None:
    limits = replace(LIMITS, wait_seconds=0.0)
    service = service_of(compute, 1, 2, sequences_per_step=100, limits=limits)

    async def main() -> None:
        await service.forward(key(0, driver=OTHER), activations())
        refused = 0
        for session in range(1000):
            try:
                await service.forward(key(0, session), activations())
            except StageBusyError:
                refused += 1
        assert refused == 998
        assert service.session_count == 3
        await service.forward(key(1, driver=OTHER), activations())
        for session in range(10_000):  # nothing grows, and what is open stays open
            service.close(NodeId("stranger"), session)
            service.close(NodeId(f"stranger {session}"), 1)
        await service.backward(key(1, driver=OTHER), activations())
        assert service.session_count == 3

    trio.run(main)


def test_waiting_callers_are_bounded(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, limits=replace(LIMITS, waiting=2), is_open=False)

    async def scenario(clock: MockClock) -> None:
        async with trio.open_nursery() as tasks:
            tasks.start_soon(service.forward, key(1), activations())
            tasks.start_soon(service.forward, key(2), activations())
            await wait_all_tasks_blocked()
            with pytest.raises(StageBusyError, match="Too many requests"):
                await service.forward(key(3), activations())
            service.open()
        assert service.intake.missing == 6

    play(scenario)


def test_the_memory_of_answers_is_bounded(compute: ComputeThread) -> None:
    one = 2 * 4 * HIDDEN * ARCHITECTURE.sequence_length  # its activations and their gradient
    limits = ServiceLimits(SessionLimits(kept_bytes_of_driver=2 * one), wait_seconds=0.0)
    service = service_of(compute, 1, 2, sequences_per_step=100, limits=limits)

    async def main() -> None:
        for number in range(2):
            await service.forward(key(number), activations())
            await service.backward(key(number), activations())
        with pytest.raises(StageBusyError, match="memory"):
            await service.forward(key(2), activations())
        await service.forward(key(0, driver=OTHER), activations())
        service.close(key(0).driver, 1)
        await service.forward(key(2, session=2), activations())

    trio.run(main)


def test_a_driver_that_vanished_is_forgotten_after_a_while(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, sequences_per_step=4)

    async def scenario(clock: MockClock) -> None:
        async with trio.open_nursery() as tasks:
            tasks.start_soon(service.run)
            await service.forward(key(1), activations(2))
            await service.forward(key(1, driver=OTHER), activations(1))
            assert service.intake.missing == 1
            await wait_all_tasks_blocked()
            for _ in range(10):
                clock.jump(15.0)
                await wait_all_tasks_blocked()
                await service.forward(key(1, driver=OTHER), activations(1))  # asks again and again: not gone
            assert service.intake.missing == 3
            assert service.session_count == 1
            assert service.counts.given_up == 1
            with pytest.raises(ClosedSessionError):
                await service.backward(key(1), activations(2))
            tasks.cancel_scope.cancel()

    play(scenario)


def test_wrong_shapes_and_types_are_refused_and_leave_nothing(compute: ComputeThread) -> None:
    first, middle, last = (service_of(compute, i, i + 1) for i in range(3))
    time = ARCHITECTURE.sequence_length

    async def main() -> None:
        wrong_ids = [
            torch.zeros((5, time), dtype=torch.int64),  # more than a microbatch
            torch.zeros((1, time + 1), dtype=torch.int64),
            torch.zeros((0, time), dtype=torch.int64),
            torch.zeros((1, time), dtype=torch.int32),
            torch.zeros((1, time, 1), dtype=torch.int64),
            torch.full((1, time), ARCHITECTURE.vocabulary_size),
            torch.full((1, time), -1),
        ]
        for ids in wrong_ids:
            with pytest.raises(RefusedTensorError) as refusal:
                await first.forward(key(1), ids)
            assert refusal.value.retry is Retry.NEVER
            with pytest.raises(RefusedTensorError):
                await last.loss(key(1), activations(), ids)
        for wrong in (activations()[..., :-1], activations().double(), activations()[0], activations(5)):
            for ask in (middle.forward, middle.backward):
                with pytest.raises(RefusedTensorError):
                    await ask(key(1), wrong)
            with pytest.raises(RefusedTensorError):
                await middle.infer(wrong)
        with pytest.raises(RefusedTensorError, match="labels"):
            await middle.loss(key(1), activations(), LABELS[:1])
        with pytest.raises(RefusedTensorError, match="labels"):
            await last.forward(key(1), activations())
        with pytest.raises(RefusedTensorError, match="tokens"):
            await last.loss(key(1), activations(2), LABELS[:1])
        await middle.forward(key(1), activations(2))
        with pytest.raises(RefusedTensorError, match="shape"):
            await middle.backward(key(1), activations(1))
        assert await middle.backward(key(1), activations(2)) is not None
        with pytest.raises(UnknownMicrobatchError):
            await middle.backward(key(9), activations())
        for service in (first, last):
            assert service.intake.missing == 8
            assert gradients([service]) == {}

    trio.run(main)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e7, -1e20, 3e38])
def test_values_that_are_too_large_or_no_numbers_are_refused(compute: ComputeThread, value: float) -> None:
    middle, last = service_of(compute, 1, 2), service_of(compute, 2, 3)
    spoilt = activations()
    spoilt[0, 3, 5] = value

    async def main() -> None:
        with pytest.raises(RefusedTensorError):
            await middle.forward(key(1), spoilt)
        with pytest.raises(RefusedTensorError):
            await last.loss(key(1), spoilt, LABELS[:1])
        assert middle.intake.missing == last.intake.missing == 8
        for number in range(SPOILT_MICROBATCHES):
            with pytest.raises(RefusedTensorError):
                await middle.forward(key(number), spoilt)
        assert not middle.is_spoilt
        await middle.forward(key(1), activations())
        with pytest.raises(RefusedTensorError):
            await middle.backward(key(1), spoilt)
        assert gradients([middle, last]) == {}
        await middle.backward(key(1), activations())  # the same microbatch, now with a good gradient
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients([middle]).values())

    trio.run(main)


def test_a_gradient_much_longer_than_the_others_is_clipped(compute: ComputeThread) -> None:
    service, plain = service_of(compute, 1, 2, sequences_per_step=100), service_of(compute, 1, 2)

    async def main() -> None:
        for number in range(FEWEST):
            await service.forward(key(number), activations(1, number))
            await service.backward(key(number), activations(1, number))
        assert service.gradient_limit.clipped == 0
        before = {name: gradient.clone() for name, gradient in gradients([service]).items()}
        await service.forward(key(FEWEST), activations(2))
        await service.backward(key(FEWEST), 1000 * activations(2, 3))
        assert service.gradient_limit.clipped == 1
        await plain.forward(key(1), activations(2))
        await plain.backward(key(1), activations(2, 3))
        for name, gradient in gradients([plain]).items():
            added = gradients([service])[name] - before[name]
            torch.testing.assert_close(added, MEDIANS * gradient, rtol=0.2, atol=0.05 * float(gradient.abs().max()))

    trio.run(main)


@pytest.mark.parametrize(("of_driver", "every", "expected"), [(8, 4, 4), (2, 16, 2)])
def test_a_driver_learns_how_many_microbatches_find_room(
    compute: ComputeThread, of_driver: int, every: int, expected: int
) -> None:
    sessions = SessionLimits(open_of_driver=of_driver, open_microbatches=every)
    assert service_of(compute, 0, 1, limits=ServiceLimits(sessions)).open_of_driver == expected


def test_a_gradient_whose_square_is_no_number_is_clipped_as_well() -> None:
    limit = GradientLimit()
    for seed in range(FEWEST):
        _, limit = limit.limited(activations(1, seed))
    clipped, limit = limit.limited(1e30 * activations(1))
    assert limit.clipped == 1
    assert clipped.norm() == pytest.approx(limit.largest * ARCHITECTURE.sequence_length**0.5, rel=0.2)


def test_a_loss_that_is_no_number_leaves_the_work_of_others_alone(compute: ComputeThread) -> None:
    last, alone = service_of(compute, 2, 3), service_of(compute, 2, 3)
    norm = last.executor.model.norm
    assert norm is not None
    good = norm.weight.detach().clone()

    async def main() -> None:
        await alone.loss(key(1), activations(), LABELS[:1])
        await last.loss(key(1, driver=OTHER), activations(), LABELS[:1])
        norm.weight.data.fill_(float("nan"))
        with pytest.raises(SpoiltMicrobatchError):
            await last.loss(key(1), activations(), LABELS[:1])
        norm.weight.data.copy_(good)

    trio.run(main)
    assert last.intake.accumulated.sequences == 1
    expected = gradients([alone])
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients([last]).items())


def test_the_limit_follows_slowly_and_counts_by_token() -> None:
    limit = GradientLimit()
    for seed in range(FEWEST):
        same, limit = limit.limited(activations(1 + seed % 3, seed))
        assert torch.equal(same, activations(1 + seed % 3, seed))
    usual = limit.largest
    for _ in range(FEWEST // 2):
        clipped, limit = limit.limited(1e6 * activations(2))
        assert clipped.norm() <= 1.001 * usual * (2 * ARCHITECTURE.sequence_length) ** 0.5 * MEDIANS
    assert limit.largest <= MEDIANS * usual
    assert limit.clipped == FEWEST // 2
