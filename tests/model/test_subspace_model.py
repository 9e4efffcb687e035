"""A model whose activations stay in a subspace: what a cut sends, what it must not change, and the factored weights.

Sizes and tolerances are those of the table in section 4.8 of the design.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.architecture import flops_per_token, layer_matrices_count, parameter_count
from neuroshard.model.backward import backward_from_gradient
from neuroshard.model.memory_need import memory_need, travelling_bytes
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.model.weights import TensorSchema, initialise
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.types import Architecture, LayerRange

SEED = 5
# head, two bodies and a tail of two blocks
PRE_NORM = Architecture(256, 5, 4, 2, 704, 500, 64, subspace_rank=32, free_blocks=2)
EDGES = (0, 1, 2, 3, 5)
VARIANTS = {
    "reordered, frozen": replace(PRE_NORM, norm_reorder=True, trainable_rmsnorm=False, qk_norm="head"),
    "pre-norm, frozen": replace(PRE_NORM, trainable_rmsnorm=False),
    "pre-norm, trained": PRE_NORM,
    "reordered by depth": replace(
        PRE_NORM, norm_reorder=True, trainable_rmsnorm=False, qk_norm="head", initialisation="depth"
    ),
}
each_variant = pytest.mark.parametrize("architecture", VARIANTS.values(), ids=VARIANTS)


def built(architecture: Architecture, layers: LayerRange | None = None) -> StageModel:
    model = StageModel(architecture, layers, Subspace(architecture, SEED))
    initialise(model, SEED)
    return model


def moved(architecture: Architecture, share: float = 0.1) -> StageModel:
    """A whole model whose scales of norms were moved by up to `share`."""
    model, generator = built(architecture), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + share * (2 * torch.rand(parameter.shape, generator=generator) - 1))
    return model


def stages_of(whole: StageModel, edges: tuple[int, ...] = EDGES) -> list[StageModel]:
    """The same weights in several stages, each with a subspace of its own."""
    weights = dict(whole.named_parameters())
    stages = [built(whole.architecture, LayerRange(start, stop)) for start, stop in pairwise(edges)]
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                parameter.copy_(weights[name])
    return stages


def batch(seed: int = 2) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 500, (2, 65), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone()


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def streams(model: StageModel, ids: Tensor) -> Iterator[Tensor]:
    """The residual stream before each layer of a whole model."""
    found = list[Tensor]()
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])) for block in model.layers.values()
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    yield from found


def cut_error(model: StageModel, ids: Tensor) -> float:
    """Largest relative error of an activation that was compressed and restored, over all places of a cut."""
    subspace = model.subspace
    assert subspace is not None
    constrained = list(streams(model, ids))[1 : model.architecture.constrained_layers + 1]
    assert len(constrained) == 3
    return max(relative(subspace.restore(subspace.compress(h, ids), ids), h) for h in constrained)


def run_stages(stages: list[StageModel], ids: Tensor, labels: Tensor) -> float:
    """Both passes, with what travels between the stages; gradients are accumulated in them."""
    inputs, passes = ids, list[tuple[Tensor, Tensor]]()
    for stage in stages[:-1]:
        output = stage(inputs, ids=ids)
        assert output.shape == (*ids.shape, stage.architecture.subspace_rank)
        passes.append((inputs, output))
        inputs = output.detach().requires_grad_()
    loss = stages[-1].loss_sum(stages[-1](inputs, ids=ids), labels)
    loss.backward()
    for before, output in reversed(passes):
        assert inputs.grad is not None
        backward_from_gradient(output, inputs.grad)
        inputs = before
    return loss.item() / labels.numel()


def gradients_of(*models: StageModel) -> dict[str, Tensor]:
    return {name: p.grad for model in models for name, p in model.named_parameters() if p.grad is not None}


@each_variant
def test_an_activation_survives_the_cut(architecture: Architecture) -> None:
    assert cut_error(moved(architecture), batch()[0]) <= 1e-5


def test_trained_scales_of_reordered_norms_would_leave_the_subspace() -> None:
    """Built by hand, because a run refuses this: the test of the cut can fail."""
    assert cut_error(moved(replace(PRE_NORM, norm_reorder=True)), batch()[0]) > 1e-2


@each_variant
def test_a_cut_changes_neither_loss_nor_gradients(architecture: Architecture) -> None:
    ids, labels = batch()
    whole = moved(architecture)
    stages = stages_of(whole)
    expected = whole.loss_sum(whole(ids), labels)
    expected.backward()
    assert run_stages(stages, ids, labels) == pytest.approx(expected.item() / labels.numel(), abs=1e-5)
    found, wanted = gradients_of(*stages), gradients_of(whole)
    assert found.keys() == wanted.keys() == dict(whole.named_parameters()).keys()
    factors = [name for name in wanted if name.endswith(".factor")]
    assert len(factors) == 1 + 2 * 3
    for name, gradient in wanted.items():
        assert relative(found[name], gradient) <= 1e-5, name


@given(
    variant=st.sampled_from(list(VARIANTS.values())),
    free=st.integers(0, 3),
    cuts=st.sets(st.integers(1, 2)),
)
@settings(max_examples=12, deadline=None)
def test_any_split_before_the_free_blocks_equals_the_whole(variant: Architecture, free: int, cuts: set[int]) -> None:
    ids, labels = batch()
    whole = built(replace(variant, free_blocks=free))
    expected = whole.loss_sum(whole(ids), labels).item() / labels.numel()
    stages = stages_of(whole, (0, *sorted(cuts), 5))
    assert run_stages(stages, ids, labels) == pytest.approx(expected, abs=1e-5)


def dense(model: StageModel) -> StageModel:
    """The plain model with W = U Z and E = F + C U^T."""
    assert model.subspace is not None
    basis, every_id = model.subspace.basis, torch.arange(model.architecture.vocabulary_size)[None]
    plain = StageModel(replace(model.architecture, subspace_rank=0, free_blocks=0))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            factor = weights.get(name.removesuffix("weight") + "factor")
            if factor is None:
                parameter.copy_(weights[name])
            elif name == "embedding.weight":
                parameter.copy_(model.subspace.restore(factor[None], every_id)[0])
            else:
                parameter.copy_(basis @ factor)
    return plain


@each_variant
def test_the_factored_model_is_the_plain_one_with_its_products(architecture: Architecture) -> None:
    ids, labels = batch()
    model = moved(architecture)
    plain = dense(model)
    with torch.no_grad():
        assert relative(model.logits(model(ids)), plain.logits(plain(ids))) <= 1e-5
    model.loss_sum(model(ids), labels).backward()
    plain.loss_sum(plain(ids), labels).backward()
    assert model.subspace is not None
    basis = model.subspace.basis
    of_plain = gradients_of(plain)
    for name, gradient in gradients_of(model).items():
        if name == "embedding.factor":
            expected = of_plain["embedding.weight"] @ basis
        elif name.endswith(".factor"):
            expected = basis.t() @ of_plain[name.removesuffix("factor") + "weight"]
        else:
            expected = of_plain[name]
        assert relative(gradient, expected) <= 1e-5, name


def test_a_subspace_of_the_whole_width_is_the_plain_model() -> None:
    """With k = d, U is a rotation: factors U^T W and U^T (E - F) give the plain model, cut or not."""
    ids, labels = batch()
    full = replace(PRE_NORM, hidden_size=64, feed_forward_size=96, subspace_rank=64)
    plain = StageModel(replace(full, subspace_rank=0, free_blocks=0))
    initialise(plain, 1)
    model = built(full)
    assert model.subspace is not None
    basis, every_id = model.subspace.basis, torch.arange(full.vocabulary_size)[None]
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = weights[name.replace(".factor", ".weight")]
            if name == "embedding.factor":
                parameter.copy_(model.subspace.compress(matrix[None], every_id)[0])
            else:
                parameter.copy_(basis.t() @ matrix if name.endswith(".factor") else matrix)
        torch.testing.assert_close(model.logits(model(ids)), plain.logits(plain(ids)), atol=1e-4, rtol=1e-4)
    plain.loss_sum(plain(ids), labels).backward()
    run_stages(stages := stages_of(model), ids, labels)
    expected = gradients_of(plain)
    for name, gradient in gradients_of(*stages).items():
        if not name.endswith(".factor"):
            assert relative(gradient, expected[name]) <= 1e-4, name
        elif name != "embedding.factor":
            assert relative(basis @ gradient, expected[name.replace(".factor", ".weight")]) <= 1e-4, name


@pytest.mark.parametrize(
    ("variant", "name", "count"),
    [("reordered, frozen", "adamw", 100), ("pre-norm, trained", "adamw", 100), ("pre-norm, trained", "muon", 10)],
)
def test_after_many_steps_activations_still_survive_the_cut(
    variant: str, name: Literal["adamw", "muon"], count: int
) -> None:
    model = built(VARIANTS[variant])
    optimizer = make_inner_optimizer(model, InnerOptimization(learning_rate=3e-3, optimizer=name))
    (ids, labels), losses = (part[:1, :32] for part in batch()), list[float]()
    for _ in range(count):
        loss = model.loss_sum(model(ids), labels) / labels.numel()
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < (losses[0] / 4 if count == 100 else losses[0] - 0.1)
    assert cut_error(model, ids) <= 1e-5


def test_low_precision_products_do_not_leave_the_subspace() -> None:
    """U times a vector is computed in fp32 under autocast, too. In bf16 the error of the cut would be above 1e-3."""
    model, (ids, labels) = built(VARIANTS["reordered, frozen"]), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cut_error(model, ids) <= 1e-5
        loss = model.loss_sum(model(ids), labels)
        cut = run_stages(stages_of(model), ids, labels)
    assert cut == pytest.approx(loss.item() / labels.numel(), rel=2e-3)


def test_a_cache_of_keys_gives_the_logits_of_the_whole_text() -> None:
    model, (ids, _) = built(VARIANTS["reordered, frozen"]), batch()
    stages = stages_of(model)
    caches = [KeyValueCache(model.architecture, stage.layer_range, batch=2) for stage in stages]
    parts = list[Tensor]()
    with torch.no_grad():
        for part in ids.split((40, 1, 23), 1):
            values = part
            for stage, cache in zip(stages, caches, strict=True):
                values = stage(values, cache, part)
            parts.append(stages[-1].logits(values))
        torch.testing.assert_close(torch.cat(parts, 1), model.logits(model(ids)), atol=1e-4, rtol=1e-4)


def test_neither_basis_nor_rows_are_parameters() -> None:
    model = built(PRE_NORM)
    schema = TensorSchema.of(model)
    assert model.state_dict().keys() == set(schema.names)
    factors = {name: shape for name, shape in zip(schema.names, schema.shapes, strict=True) if name.endswith("factor")}
    assert factors == {
        "embedding.factor": (500, 32),
        **{f"layers.{layer}.attention.output.factor": (32, 256) for layer in range(3)},
        **{f"layers.{layer}.feed_forward.down.factor": (32, 704) for layer in range(3)},
    }
    assert not [name for name in schema.names if name.startswith("subspace")]
    with torch.device("meta"):
        assert TensorSchema.of(StageModel(PRE_NORM)) == schema


def test_a_model_without_its_subspace_or_ids_computes_nothing() -> None:
    ids, _ = batch()
    with pytest.raises(ValueError, match="subspace of its run"):
        StageModel(PRE_NORM)(ids)
    with pytest.raises(ValueError, match="ids of their tokens"):
        built(PRE_NORM, LayerRange(1, 2))(torch.zeros(2, 64, 32))


def test_factors_begin_with_the_deviation_of_the_whole_matrix() -> None:
    model = built(PRE_NORM)
    plain = StageModel(replace(PRE_NORM, subspace_rank=0, free_blocks=0))
    initialise(plain, SEED)
    weights = dict(plain.named_parameters())
    for name, factor in model.named_parameters():
        if name == "embedding.factor":
            assert factor.std().item() == pytest.approx(0.02, rel=0.05)
        elif name.endswith(".factor"):
            expected = weights[name.replace(".factor", ".weight")].std().item()
            assert factor.std().item() == pytest.approx(expected, rel=0.05)
    deep = dict(built(VARIANTS["reordered by depth"]).named_parameters())
    for layer in range(3):
        for name in ("attention.output", "feed_forward.down"):
            deviation = deep[f"layers.{layer}.{name}.factor"].std().item()
            assert deviation == pytest.approx(0.02 / (2 * (layer + 1)) ** 0.5, rel=0.05)


@each_variant
def test_parameters_of_any_stage_are_counted(architecture: Architecture) -> None:
    for layers in (None, *(LayerRange(start, stop) for start in range(5) for stop in range(start + 1, 6))):
        with torch.device("meta"):
            assert parameter_count(architecture, layers) == TensorSchema.of(StageModel(architecture, layers)).total_size


def test_a_block_of_node0_has_a_third_fewer_parameters() -> None:
    whole = Architecture(4096, 32, 32, 8, 14_336, 50_265, 4096)
    factored = replace(whole, subspace_rank=40, free_blocks=1)
    one = LayerRange(1, 2)
    assert layer_matrices_count(whole, one) == 218_103_808
    assert layer_matrices_count(factored, one) == 143_343_616  # 0.657 of it
    assert layer_matrices_count(factored, LayerRange(30, 32)) == 143_343_616 + 218_103_808
    attention = 12 * 32 * 4096 * 4096
    matrices = 31 * 143_343_616 + 218_103_808 + 50_265 * 4096
    basis = (2 * 31 + 1) * 40 * 4096  # for the two matrices that write, and for the embedding
    assert flops_per_token(factored) == 6 * matrices + attention + 4 * basis


def test_the_memory_plan_counts_the_factors_and_what_travels() -> None:
    whole = Architecture(1024, 8, 16, 8, 2816, 8_000, 512)
    factored = replace(whole, subspace_rank=64, free_blocks=2)
    middle = LayerRange(2, 4)
    before, after = memory_need(whole, middle), memory_need(factored, middle)
    assert after.device.weights == 4 * parameter_count(factored, middle) < before.device.weights
    assert after.host.anchor == after.device.weights
    assert before.device.subspace == 0
    rows, tables = min(64_000_000, 4 * 8_000 * 1024), 4 * 1024 * 64 + 8 * 8_000
    assert after.device.subspace == rows + tables + 2 * 4 * 512 * 1024
    smaller = memory_need(factored, middle, subspace_cache_mb=8)
    assert after.device.subspace - smaller.device.subspace == rows - 8_000_000
    assert travelling_bytes(factored, 2) == 2 * 512 * (4 * 64 + 8)
    muon = memory_need(factored, middle, optimizer="muon").device.moments
    assert muon == 4 * (2 * parameter_count(factored, middle) - layer_matrices_count(factored, middle))
