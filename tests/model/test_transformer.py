"""StageModel: the split law, recompute, bf16, and the cache against the uncached forward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.model.weights import initialise
from neuroshard.types import Architecture, LayerRange

ARCHITECTURE = Architecture(
    hidden_size=32,
    layer_count=5,
    head_count=4,
    key_value_head_count=2,
    feed_forward_size=48,
    vocabulary_size=71,
    sequence_length=24,
)


def make_whole(seed: int = 7) -> StageModel:
    model = StageModel(ARCHITECTURE)
    initialise(model, seed)
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, ARCHITECTURE.vocabulary_size, (2, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 4] = -100
    return tokens[:, :-1], labels


def run_stages(stages: list[StageModel], inputs: Tensor, labels: Tensor) -> float:
    """Forward hop by hop over detached activations, then the gradients back along the same hops."""
    sent: list[tuple[Tensor, Tensor]] = []
    x = inputs
    for stage in stages:
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        y = stage(x)
        sent.append((x, y))
        x = y
    last_input, last_output = sent[-1]
    loss = stages[-1].loss_sum(last_output, labels)
    loss.backward()
    gradient = last_input.grad
    for received, output in reversed(sent[:-1]):
        output.backward(gradient)
        gradient = received.grad
    return loss.item()


def gradients_of(*models: StageModel) -> dict[str, Tensor]:
    return {name: p.grad for model in models for name, p in model.named_parameters() if p.grad is not None}


@given(cuts=st.sets(st.integers(1, ARCHITECTURE.layer_count - 1)))
@settings(max_examples=16, deadline=None)
def test_any_split_gives_the_whole_models_loss_and_gradients(cuts: set[int]) -> None:
    inputs, labels = make_batch()
    whole = make_whole()
    whole_loss = run_stages([whole], inputs, labels)
    edges = [0, *sorted(cuts), ARCHITECTURE.layer_count]
    stages = [StageModel(ARCHITECTURE, LayerRange(a, b)) for a, b in pairwise(edges)]
    for stage in stages:
        initialise(stage, 7)
    assert run_stages(stages, inputs, labels) == pytest.approx(whole_loss, rel=1e-5)
    expected, actual = gradients_of(whole), gradients_of(*stages)
    assert expected.keys() == actual.keys() == dict(whole.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-5)


def test_every_tensor_is_a_parameter() -> None:
    names = {name for name, _ in make_whole().named_parameters()}
    assert len(names) == 6 * ARCHITECTURE.layer_count + 3
    assert "layers.4.feed_forward.down.weight" in names


def test_bf16_autocast_stays_close_and_trains_fp32_parameters() -> None:
    inputs, labels = make_batch()
    exact, low = make_whole(), make_whole()
    expected = run_stages([exact], inputs, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = low.loss_sum(low(inputs), labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=2e-2)
    for name, gradient in gradients_of(low).items():
        reference = gradients_of(exact)[name]
        assert gradient.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), reference.flatten(), dim=0) > 0.99


def test_training_is_bit_identical_for_equal_threads() -> None:
    inputs, labels = make_batch()
    first, second = make_whole(), make_whole()
    assert run_stages([first], inputs, labels) == run_stages([second], inputs, labels)
    assert all(torch.equal(g, gradients_of(second)[name]) for name, g in gradients_of(first).items())


def test_sequences_longer_than_the_model_are_refused() -> None:
    model = make_whole()
    with pytest.raises(ValueError, match="sequence length 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))


def test_middle_stages_have_no_loss_and_layers_must_exist() -> None:
    middle = StageModel(ARCHITECTURE, LayerRange(1, 2))
    activations = torch.zeros(1, 2, 32)
    with pytest.raises(ValueError, match="last stage"):
        middle.loss_sum(activations, torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="last stage"):
        middle.logits(activations)
    with pytest.raises(ValueError, match="not part of"):
        StageModel(ARCHITECTURE, LayerRange(3, 6))


@given(pieces=st.lists(st.integers(1, 7), min_size=1, max_size=8).filter(lambda p: sum(p) <= 24))
@settings(max_examples=20, deadline=None)
def test_cached_logits_equal_uncached_ones(pieces: list[int]) -> None:
    model = make_whole()
    tokens = torch.randint(0, 71, (1, sum(pieces)), generator=torch.Generator().manual_seed(1))
    cache = KeyValueCache(ARCHITECTURE, LayerRange(0, 5))
    with torch.no_grad():
        expected = model.logits(model(tokens))
        actual = torch.cat([model.logits(model(part, cache)) for part in tokens.split(pieces, dim=1)], dim=1)
    assert cache.position == sum(pieces)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_cache_works_across_stages() -> None:
    whole = make_whole()
    stages = [StageModel(ARCHITECTURE, LayerRange(0, 2)), StageModel(ARCHITECTURE, LayerRange(2, 5))]
    caches = [KeyValueCache(ARCHITECTURE, stage.layer_range) for stage in stages]
    for stage in stages:
        initialise(stage, 7)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        parts = [
            stages[1].logits(stages[1](stages[0](part, caches[0]), caches[1])) for part in tokens.split((9, 1, 2), 1)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits(whole(tokens)), atol=1e-5, rtol=1e-5)


def test_past_its_capacity_the_cache_is_attention_with_a_sliding_window(monkeypatch: pytest.MonkeyPatch) -> None:
    window, length = 6, 20
    model = make_whole()
    tokens = torch.randint(0, 71, (1, length), generator=torch.Generator().manual_seed(5))
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    visible = (distance >= 0) & (distance < window)
    attention = torch.nn.functional.scaled_dot_product_attention

    def windowed(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        return attention(query, key, value, attn_mask=visible, enable_gqa=True)

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", windowed)
            expected = model.logits(model(tokens))
        for pieces in ([1] * length, [10, 1, 1, 5, 3], [3, 9, 1, 1, 1, 1, 4]):
            cache = KeyValueCache(ARCHITECTURE, LayerRange(0, 5), capacity=window)
            actual = torch.cat([model.logits(model(part, cache)) for part in tokens.split(pieces, 1)], 1)
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_generation_goes_on_past_the_sequence_length() -> None:
    model = make_whole()
    cache = KeyValueCache(ARCHITECTURE, LayerRange(0, 5))
    with torch.no_grad():
        for token in range(60):
            logits = model.logits(model(torch.tensor([[token]]), cache))
    assert cache.position == 60
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("capacity", [0, 25])
def test_cache_capacity_is_bounded(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        KeyValueCache(ARCHITECTURE, LayerRange(0, 5), capacity=capacity)
