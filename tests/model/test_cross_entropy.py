"""Row-chunked cross-entropy: equal to the plain form, and never holding all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from neuroshard.model.memory_need import chunk_rows
from neuroshard.model.transformer import cross_entropy_sum


def make_inputs(rows: int, width: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@given(
    rows=st.integers(1, 70),
    vocabulary=st.integers(2, 90),
    chunk_bytes=st.sampled_from([1, 16 * 90 * 4, 1 << 20]),
    ignored=st.sets(st.integers(0, 69)),
)
@settings(max_examples=30, deadline=None)
def test_equals_the_plain_form(rows: int, vocabulary: int, chunk_bytes: int, ignored: set[int]) -> None:
    hidden, weight, labels = make_inputs(rows, 12, vocabulary)
    for row in ignored:
        labels[row:][:1] = -100
    loss = cross_entropy_sum(hidden, weight, labels, chunk_bytes)
    (loss / 7).backward()
    ours = (gradient(hidden).clone(), gradient(weight).clone())
    hidden.grad = weight.grad = None
    expected = functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum", ignore_index=-100)
    (expected / 7).backward()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours, (gradient(hidden), gradient(weight)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("logit", "expected"), [(80.0, 80.0), (400.0, 87.34)])
def test_extreme_logits_stay_finite_with_exact_gradients(logit: float, expected: float) -> None:
    """A label of probability exp(-400) has a loss of 87.3, the most there is, not infinity."""
    weight = torch.tensor([[logit], [0.0]], requires_grad=True)
    loss = cross_entropy_sum(torch.ones(1, 1), weight, torch.tensor([1]))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    torch.testing.assert_close(gradient(weight), torch.tensor([[1.0], [-1.0]]))


def test_all_labels_ignored_is_zero() -> None:
    hidden, weight, labels = make_inputs(5, 4, 6)
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not gradient(hidden).any()
    assert not gradient(weight).any()


def test_gradients_scale_with_what_comes_from_above_and_serve_once() -> None:
    hidden, weight, labels = make_inputs(9, 4, 6)
    loss = cross_entropy_sum(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_evaluation_computes_no_gradients_and_the_same_loss() -> None:
    hidden, weight, labels = make_inputs(40, 4, 6)
    with torch.no_grad():
        evaluated = cross_entropy_sum(hidden, weight, labels, 1)
    assert not evaluated.requires_grad
    assert evaluated.item() == cross_entropy_sum(hidden, weight, labels, 1).item()


def test_a_nan_shows_in_the_loss() -> None:
    hidden, weight, labels = make_inputs(4, 4, 6)
    with torch.no_grad():
        hidden[2, 1] = float("nan")
    assert not bool(cross_entropy_sum(hidden, weight, labels).isfinite())


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_bf16_autocast_is_close_and_returns_fp32_gradients(chunk_bytes: int) -> None:
    hidden, weight, labels = make_inputs(50, 16, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, labels, chunk_bytes)
    loss.backward()
    low = gradient(weight).clone()
    weight.grad = None
    expected = cross_entropy_sum(hidden, weight, labels)
    expected.backward()
    assert loss.dtype == torch.float32
    assert low.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert functional.cosine_similarity(low.flatten(), gradient(weight).flatten(), dim=0) > 0.999


def test_chunks_are_chosen_by_bytes() -> None:
    assert chunk_rows(32_000, 16 << 20) == 128
    assert chunk_rows(2_000, 16 << 20) == 2096
    assert chunk_rows(10_000_000, 16 << 20) == 16
