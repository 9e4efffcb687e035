"""Stages of a run with a subspace: their executors take coefficients and ids, and refuse anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.messages.tensors import part_of, tensor_of
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.executor import Precision, StageExecutor
from neuroshard.pipeline.microbatch import RefusedTensorError
from neuroshard.pipeline.precision_probe import probe_precision
from neuroshard.pipeline.stage_protocol import WirePrecision, from_wire, to_wire, wire_bytes
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import Architecture, LayerRange

SHAPE = Architecture(64, 4, 4, 2, 96, 300, 32, subspace_rank=24, free_blocks=1)
STAGES = (LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4))
SEED = 3
CPU = torch.device("cpu")


def executor(layers: LayerRange | None = None) -> StageExecutor:
    model = StageModel(SHAPE, layers, Subspace(SHAPE, SEED))
    initialise(model, SEED)
    return StageExecutor(model, make_inner_optimizer(model, InnerOptimization(learning_rate=1e-2)), CPU)


def microbatch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 300, (2, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone()


def sent(values: Tensor, precision: WirePrecision) -> Tensor:
    """The values after a journey in this precision."""
    parts = {part.spec.name: part for part in to_wire("coefficients", values.detach(), precision)}
    return from_wire("coefficients", parts, precision, values.shape[2])


def through_stages(stages: list[StageExecutor], seed: int, *, keeps_graph: bool, precision: WirePrecision) -> float:
    """One microbatch through the passes that a stage server runs, with their checks; returns its summed loss."""
    ids, labels = microbatch(seed)
    first, middle, last = stages
    shapes = [StageShapes.of(stage.model, 2) for stage in stages]
    one = first.forward_pass(shapes[0], ids, keeps_graph=keeps_graph)
    assert one.output is not None
    assert one.opened is not None
    coefficients = sent(one.output, precision)
    shapes[1].check_forward(coefficients, ids)
    two = middle.forward_pass(shapes[1], coefficients, keeps_graph=keeps_graph, ids=ids)
    assert two.output is not None
    assert two.opened is not None
    coefficients = sent(two.output, precision)
    shapes[2].check_loss(coefficients, labels, ids)
    three = last.loss_pass(shapes[2], coefficients, labels, ids)
    assert three.gradient is not None
    assert three.loss_sum is not None
    assert three.gradient.shape == (2, 32, 24)
    back = middle.backward_pass(two.opened, sent(three.gradient, precision))
    assert back.gradient is not None
    first.backward_pass(one.opened, sent(back.gradient, precision))
    return three.loss_sum.item()


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_steps_in_stages_equal_those_of_the_whole_model(keeps_graph: bool) -> None:
    whole, stages = executor(), [executor(layers) for layers in STAGES]
    gradients, losses = list[dict[str, Tensor]](), list[tuple[float, float]]()
    for step in range(3):
        for seed in (2 * step, 2 * step + 1):
            found = through_stages(stages, seed, keeps_graph=keeps_graph, precision=WirePrecision.FP32)
            losses.append((found, whole.loss(*microbatch(seed))[0].item()))
        for executors in ([whole], stages) if step == 0 else ():
            models = [one.model for one in executors]
            named = {name: p.grad for model in models for name, p in model.named_parameters() if p.grad is not None}
            gradients.append({name: gradient.clone() for name, gradient in named.items()})
        for stage in (whole, *stages):
            stage.step(1e-2, 1e9, 128)
    expected, actual = gradients
    assert expected.keys() == actual.keys() == dict(whole.model.named_parameters()).keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for found, wanted in losses:
        assert found / 64 == pytest.approx(wanted / 64, abs=1e-5)
    assert losses[4][0] != losses[0][0]


@pytest.mark.parametrize(("precision", "nats"), [("bf16", 1e-3), ("int8", 2e-3), ("int4", 5e-2)])
def test_coefficients_travel_in_every_precision(precision: str, nats: float) -> None:
    exact = through_stages([executor(layers) for layers in STAGES], 1, keeps_graph=True, precision=WirePrecision.FP32)
    stages = [executor(layers) for layers in STAGES]
    rounded = through_stages(stages, 1, keeps_graph=True, precision=WirePrecision(precision))
    assert abs(rounded - exact) / 64 <= nats
    assert all(stage.step(1e-3, 1.0, 64).finite for stage in stages)


@pytest.mark.parametrize(("precision", "forward"), [("fp32", 164), ("bf16", 84), ("int8", 48), ("int4", 26)])
def test_bytes_of_a_token_at_node0s_rank(precision: str, forward: int) -> None:
    assert wire_bytes(1, 40, WirePrecision(precision)) + 4 == forward


def test_ids_travel_as_int32_and_stay_exact() -> None:
    ids = torch.tensor([[0, 1, 255, 256, 257, 65_537, 2**24 + 1, 2**31 - 1]])
    part = part_of("ids", ids.to(torch.int32))
    assert part.spec.byte_count == 4 * ids.numel()
    assert torch.equal(tensor_of(part).to(torch.int64), ids)
    assert int(torch.tensor(257).to(torch.bfloat16)) == 256  # what a float would make of them


def coefficients(size: int = 24, tokens: int = 32) -> Tensor:
    return torch.zeros(2, tokens, size)


IDS = microbatch(1)[0]


@pytest.mark.parametrize(
    ("inputs", "ids", "words"),
    [
        (coefficients(25), IDS, "Activations of 25 values per token, not 24"),
        (coefficients(64), IDS, "Activations of 64 values per token, not 24"),
        (coefficients(), None, "need the ids of their tokens"),
        (coefficients(), IDS[:, :-1], r"Ids of shape \(2, 31\) for \(2, 32\) tokens"),
        (coefficients(), IDS[:1], r"Ids of shape \(1, 32\)"),
        (coefficients(), IDS.float(), "token ids are torch.float32"),
        (coefficients(), IDS[..., None], "3 dimensions"),
        (IDS, None, "activations are torch.int64"),
    ],
)
def test_shapes_are_refused_before_any_work(inputs: Tensor, ids: Tensor | None, words: str) -> None:
    shapes = StageShapes.for_layers(SHAPE, STAGES[1], 2)
    with pytest.raises(RefusedTensorError, match=words):
        shapes.check_forward(inputs, ids)


def test_ids_for_a_stage_without_coefficients_are_refused() -> None:
    plain = replace(SHAPE, subspace_rank=0, free_blocks=0)
    refusals: list[Callable[[], None]] = [
        lambda: StageShapes.for_layers(SHAPE, STAGES[0], 2).check_forward(IDS, IDS),
        lambda: StageShapes.for_layers(plain, STAGES[1], 2).check_forward(coefficients(64), IDS),
    ]
    for refused in refusals:
        with pytest.raises(RefusedTensorError, match="come without ids"):
            refused()


@pytest.mark.parametrize("wrong", [-1, 300, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    stage, shapes = executor(STAGES[1]), StageShapes.for_layers(SHAPE, STAGES[1], 2)
    ids = IDS.clone()
    ids[1, 3] = wrong
    with pytest.raises(RefusedTensorError, match="outside of the vocabulary"):
        stage.forward_pass(shapes, coefficients(), keeps_graph=True, ids=ids)


@pytest.mark.parametrize("layers", STAGES)
def test_the_probe_of_precisions_works_on_every_stage(layers: LayerRange) -> None:
    probe = probe_precision(executor(layers).model, CPU, rounds=1)
    assert probe.chosen in Precision
