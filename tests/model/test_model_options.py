"""The options of an architecture: every combination against an explicit reference, split, cached and counted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from neuroshard.identity import architecture_from_json, architecture_to_json
from neuroshard.model.architecture import flops_per_token, parameter_count
from neuroshard.model.transformer import KeyValueCache, QueryKeyNorm, StageModel
from neuroshard.model.weights import TensorSchema, initialise
from neuroshard.types import Architecture, LayerRange
from tests.model.test_transformer import gradients_of, run_stages

PLAIN = Architecture(32, 4, 4, 2, 48, 71, 24)
COMBINATIONS = [
    replace(PLAIN, qk_norm=qk_norm, norm_reorder=reordered, trainable_rmsnorm=trained, initialisation=initialisation)
    for qk_norm, reordered, trained, initialisation in product(
        ("none", "head", "width"), (False, True), (True, False), ("fan_in", "depth")
    )
]
each_combination = pytest.mark.parametrize("architecture", COMBINATIONS[::2])  # the weights are replaced in the tests
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "initial_weights.json").read_text())


def initialised(architecture: Architecture, layers: LayerRange | None = None) -> StageModel:
    model = StageModel(architecture, layers)
    initialise(model, 7)
    return model


def shaken(architecture: Architecture) -> StageModel:
    """Weights whose norms differ from one in every place, so that a wrong place or order of a norm shows."""
    model, generator = StageModel(architecture), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, PLAIN.vocabulary_size, (2, 13), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:].clone()


def normed(x: Tensor, scale: Tensor | None, epsilon: float) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return y if scale is None else y * scale


def turned(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def reference_logits(model: StageModel, tokens: Tensor) -> Tensor:
    """The model as section 3.6b of the design writes it, from its weights by name."""
    a, weights = model.architecture, dict(model.named_parameters())
    x = weights["embedding.weight"][tokens]
    queries, keys = a.head_count * a.head_size, a.key_value_head_count * a.head_size
    for layer in range(a.layer_count):

        def scale(name: str, prefix: str = f"layers.{layer}.") -> Tensor | None:
            return weights[f"{prefix}{name}.weight"] if a.trainable_rmsnorm else None

        def matrix(name: str, prefix: str = f"layers.{layer}.") -> Tensor:
            return weights[f"{prefix}{name}.weight"].t()

        def attention(y: Tensor) -> Tensor:
            q, k, v = (y @ matrix("attention.query_key_value")).split((queries, keys, keys), -1)
            if a.qk_norm == "width":
                q = normed(q, scale("attention.norms.query"), a.norm_epsilon)
                k = normed(k, scale("attention.norms.key"), a.norm_epsilon)
            q, k, v = (part.unflatten(-1, (-1, a.head_size)).transpose(1, 2) for part in (q, k, v))
            if a.qk_norm == "head":
                q = normed(q, scale("attention.norms.query"), a.norm_epsilon)
                k = normed(k, scale("attention.norms.key"), a.norm_epsilon)
            q, k = turned(q, a.rope_theta), turned(k, a.rope_theta)
            groups = a.head_count // a.key_value_head_count
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            later = torch.full((y.shape[1], y.shape[1]), -torch.inf).triu(1)
            mixed = torch.softmax(q @ k.transpose(2, 3) / a.head_size**0.5 + later, -1) @ v
            return mixed.transpose(1, 2).flatten(2) @ matrix("attention.output")

        def feed_forward(y: Tensor) -> Tensor:
            gate, up = (y @ matrix("feed_forward.gate_up")).chunk(2, -1)
            return (functional.silu(gate) * up) @ matrix("feed_forward.down")

        if a.norm_reorder:
            x = x + normed(attention(x), scale("attention_norm"), a.norm_epsilon)
            x = x + normed(feed_forward(x), scale("feed_forward_norm"), a.norm_epsilon)
        else:
            x = x + attention(normed(x, scale("attention_norm"), a.norm_epsilon))
            x = x + feed_forward(normed(x, scale("feed_forward_norm"), a.norm_epsilon))
    return normed(x, weights["norm.weight"], a.norm_epsilon) @ weights["head.weight"].t()


@each_combination
def test_logits_equal_those_of_the_reference(architecture: Architecture) -> None:
    model, (tokens, _) = shaken(architecture), batch()
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(tokens)), reference_logits(model, tokens), atol=2e-5, rtol=1e-4)


@given(architecture=st.sampled_from(COMBINATIONS), cuts=st.sets(st.integers(1, PLAIN.layer_count - 1)))
@settings(max_examples=40, deadline=None)
def test_any_split_gives_the_whole_models_loss_and_gradients(architecture: Architecture, cuts: set[int]) -> None:
    inputs, labels = batch()
    whole = initialised(architecture)
    whole_loss = run_stages([whole], inputs, labels)
    edges = [0, *sorted(cuts), architecture.layer_count]
    stages = [initialised(architecture, LayerRange(start, stop)) for start, stop in pairwise(edges)]
    assert run_stages(stages, inputs, labels) == pytest.approx(whole_loss, rel=1e-5)
    expected, actual = gradients_of(whole), gradients_of(*stages)
    assert expected.keys() == actual.keys() == dict(whole.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-5)


@each_combination
def test_cached_logits_equal_uncached_ones(architecture: Architecture) -> None:
    model, (tokens, _) = shaken(architecture), batch()
    cache = KeyValueCache(architecture, LayerRange(0, architecture.layer_count), batch=2)
    with torch.no_grad():
        parts = [model.logits(model(part, cache)) for part in tokens.split((7, 1, 4), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model.logits(model(tokens)), atol=2e-5, rtol=1e-4)


@each_combination
def test_under_autocast_the_loss_stays_close_and_gradients_stay_fp32(architecture: Architecture) -> None:
    model, (inputs, labels) = initialised(architecture), batch()
    exact = model.loss_sum(model(inputs), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.loss_sum(model(inputs), labels)
    low.backward()
    assert low.item() == pytest.approx(exact.item(), rel=2e-2)
    assert {gradient.dtype for gradient in gradients_of(model).values()} == {torch.float32}


@pytest.mark.parametrize("whole", [False, True])
def test_norms_compute_in_fp32(whole: bool) -> None:
    """In bf16, with 8 significant bits, a scale of 1.001 would become 1."""
    architecture = replace(PLAIN, qk_norm="width" if whole else "head", norm_reorder=True)
    norm = QueryKeyNorm(architecture)
    with torch.no_grad():
        for scale in norm.parameters():
            scale.fill_(1.001)
        low = torch.full((1, 3, 6, 8), 1 / 16, dtype=torch.bfloat16)
        expected = 1.001 / 16 / (1 / 256 + PLAIN.norm_epsilon) ** 0.5
        torch.testing.assert_close(norm(low), torch.full((1, 3, 6, 8), expected), atol=1e-6, rtol=1e-6)


@each_combination
def test_parameters_are_counted_and_norms_cost_no_flops(architecture: Architecture) -> None:
    for layers in (None, LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)):
        assert parameter_count(architecture, layers) == TensorSchema.of(StageModel(architecture, layers)).total_size
    assert flops_per_token(architecture) == flops_per_token(PLAIN)
    scales = [name for name, parameter in StageModel(architecture).named_parameters() if parameter.dim() == 1]
    if not architecture.trainable_rmsnorm:
        assert scales == ["norm.weight"]


def digests(model: StageModel) -> dict[str, str]:
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}


def test_initial_weights_by_depth_are_the_recorded_bytes_in_any_split() -> None:
    architecture = replace(Architecture(32, 3, 4, 2, 48, 71, 16), initialisation="depth", qk_norm="head")
    model = StageModel(architecture)
    initialise(model, VECTORS["seed"])
    assert digests(model) == VECTORS["depth_sha256"]
    for layers in (LayerRange(0, 1), LayerRange(1, 3)):
        part = StageModel(architecture, layers)
        initialise(part, VECTORS["seed"])
        assert digests(part).items() <= VECTORS["depth_sha256"].items()


def test_initial_weights_by_depth_have_the_intended_spread() -> None:
    named = dict(initialised(replace(PLAIN, hidden_size=64, initialisation="depth")).named_parameters())
    for layer in range(PLAIN.layer_count):
        deeper = 0.02 / (2 * (layer + 1)) ** 0.5
        gate, up = named[f"layers.{layer}.feed_forward.gate_up.weight"].chunk(2)
        spread = {
            0.02: [gate, named[f"layers.{layer}.attention.query_key_value.weight"]],
            deeper: [
                up,
                *(named[f"layers.{layer}.{name}.weight"] for name in ("attention.output", "feed_forward.down")),
            ],
        }
        for deviation, matrices in spread.items():
            for matrix in matrices:
                assert matrix.std().item() == pytest.approx(deviation, rel=0.05)
    assert named["head.weight"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert named["embedding.weight"].std().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("architecture", COMBINATIONS)
def test_an_architecture_names_only_the_options_that_it_uses(architecture: Architecture) -> None:
    written = architecture_to_json(architecture)
    used = {
        name
        for name in ("qk_norm", "norm_reorder", "trainable_rmsnorm", "initialisation")
        if getattr(architecture, name) != getattr(PLAIN, name)
    }
    assert written.keys() == architecture_to_json(PLAIN).keys() | used
    assert architecture_from_json(written) == architecture
