"""The outer step of a real stage on a part of its vector: alone, in a group, and when a round ends late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization, StrategyName
from neuroshard.consensus.lone_steps import lone_exchange
from neuroshard.consensus.sync_strategies import (
    Abandoned,
    Agreed,
    FragmentStep,
    StageRounds,
    steps_between_rounds,
    strategy_at,
)
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, flatten, initialise, load_vector
from neuroshard.optim.outer import (
    PLAIN_MEAN,
    SPARTA_SLICES,
    STREAMED_FRAGMENTS,
    Fragment,
    LineProgress,
    fresh_outer_state,
)
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.outer_sync import OuterSync
from neuroshard.types import LayerRange
from tests.worlds.replicas import MeetingPlace
from tests.worlds.stages import ARCHITECTURE, IDENTITY, PARAMETERS, executor_around, state_digest, train

STAGES = (LayerRange(0, 3), LayerRange(1, 2))  # the whole model, and a layer of a pipeline
PARTS: tuple[StrategyName, ...] = ("sparta", "streaming")


def model_of(layers: LayerRange = STAGES[0]) -> StageModel:
    model = StageModel(ARCHITECTURE, layers)
    initialise(model, 1)
    return model


def sync_of(compute: ComputeThread, model: StageModel, parameters: OuterOptimization) -> OuterSync:
    return OuterSync(
        compute=compute,
        executor=executor_around(model),
        versions=lambda _: replace(PARAMETERS, outer=parameters),
        state=fresh_outer_state(flatten(model)),
    )


def move(model: StageModel, seed: int) -> None:
    """Change the weights as inner steps would."""
    vector = flatten(model)
    load_vector(model, vector + 0.01 * torch.randn(len(vector), generator=torch.Generator().manual_seed(seed)))


def part_of(outer: OuterSync) -> Fragment:
    """Of the present outer step."""
    step = outer.strategy
    assert isinstance(step, FragmentStep)
    return step.fragment


def outside(fragment: Fragment, vector: Tensor) -> Tensor:
    """The vector with zeros in the fragment's places."""
    return fragment.replaced(vector, torch.zeros(fragment.size))


@pytest.mark.parametrize("layers", STAGES)
@pytest.mark.parametrize("strategy", PARTS)
def test_alone_a_cycle_moves_the_whole_anchor_to_the_weights(
    compute: ComputeThread, strategy: StrategyName, layers: LayerRange
) -> None:
    model = model_of(layers)
    outer = sync_of(compute, model, OuterOptimization(strategy=strategy))
    move(model, 1)
    weights = flatten(model)
    for number in range(SPARTA_SLICES if strategy == "sparta" else STREAMED_FRAGMENTS):
        fragment, before = part_of(outer), outer.state.anchor
        assert not torch.equal(before, weights)
        assert trio.run(outer.run_round, lone_exchange, 0.0)
        assert torch.equal(outside(fragment, outer.state.anchor), outside(fragment, before))
        assert torch.equal(fragment.of(outer.state.anchor), fragment.of(weights))
        assert outer.state.outer_step == number + 1
    assert torch.equal(outer.state.anchor, weights)
    assert torch.equal(flatten(model), weights)
    assert not outer.state.velocity.any()


def test_streamed_fragments_each_make_the_steps_of_torch_sgd(compute: ComputeThread) -> None:
    """Each with a velocity of its own, and with the momentum of the line."""
    model, parameters = model_of(), OuterOptimization(strategy="streaming", lone_outer="apply", momentum=0.9)
    outer = sync_of(compute, model, parameters)
    outer.state = replace(outer.state, line=LineProgress(4 * 300))
    fragments, references = list[Fragment](), list[torch.optim.SGD]()
    for number in range(3 * STREAMED_FRAGMENTS):
        move(model, number)
        fragment, local = part_of(outer), flatten(model)
        if number < STREAMED_FRAGMENTS:
            fragments.append(fragment)
            anchor = torch.nn.Parameter(fragment.of(outer.state.anchor))
            references.append(torch.optim.SGD([anchor], lr=1.0, momentum=0.5, nesterov=True))
        assert fragments[number % STREAMED_FRAGMENTS] == fragment
        reference = references[number % STREAMED_FRAGMENTS]
        group = reference.param_groups[0]
        group["momentum"] = 0.45 + 0.45 * min(1.0, 10 * number / 100)
        (anchor,) = group["params"]
        anchor.grad = anchor.detach() - fragment.of(local)
        reference.step()
        for _ in range(10):
            outer.after_step(4)
        assert trio.run(outer.run_round, lone_exchange, 0.0)
        torch.testing.assert_close(fragment.of(outer.state.anchor), anchor.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(fragment.of(flatten(model)), fragment.of(outer.state.anchor))
        assert torch.equal(outside(fragment, flatten(model)), outside(fragment, local))


@pytest.mark.parametrize("layers", STAGES)
@pytest.mark.parametrize("strategy", PARTS)
def test_two_nodes_agree_on_the_part_and_keep_the_rest_of_their_own(
    compute: ComputeThread, strategy: StrategyName, layers: LayerRange
) -> None:
    parameters = OuterOptimization(strategy=strategy, codec="fp32", learning_rate=0.7)
    models = [model_of(layers), model_of(layers)]
    place = MeetingPlace(StageRounds(IDENTITY.run_id, 0, TensorSchema.of(models[0]), parameters), 2)
    nodes = [sync_of(compute, model, parameters) for model in models]

    async def main() -> None:
        for number in range(STREAMED_FRAGMENTS + 1):
            for seed, (node, model) in enumerate(zip(nodes, models, strict=True)):
                move(model, 2 * number + seed)
                node.after_step(4)
            fragment, local = part_of(nodes[0]), [flatten(model) for model in models]
            async with trio.open_nursery() as nursery:
                for node in nodes:
                    nursery.start_soon(node.run_round, place.exchange, 0.0)
            assert torch.equal(nodes[0].state.anchor, nodes[1].state.anchor)
            assert torch.equal(nodes[0].state.velocity, nodes[1].state.velocity)
            for node, model, earlier in zip(nodes, models, local, strict=True):
                assert torch.equal(fragment.of(flatten(model)), fragment.of(node.state.anchor))
                assert torch.equal(outside(fragment, flatten(model)), outside(fragment, earlier))
                await node.update_root()
                assert node.progress.state_root == nodes[0].progress.state_root != ""
                assert node.exact_root() == ""  # the weights are not the anchor
            if strategy == "sparta":  # the mean itself
                mean = (fragment.of(local[0]) + fragment.of(local[1])) / 2
                torch.testing.assert_close(fragment.of(nodes[0].state.anchor), mean, rtol=0, atol=1e-6)

    trio.run(main)
    assert nodes[0].status().members == 2
    words = "a twentieth of the weights" if strategy == "sparta" else "a quarter of the weights"
    assert words in nodes[0].status().explanation


@pytest.mark.parametrize("strategy", PARTS)
def test_what_was_trained_while_a_round_ended_late_stays_on_top(compute: ComputeThread, strategy: StrategyName) -> None:
    given = list[Tensor]()

    async def exchange(contribution: Tensor, _outer_step: int) -> Agreed | Abandoned:
        given.append(contribution)
        if len(given) == 1:
            return Abandoned("nobody answered", is_soon_again=True)
        if len(given) == 2:  # the first one was in it
            return Agreed(0.5 * given[0], 3, None, late_for=given[0], offered=4)
        return Agreed(0.5 * torch.ones_like(contribution), 3, is_without_own=True)

    model = model_of()
    outer = sync_of(compute, model, OuterOptimization(strategy=strategy, codec="fp32"))
    move(model, 1)
    outer.after_step(4)
    sent, fragment, anchor = flatten(model), part_of(outer), outer.state.anchor
    assert not trio.run(outer.run_round, exchange, 0.0)
    assert torch.equal(flatten(model), sent)
    move(model, 2)
    outer.after_step(4)
    later = flatten(model)
    assert trio.run(outer.run_round, exchange, 0.0)
    assert torch.equal(given[0], fragment.of(anchor) - fragment.of(sent))
    expected = fragment.of(outer.state.anchor) + (fragment.of(later) - fragment.of(sent))
    torch.testing.assert_close(fragment.of(flatten(model)), expected, rtol=0, atol=1e-6)
    assert torch.equal(outside(fragment, flatten(model)), outside(fragment, later))
    assert (outer.progress.inner_steps, outer.progress.sequences) == (1, 4)  # since what was sent
    fragment, anchor, later = part_of(outer), outer.state.anchor, flatten(model)
    assert trio.run(outer.run_round, exchange, 0.0)
    expected = fragment.of(outer.state.anchor) + (fragment.of(later) - fragment.of(anchor))
    torch.testing.assert_close(fragment.of(flatten(model)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", PARTS)
def test_what_a_codec_lost_of_a_part_waits_for_its_next_turn(compute: ComputeThread, strategy: StrategyName) -> None:
    codec, given, is_refused = make_codec("int8"), list[Tensor](), list[bool]()

    async def exchange(contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
        given.append(contribution)
        sent = codec.round_trip(contribution)
        return Agreed(sent, 3, None if outer_step in is_refused else sent)

    model = model_of()
    outer = sync_of(compute, model, OuterOptimization(strategy=strategy))
    count = SPARTA_SLICES if strategy == "sparta" else STREAMED_FRAGMENTS
    for number in range(count):
        move(model, number)
        assert trio.run(outer.run_round, exchange, 0.0)
    lost = outer.residual
    assert lost is not None
    fragment = part_of(outer)
    move(model, count)
    work = fragment.of(outer.state.anchor) - fragment.of(flatten(model))
    assert fragment.of(lost).any()
    is_refused.append(outer.state.outer_step)
    assert trio.run(outer.run_round, exchange, 0.0)
    assert torch.equal(given[-1], work + fragment.of(lost))
    assert outer.residual is not None
    assert torch.equal(outer.residual, outside(fragment, lost))  # refused: only this part's is gone


@pytest.mark.parametrize("strategy", PARTS)
def test_a_stop_in_the_middle_of_a_cycle_changes_nothing(
    compute: ComputeThread, tmp_path: Path, strategy: StrategyName
) -> None:
    parameters = replace(PARAMETERS, outer=replace(PARAMETERS.outer, inner_steps=2, lone_outer="apply"))
    parameters = replace(parameters, outer=replace(parameters.outer, strategy=strategy))
    whole = train(compute, tmp_path / "whole", 12, parameters)
    assert whole.snapshot().diloco.outer_steps == (6 if strategy == "sparta" else 12)
    for stop in (3, 4, 7):
        train(compute, tmp_path / f"stopped-{stop}", stop, parameters)
        again = train(compute, tmp_path / f"stopped-{stop}", 12, parameters)
        assert state_digest(again) == state_digest(whole)


def test_rounds_are_due_as_often_as_the_strategy_says() -> None:
    def of(parameters: OuterOptimization, steps: int, members: int) -> list[int]:
        strategies = [replace(parameters, strategy=one) for one in ("diloco", *PARTS)]
        return [steps_between_rounds(one, LineProgress(4 * steps), 4, members) for one in strategies]

    assert of(OuterOptimization(), 0, 2) == [2, 20, 1]
    assert of(OuterOptimization(), 800, 4) == [50, 20, 12]
    assert of(OuterOptimization(), 800, 64) == [12, 20, 3]  # more than four meet more often
    assert of(OuterOptimization(), 0, 1) == [100, 20, 25]  # alone, nothing is exchanged
    assert of(OuterOptimization(3), 10**9, 2) == [3, 3, 1]
    assert of(OuterOptimization(500, interval="fixed"), 0, 2) == [500, 20, 125]


def test_top_k_keeps_its_step_without_momentum_when_streamed() -> None:
    schema = TensorSchema.of(model_of())
    step = strategy_at(OuterOptimization(strategy="streaming", codec="topk", aggregator="mean"), schema, 40, 400)
    assert isinstance(step, FragmentStep)
    assert (step.candidates, step.decay) == ((PLAIN_MEAN,), 0.95)
