"""Stages that hand their results to each other give what the star gives, and their messages are bounded."""

from __future__ import annotations

from dataclasses import replace

import anyio
import msgspec
import pytest
import torch
import trio
from msgspec.structs import replace as changed
from torch import Tensor
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.messages import Frame
from neuroshard.pipeline.chain_protocol import (
    HAND,
    PASS,
    HandAnswer,
    HandedTensor,
    Neighbour,
    PassAnswer,
    PassQuestion,
    Receipt,
    question_frame,
    wire_digest,
)
from neuroshard.pipeline.chain_server import refused
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import NotHandedYetError, SpoiltMicrobatchError
from neuroshard.pipeline.microbatch_call import MicrobatchCall
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import COARSE, WirePrecision, to_wire, wire_bytes
from neuroshard.status.pipeline import StarEdge
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.chains import CUTS, DRIVER, ROWS, STAGES, Swarm, in_swarm, name_of
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, ComputeInPlace, activations, chain_of, key


@pytest.mark.parametrize("precision", WirePrecision)
def test_the_chain_gives_the_losses_and_gradients_of_the_star(compute: ComputeThread, precision: WirePrecision) -> None:
    options = StageClientOptions(precision, timeout_seconds=30)

    async def by_star(swarm: Swarm) -> float:
        call = MicrobatchCall(FixedRouting(swarm.hops), key(1), INPUTS[ROWS], LABELS[ROWS])
        return (await call.run()).loss_sum.item()

    async def by_chain(swarm: Swarm) -> float:
        return (await swarm.call(1).run()).loss_sum.item()

    star_loss, _, of_star = in_swarm(compute, by_star, options)
    chain_loss, swarm, of_chain = in_swarm(compute, by_chain, options)
    # the driver of a star codes an output again, which changes some scales of int4
    rounding = 0.1 if precision in COARSE else 0.0
    assert chain_loss == pytest.approx(star_loss, rel=rounding / 10, abs=0)
    for name, gradient in of_chain.items():
        expected = of_star[name]
        assert (gradient - expected).norm() <= rounding * expected.norm()
    tokens, width = INPUTS[ROWS].numel(), ARCHITECTURE.hidden_size
    once = wire_bytes(tokens, width, precision)
    ids = 4 * tokens
    # the star came first in another swarm; here the driver sends ids and labels, and every tensor goes one link
    assert swarm.sent == {DRIVER: 2 * ids, name_of(0): once, name_of(1): 2 * once, name_of(2): once}


def test_directions_travel_through_a_chain(compute: ComputeThread) -> None:
    """A microbatch of 64 tokens of 64 values has them, and its loss and gradients are nearer to those in fp32."""

    async def by_chain(swarm: Swarm) -> float:
        return (await swarm.call(1).run()).loss_sum.item()

    def ran(precision: WirePrecision) -> tuple[float, Swarm, Tensor]:
        options = StageClientOptions(precision, timeout_seconds=30)
        loss, swarm, found = in_swarm(compute, by_chain, options, architecture=replace(ARCHITECTURE, hidden_size=64))
        return loss, swarm, torch.cat([found[name].flatten() for name in sorted(found)])

    exact_loss, _, exact = ran(WirePrecision.FP32)
    loss, swarm, found = ran(WirePrecision.INT4_RANK8)
    coarse_loss, _, coarse = ran(WirePrecision.INT4)
    assert loss == pytest.approx(exact_loss, rel=1e-3)
    assert abs(loss - exact_loss) < abs(coarse_loss - exact_loss)
    assert (found - exact).square().sum() < 0.7 * (coarse - exact).square().sum()
    tokens = INPUTS[ROWS].numel()
    once = wire_bytes(tokens, 64, WirePrecision.INT4_RANK8)
    assert once == wire_bytes(tokens, 64, WirePrecision.INT4) + 8 * tokens + 9 * 2 * 64
    assert swarm.sent == {DRIVER: 8 * tokens, name_of(0): once, name_of(1): 2 * once, name_of(2): once}


def question(stage: int, name: str = "forward", **changes: object) -> PassQuestion:
    """A driver's question to a stage, without neighbours."""
    address = STAGES[stage]
    named = address.run_id, address.layers, address.version, 1, 1, name
    plain = PassQuestion(*named, "fp32", "fp32")  # type: ignore[arg-type]
    return changed(plain, **changes)


def neighbour(stage: int, layers: LayerRange | None = None) -> Neighbour:
    return Neighbour(name_of(stage), layers or STAGES[stage].layers)


def handed(stage: int, name: str = "inputs", seed: int = 0) -> Frame:
    """A tensor of activations for a stage, as its neighbour sends it."""
    parts = to_wire(name, activations(4, seed), WirePrecision.FP32)
    address = STAGES[stage]
    offer = HandedTensor(
        address.run_id, address.layers, address.version, DRIVER, 1, 1, name, "fp32", wire_digest(parts)
    )  # type: ignore[arg-type]
    return Frame(HAND, offer, parts)


async def refusal_name(swarm: Swarm, stage: int, frame: Frame, sender: NodeId) -> str:
    """The name of the error with which a stage refuses a frame; "" if it does not."""
    chain = swarm.chain(stage)
    answer = await (chain.take if frame.kind == HAND else chain.answer)(sender, frame)
    refusal = answer.read(HandAnswer if frame.kind == HAND else PassAnswer).refusal
    return "" if refusal is None else refusal.error


WRONG_QUESTIONS = {
    "a gap before": (question(1, previous=neighbour(0, LayerRange(3, 4))), "tensor"),
    "a gap after": (question(1, previous=neighbour(0), next=neighbour(2, LayerRange(1, 3))), "tensor"),
    "itself": (question(1, previous=Neighbour(name_of(1), STAGES[1].layers)), "tensor"),
    "a stage twice": (question(1, previous=neighbour(0, STAGES[1].layers)), "tensor"),
    "a cycle": (question(1, previous=neighbour(0), next=neighbour(0)), "tensor"),
    "a stranger": (question(1, previous=Neighbour(NodeId("stranger"), STAGES[0].layers)), "busy"),
    "another stage": (question(0), "gone"),
    "another run": (question(1, run=RunId("2" * 64)), "gone"),
    "another version": (question(1, version=2), "gone"),
    "no tensor": (question(1), "unknown"),
}


@pytest.mark.parametrize("wrong", WRONG_QUESTIONS)
def test_a_wrong_question_is_refused_and_announces_nothing(compute: ComputeThread, wrong: str) -> None:
    asked, expected = WRONG_QUESTIONS[wrong]

    async def work(swarm: Swarm) -> tuple[str, str]:
        first = await refusal_name(swarm, 1, question_frame(asked), DRIVER)
        return first, await refusal_name(swarm, 1, handed(1), name_of(0))

    names, swarm, found = in_swarm(compute, work)
    assert names == (expected, "busy")  # the tensor of the named neighbour is not taken either
    assert found == {}
    assert swarm.sent == {}


def test_only_the_announced_neighbour_hands_a_tensor_and_only_once(compute: ComputeThread) -> None:
    asked = question(1, previous=neighbour(0))

    async def work(swarm: Swarm) -> list[str]:
        names = [await refusal_name(swarm, 1, handed(1), name_of(0))]  # ahead of the question
        answers = list[str]()

        async def ask() -> None:
            answers.append(await refusal_name(swarm, 1, question_frame(asked), DRIVER))

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            await wait_all_tasks_blocked()
            names.append(await refusal_name(swarm, 1, handed(1), NodeId("stranger")))
            names.append(await refusal_name(swarm, 1, handed(1), name_of(2)))
            names.append(await refusal_name(swarm, 1, handed(1, "gradient"), name_of(2)))  # nothing is open
            damaged = handed(1)
            other = handed(1, seed=1)
            names.append(await refusal_name(swarm, 1, replace(damaged, tensors=other.tensors), name_of(0)))
            coarse = replace(damaged, message=changed(damaged.read(HandedTensor), precision="int8"))
            names.append(await refusal_name(swarm, 1, coarse, name_of(0)))
            names.append(await refusal_name(swarm, 1, handed(1), name_of(0)))
        names += answers
        names.append(await refusal_name(swarm, 1, handed(1), name_of(0)))  # the same one again
        names.append(await refusal_name(swarm, 1, handed(1, seed=1), name_of(0)))  # another one, too late
        return names

    names, _, _ = in_swarm(compute, work)
    assert names == ["busy", "gone", "gone", "busy", "tensor", "tensor", "", "", "", ""]


def test_a_stage_that_reports_another_digest_ends_the_chain_on_its_edge(compute: ComputeThread) -> None:
    """It took something other than its neighbour gave, or says so. The driver passes the next tensors on itself."""

    async def work(swarm: Swarm) -> float:
        swarm.falsify(1, lambda receipt: changed(receipt, taken="0" * 64) if receipt.taken else receipt)
        with pytest.raises(SpoiltMicrobatchError, match="different digests"):
            await swarm.call(1).run()
        assert swarm.edges.stars() == (StarEdge(name_of(0), name_of(1)),)
        return (await swarm.call(2).run()).loss_sum.item()

    loss, _, _ = in_swarm(compute, work)
    whole = chain_of(compute, (0, 3))
    expected, _ = trio.run(whole[0].loss, key(1), INPUTS[ROWS], LABELS[ROWS])
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_stage_that_misses_a_tensor_is_not_asked_without_pause() -> None:
    """It used the tensor and gave the work up, so it answers at once while the stage before it is still at work."""
    asked = list[float]()

    async def work(swarm: Swarm) -> float:
        async def slow(sender: NodeId, frame: Frame) -> Frame:
            await anyio.sleep(5)
            return await swarm.chain(0).answer(sender, frame)

        async def forgetful(_sender: NodeId, _frame: Frame) -> Frame:
            asked.append(anyio.current_time())
            return refused(PASS, NotHandedYetError("The neighbour has not handed the tensor over yet."))

        swarm.answers |= {0: slow, 1: forgetful}
        return (await swarm.call(1).run()).loss_sum.item()

    loss, _, _ = in_swarm(ComputeInPlace(), work, StageClientOptions(), clock=MockClock(autojump_threshold=0))
    assert loss > 0
    assert 2 <= len([at for at in asked if at <= 5]) <= 25


def test_stages_without_a_way_to_each_other_use_the_driver() -> None:
    async def work(swarm: Swarm) -> list[float]:
        swarm.network.partition([name_of(0)], [name_of(1)])
        losses = [(await swarm.call(name).run()).loss_sum.item() for name in range(1, 3)]
        assert swarm.edges.stars() == (StarEdge(name_of(0), name_of(1)),)
        return losses

    losses, swarm, _ = in_swarm(ComputeInPlace(), work, StageClientOptions(), clock=MockClock(autojump_threshold=0))
    assert len(set(losses)) == 1
    assert swarm.sent[name_of(2)] == 2 * wire_bytes(INPUTS[ROWS].numel(), ARCHITECTURE.hidden_size)  # still a chain


def test_a_stage_between_local_ones_is_asked_by_the_driver(compute: ComputeThread) -> None:
    """The driver's own stages take part in no chain: their tensors are here."""

    async def work(swarm: Swarm) -> float:
        own = [LocalStageClient(service, DRIVER) for service in chain_of(compute, CUTS)]
        return (await swarm.call(1, [own[0], swarm.hops[1], own[2]]).run()).loss_sum.item()

    loss, swarm, _ = in_swarm(compute, work)
    assert loss > 0
    assert set(swarm.sent) == {DRIVER, name_of(1)}


def test_a_receipt_that_contradicts_itself_is_not_used(compute: ComputeThread) -> None:
    """The driver gets the stage's work by the star instead, and the loss is right."""

    async def work(swarm: Swarm) -> float:
        swarm.falsify(2, lambda receipt: changed(receipt, loss_sum=-1.0))
        return (await swarm.call(1).run()).loss_sum.item()

    loss, _, _ = in_swarm(compute, work)
    whole = chain_of(compute, (0, 3))
    expected, _ = trio.run(whole[0].loss, key(1), INPUTS[ROWS], LABELS[ROWS])
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_question_and_its_receipt_are_small() -> None:
    """On the line they cost less than a token of a model with a few hundred values."""
    digest, root = "f" * 64, "e" * 64
    node = NodeId("12D3KooW" + "A" * 44)
    asked = question(1, previous=Neighbour(node, STAGES[0].layers), next=Neighbour(node, STAGES[2].layers))
    receipt = Receipt(root, True, digest, digest, 10**9, 1e4, 1e2, 1e2, 1e2, 1e2, 1e2)
    assert len(msgspec.msgpack.encode(asked)) <= 400
    assert len(msgspec.msgpack.encode(PassAnswer(receipt))) <= 400
