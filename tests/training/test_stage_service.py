from __future__ import annotations

from functools import partial
from threading import Event

import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    MicrobatchKey,
    Retry,
    StageBusyError,
    StageGoneError,
    StagePausedError,
    UnknownMicrobatchError,
)
from neuroshard.pipeline.stage_server import DrainReason, StageServer
from neuroshard.types import NodeId
from tests.worlds.stages import (
    ARCHITECTURE,
    DRIVER,
    HIDDEN,
    INPUTS,
    LABELS,
    OTHER,
    activations,
    gradients,
    key,
    play,
    refused_in_the_end,
    service_of,
)


async def step(service: StageServer) -> None:
    """What a stage's trainer does with a full intake, without the rest."""
    service.intake.close("stepping")
    done = service.intake.take()
    await service.compute.run(lambda: service.executor.step(1e-2, 1.0, done.tokens))
    service.open()


def test_answers_outlive_a_step_until_the_driver_closes_its_session(compute: ComputeThread) -> None:
    last, middle = service_of(compute, 2, 3, sequences_per_step=1), service_of(compute, 1, 2, sequences_per_step=1)

    async def main() -> None:
        inputs, labels = activations(), LABELS[:1]
        output = await middle.forward(key(1), inputs)
        loss, gradient = await last.loss(key(1), output, labels)
        assert gradient is not None
        sent_back = await middle.backward(key(1), gradient)
        for service in (middle, last):
            assert service.intake.is_full
            await step(service)
        again, gradient_again = await last.loss(key(1), output, labels)
        assert gradient_again is not None
        assert torch.equal(again, loss)
        assert torch.equal(gradient_again, gradient)
        assert await middle.forward(key(1), inputs) is output
        assert await middle.backward(key(1), gradient) is sent_back
        for service in (middle, last):
            assert service.intake.accumulated.sequences == 0
            assert gradients([service]) == {}
            service.close(key(1).driver, 1)
            assert service.session_count == 0
        with pytest.raises(ClosedSessionError):
            await last.loss(key(1), output, labels)
        with pytest.raises(ClosedSessionError):
            await middle.backward(key(1), gradient)
        await middle.forward(key(1, session=2), inputs)

    trio.run(main)


def test_a_step_waits_for_open_microbatches_and_others_wait_for_the_step(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, sequences_per_step=2)
    events = list[str]()

    async def make_step() -> None:
        await service.filled()
        events.append("full")
        await step(service)

    async def begin_third() -> None:
        await service.forward(key(3), activations())
        events.append("third began")

    async def scenario(clock: MockClock) -> None:
        await service.forward(key(1), activations())
        await service.forward(key(2), activations())
        async with trio.open_nursery() as tasks:
            tasks.start_soon(make_step)
            tasks.start_soon(begin_third)
            await service.backward(key(1), activations())
            await wait_all_tasks_blocked()
            assert events == []
            await service.forward(key(1), activations())  # a repetition waits for nothing
            await service.backward(key(2), activations())
        assert events == ["full", "third began"]

    play(scenario)


def test_a_microbatch_that_stays_open_is_given_up_and_another_takes_its_place(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, sequences_per_step=2)

    async def scenario(clock: MockClock) -> None:
        async with trio.open_nursery() as tasks:
            await service.forward(key(1, driver=OTHER), activations())
            await service.forward(key(1), activations())
            await service.backward(key(1), activations())
            tasks.start_soon(service.filled)
            await wait_all_tasks_blocked()
            assert not service.intake.is_open
            clock.jump(31.0)
            await wait_all_tasks_blocked()
            assert service.intake.is_open
            with pytest.raises(UnknownMicrobatchError) as refusal:
                await service.backward(key(1, driver=OTHER), activations())
            assert refusal.value.retry is Retry.HERE
            await service.forward(key(1, driver=OTHER), activations())  # begins again
            await service.backward(key(1, driver=OTHER), activations())
        assert [name.driver for name in service.intake.accumulated.keys] == ["driver", "other"]
        assert service.counts.given_up == 1

    play(scenario)


def test_a_driver_that_goes_on_keeps_what_it_has_open_when_another_does_not(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, sequences_per_step=3)

    async def scenario(clock: MockClock) -> None:
        async with trio.open_nursery() as tasks:
            await service.forward(key(1, driver=OTHER), activations())
            await service.forward(key(1), activations())
            await service.forward(key(2), activations())
            tasks.start_soon(service.filled)
            await wait_all_tasks_blocked()
            clock.jump(20.0)
            await service.backward(key(1), activations())
            clock.jump(11.0)
            await wait_all_tasks_blocked()
            assert (service.counts.given_up, service.intake.missing) == (1, 1)
            await service.backward(key(2), activations())  # is still open
            tasks.cancel_scope.cancel()

    play(scenario)


def test_what_a_driver_has_open_goes_with_it(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, sequences_per_step=2)

    async def scenario(_clock: MockClock) -> None:
        await service.forward(key(1, driver=OTHER), activations())
        await service.forward(key(1), activations())
        assert not service.intake.is_open
        service.keep_only({DRIVER})
        assert service.intake.missing == 1
        with pytest.raises(ClosedSessionError):
            await service.backward(key(1, driver=OTHER), activations())
        await service.backward(key(1), activations())
        assert service.intake.accumulated.sequences == 1

    play(scenario)


@pytest.mark.parametrize(("hold", "seconds"), [(DrainReason.ROUND, 30.0), (DrainReason.PAUSE, 0.5)])
def test_draining_gives_up_what_does_not_end(compute: ComputeThread, hold: DrainReason, seconds: float) -> None:
    service = service_of(compute, 1, 2)

    async def scenario(clock: MockClock) -> None:
        for number in (1, 2):
            await service.forward(key(number), activations())
        async with trio.open_nursery() as tasks:
            tasks.start_soon(service.drain, "The stage holds.", hold)
            await wait_all_tasks_blocked()
            await service.backward(key(1), activations())
            await wait_all_tasks_blocked()
            clock.jump(0.9 * seconds)
            await wait_all_tasks_blocked()
            assert not service.intake.is_idle
            clock.jump(0.2 * seconds)
        assert service.intake.is_idle
        assert service.intake.accumulated.sequences == 1
        if hold is DrainReason.ROUND:  # others may wait for its end
            assert "holds" in await refused_in_the_end(clock, service, key(3))
        with pytest.raises(UnknownMicrobatchError):  # its driver comes too late, and begins this stage's part again
            await service.backward(key(2), activations())
        service.open()
        await service.forward(key(2), activations())
        await service.backward(key(2), activations())
        assert service.intake.accumulated.sequences == 2
        assert (service.counts.microbatches, service.counts.given_up) == (2, 1)

    play(scenario)


def test_a_paused_stage_sends_whoever_asks_elsewhere_at_once(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2)

    async def scenario(clock: MockClock) -> None:
        await service.forward(key(1), activations())
        refusals = list[StagePausedError]()

        async def wait_for_room() -> None:
            with pytest.raises(StagePausedError) as refused:
                await service.forward(key(2), activations())
            refusals.append(refused.value)

        async with trio.open_nursery() as tasks:
            service.intake.close("The stage is making its step.")
            tasks.start_soon(wait_for_room)
            await wait_all_tasks_blocked()
            tasks.start_soon(service.drain, "The node is paused.", DrainReason.PAUSE)
            await wait_all_tasks_blocked()  # who waited already need not wait longer
            assert [refusal.retry for refusal in refusals] == [Retry.ELSEWHERE]
            await wait_for_room()
            await service.backward(key(1), activations())  # what is open may end
        await service.suspend()
        await wait_for_room()
        with pytest.raises(StagePausedError):
            await service.infer(activations())
        assert await service.backward(key(1), activations()) is not None  # an answer that is known is given again
        await service.resume()
        service.open()
        await service.forward(key(2), activations())

    play(scenario)


def test_all_stages_of_a_node_have_the_same_time_to_end(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2)

    async def scenario(clock: MockClock) -> None:
        await service.forward(key(1), activations())
        began = trio.current_time()
        clock.jump(20.0)
        await service.drain("The node is paused.", DrainReason.PAUSE, began=began)  # another stage took all of it
        assert (service.intake.is_idle, service.counts.given_up) == (True, 1)
        assert trio.current_time() - began < 20.1

    play(scenario)


@pytest.mark.parametrize(("reason", "seconds"), [(DrainReason.END, 10.0), (DrainReason.ABANDON, 0.5)])
def test_a_node_that_ends_waits_less_so_that_its_final_checkpoint_is_written_in_time(
    compute: ComputeThread, reason: DrainReason, seconds: float
) -> None:
    service = service_of(compute, 1, 2)

    async def scenario(clock: MockClock) -> None:
        await service.forward(key(1), activations())
        async with trio.open_nursery() as tasks:
            tasks.start_soon(partial(service.drain, "The node stops.", reason))
            await wait_all_tasks_blocked()
            clock.jump(seconds - 0.1)
            await wait_all_tasks_blocked()
            assert not service.intake.is_idle
            clock.jump(0.2)
            await wait_all_tasks_blocked()
            assert service.intake.is_idle
            with pytest.raises(StageGoneError):
                await service.forward(key(2), activations())

    play(scenario)


def test_a_caller_that_goes_away_leaves_its_work_whole_or_undone(compute: ComputeThread) -> None:
    service = service_of(compute, 2, 3)
    release, started = Event(), Event()

    def hold() -> None:
        started.set()
        release.wait(20)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute.run, hold)
            await trio.to_thread.run_sync(started.wait, 20)
            with trio.move_on_after(0.01):  # its job still waits: it never runs
                await service.loss(key(1), activations(), LABELS[:1])
            assert service.intake.missing == 8
            release.set()
        executor = service.executor
        loss = executor.loss
        started.clear()
        release.clear()

        def slow(inputs: Tensor, labels: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
            hold()
            return loss(inputs, labels, ids)

        executor.loss = slow  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.loss, key(1), activations(), LABELS[:1])
            await trio.to_thread.run_sync(started.wait, 20)
            nursery.cancel_scope.cancel()  # its job runs: it is waited for and counts
            release.set()
        assert service.intake.accumulated.keys == (key(1),)
        found = gradients([service])
        before = {name: gradient.clone() for name, gradient in found.items()}
        result, gradient = await service.loss(key(1), activations(), LABELS[:1])
        assert gradient is not None
        assert result > 0
        assert all(torch.equal(before[name], now) for name, now in gradients([service]).items())

    trio.run(main)


def test_a_session_closed_while_its_job_runs_counts_what_was_done(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2)
    forward, inside = service.executor.forward, Event()

    def slow(inputs: Tensor, *, keeps_graph: bool, ids: Tensor | None):
        inside.set()
        release.wait(20)
        return forward(inputs, keeps_graph=keeps_graph, ids=ids)

    service.executor.forward = slow  # type: ignore[method-assign]
    release = Event()

    async def ask() -> None:
        with pytest.raises(UnknownMicrobatchError):
            await service.forward(key(1), activations())

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.to_thread.run_sync(inside.wait, 20)
            service.close(key(1).driver, 1)
            assert not service.intake.is_idle
            release.set()
        assert service.intake.is_idle
        assert service.intake.missing == 8

    trio.run(main)


def test_inference_goes_on_between_steps_but_not_while_paused(compute: ComputeThread) -> None:
    first, last = service_of(compute, 0, 2, is_open=False), service_of(compute, 2, 3, is_open=False)

    async def main() -> None:
        output = await first.infer(INPUTS[:2])
        assert output.shape == (2, ARCHITECTURE.sequence_length, HIDDEN)
        losses = await last.infer(output, LABELS[:2])
        assert losses.shape == (2,)
        await first.suspend()
        with pytest.raises(StageBusyError):
            await first.infer(INPUTS[:2])
        await first.resume()
        assert torch.equal(await first.infer(INPUTS[:2]), output)
        assert gradients([first, last]) == {}

    trio.run(main)


def test_discarding_drops_the_step_in_work(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2)

    async def main() -> None:
        await service.forward(key(1), activations())
        await service.backward(key(1), activations())
        await service.forward(key(2), activations())
        await service.discard("The step is dropped.")
        assert gradients([service]) == {}
        assert service.intake.accumulated.sequences == 0
        assert service.intake.missing == 8
        assert not service.intake.is_open
        with pytest.raises(UnknownMicrobatchError):
            await service.backward(key(2), activations())

    trio.run(main)


def test_keys_are_told_apart_by_driver_session_and_number(compute: ComputeThread) -> None:
    service = service_of(compute, 2, 3, sequences_per_step=100)
    names = [MicrobatchKey(NodeId(d), s, m) for d in ("a", "b") for s in (1, 2) for m in (1, 2)]

    async def main() -> None:
        for name in names:
            await service.loss(name, activations(), LABELS[:1])
        assert service.intake.accumulated.keys == tuple(names)

    trio.run(main)
