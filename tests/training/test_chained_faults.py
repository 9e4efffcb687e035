"""Stages of a chain that lie about their work or their time, or are full, and a driver that is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import anyio
import pytest
import trio
from msgspec.structs import replace as changed
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.messages import Frame
from neuroshard.pipeline.chain_call import ChainedCall
from neuroshard.pipeline.chain_protocol import FORWARD, Given, PassAnswer, PassQuestion
from neuroshard.pipeline.handed_tensors import MOST_WAITING_SECONDS, HandedTensors
from neuroshard.pipeline.microbatch import NotHandedYetError, StageBusyError
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import WirePrecision
from neuroshard.types import NodeId
from tests.worlds.chains import ROWS, Swarm, in_swarm, name_of
from tests.worlds.stages import INPUTS, LABELS, ComputeInPlace, activations, chain_of, key

T = TypeVar("T")


def in_virtual_time(work: Callable[[Swarm], Awaitable[T]]) -> tuple[T, Swarm]:
    """The value of `work`, under a clock that never waits, and the swarm."""
    clock = MockClock(autojump_threshold=0)
    value, swarm, _ = in_swarm(ComputeInPlace(), work, StageClientOptions(), clock=clock)
    return value, swarm


async def timed_loss(call: ChainedCall) -> tuple[float, float]:
    """Loss of a microbatch, and the seconds that it took."""
    began = anyio.current_time()
    return (await call.run()).loss_sum.item(), anyio.current_time() - began


def whole_loss() -> float:
    (whole,) = chain_of(ComputeInPlace(), (0, 3))
    loss, _ = trio.run(whole.loss, key(1), INPUTS[ROWS], LABELS[ROWS])
    return loss.item()


def assert_counted_once(swarm: Swarm) -> None:
    assert [service.counts.microbatches for service in swarm.services] == [1, 1, 1]


def test_a_stage_that_has_not_handed_what_it_says_it_has_is_asked_for_it() -> None:
    async def work(swarm: Swarm) -> tuple[float, float]:
        async def idle(sender: NodeId, frame: Frame) -> Frame:
            asked = frame.read(PassQuestion)
            if asked.name != FORWARD or asked.next is None:
                return await swarm.chain(0).answer(sender, frame)
            answer = await swarm.chain(0).answer(sender, replace(frame, message=changed(asked, next=None)))
            receipt = answer.read(PassAnswer).receipt
            assert receipt is not None
            return replace(answer, message=PassAnswer(changed(receipt, was_handed=True)), tensors=())

        swarm.answers[0] = idle
        return await timed_loss(swarm.call(1))

    (loss, seconds), swarm = in_virtual_time(work)
    assert loss == pytest.approx(whole_loss(), rel=1e-5)
    assert seconds <= 60
    assert_counted_once(swarm)


def test_a_stage_that_is_full_for_a_minute_is_waited_for() -> None:
    async def work(swarm: Swarm) -> tuple[float, float]:
        swarm.services[1].intake.close("It is full.")

        async def empty() -> None:
            await anyio.sleep(60)
            swarm.services[1].open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(empty)
            return await timed_loss(swarm.call(1))

    (loss, seconds), swarm = in_virtual_time(work)
    assert loss == pytest.approx(whole_loss(), rel=1e-5)
    assert 60 <= seconds <= 75
    assert_counted_once(swarm)


def test_a_stage_that_reports_a_longer_wait_than_it_had_does_not_seem_faster() -> None:
    """Routing by speed would otherwise prefer the slowest liar."""
    taken = dict[int, float]()

    class Noting(FixedRouting):
        def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
            taken[stage] = seconds

    async def work(swarm: Swarm) -> float:
        async def slow(sender: NodeId, frame: Frame) -> Frame:
            answer = await swarm.chain(1).answer(sender, frame)
            await anyio.sleep(5)
            receipt = answer.read(PassAnswer).receipt
            assert receipt is not None
            lie = changed(receipt, arrival_seconds=receipt.arrival_seconds + 5, seconds=receipt.seconds + 5)
            return replace(answer, message=PassAnswer(lie))

        swarm.answers[1] = slow
        call = ChainedCall(swarm.edges, Noting(swarm.hops), key(1), INPUTS[ROWS], LABELS[ROWS])
        return (await call.run()).loss_sum.item()

    loss, _ = in_virtual_time(work)
    assert loss == pytest.approx(whole_loss(), rel=1e-5)
    assert taken[1] >= 10  # 5 s in each direction
    assert taken[0] < 5


def test_the_work_of_a_driver_that_is_lost_makes_room_for_its_next_start() -> None:
    async def work(swarm: Swarm) -> float:
        async def silent(_sender: NodeId, _frame: Frame) -> Frame:
            await anyio.sleep_forever()
            raise AssertionError

        for start in range(1, 20):
            swarm.answers[2] = silent
            async with anyio.create_task_group() as driver:
                call = ChainedCall(swarm.edges, FixedRouting(swarm.hops), key(1, session=start), INPUTS[:1], LABELS[:1])
                driver.start_soon(call.run)
                await wait_all_tasks_blocked()
                driver.cancel_scope.cancel()
            for endpoint in swarm.endpoints:
                endpoint.keep_only([])  # as when the node is not a member any more
        del swarm.answers[2]
        call = ChainedCall(swarm.edges, FixedRouting(swarm.hops), key(1, session=20), INPUTS[ROWS], LABELS[ROWS])
        return (await call.run()).loss_sum.item()

    loss, swarm = in_virtual_time(work)
    assert loss == pytest.approx(whole_loss(), rel=1e-5)
    assert_counted_once(swarm)


def test_inputs_for_which_no_question_comes_make_room_after_a_while() -> None:
    sender, fp32 = name_of(0), WirePrecision.FP32

    async def work() -> None:
        table = HandedTensors(most_waiting=4, most_of_driver=2)
        for number in (1, 2, 3):
            table.announce(key(number), "inputs", sender, fp32)
        for number in (1, 2):
            assert table.check(sender, key(number), "inputs", fp32, "d")
            table.put(key(number), "inputs", Given(activations()), "d")
        with pytest.raises(StageBusyError):
            table.check(sender, key(3), "inputs", fp32, "d")
        await anyio.sleep(MOST_WAITING_SECONDS + 1)
        assert table.check(sender, key(3), "inputs", fp32, "d")
        with pytest.raises(NotHandedYetError):
            await table.wait_for(key(1), "inputs", 0.0)

    trio.run(work, clock=MockClock(autojump_threshold=0))
