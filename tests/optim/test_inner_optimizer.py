"""AdamW's groups, clipping against torch, stage norms, schedules."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.optim.schedule import learning_rate_at, scaled_learning_rate, stage_clip_norm

PARAMETERS = InnerOptimization(
    learning_rate=1e-3, warmup_steps=10, decay_steps=100, schedule="cosine", final_fraction=0.1
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.RMSNorm(5), nn.Linear(5, 3, bias=False))


def set_gradients(model: nn.Module, scale: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return list(model.parameters())


def test_adamw_is_fused_and_decays_matrices_only() -> None:
    optimizer = make_inner_optimizer(make_model(), PARAMETERS)
    matrices, vectors = optimizer.param_groups
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() < 2 for p in vectors["params"])
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices["betas"] == (0.9, 0.95)
    assert matrices["fused"] is True


def test_fused_steps_equal_the_textbook_form() -> None:
    model = make_model()
    optimizer = make_inner_optimizer(model, PARAMETERS)
    expected = [p.detach().double() for p in model.parameters()]
    first = [torch.zeros_like(p) for p in expected]
    second = [torch.zeros_like(p) for p in expected]
    for step in range(1, 6):
        gradients = [p.grad.double() for p in set_gradients(model, float(step)) if p.grad is not None]
        optimizer.step()
        for i, gradient in enumerate(gradients):
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.95 * second[i] + 0.05 * gradient**2
            corrected = (first[i] / (1 - 0.9**step)) / ((second[i] / (1 - 0.95**step)).sqrt() + 1e-8)
            decay = 0.1 if expected[i].dim() >= 2 else 0.0
            expected[i] = expected[i] * (1 - 1e-3 * decay) - 1e-3 * corrected
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, atol=1e-6, rtol=1e-5)


def test_stage_norms_follow_the_law() -> None:
    assert stage_clip_norm(0, 1, 1.0) == 1.0
    assert [stage_clip_norm(s, 4, 2.0) for s in range(4)] == [1.0, 1.0, 1.0, 5.0]
    assert stage_clip_norm(2, 3, 1.0) == pytest.approx(5 / sqrt(3))
    with pytest.raises(ValueError, match="stage"):
        stage_clip_norm(4, 4, 1.0)


def test_warm_up_then_decay() -> None:
    assert learning_rate_at(0, PARAMETERS) == pytest.approx(1e-4)
    assert learning_rate_at(9, PARAMETERS) == pytest.approx(1e-3)
    assert learning_rate_at(10, PARAMETERS) == pytest.approx(1e-3)
    assert learning_rate_at(60, PARAMETERS) == pytest.approx(1e-3 * 0.55)
    assert learning_rate_at(110, PARAMETERS) == learning_rate_at(10**9, PARAMETERS) == pytest.approx(1e-4)


def test_linear_and_constant_schedules() -> None:
    linear = replace(PARAMETERS, schedule="linear", final_fraction=0.0)
    assert learning_rate_at(60, linear) == pytest.approx(5e-4)
    assert learning_rate_at(110, linear) == 0.0
    constant = replace(PARAMETERS, schedule="constant")
    assert learning_rate_at(10**6, constant) == 1e-3


@given(step=st.integers(0, 10_000), warmup=st.integers(0, 50), decay=st.integers(0, 5_000))
def test_rates_stay_within_bounds_and_only_fall_after_the_warm_up(step: int, warmup: int, decay: int) -> None:
    parameters = replace(PARAMETERS, warmup_steps=warmup, decay_steps=decay)
    rate = learning_rate_at(step, parameters)
    assert 0 < rate <= 1e-3 * (1 + 1e-12)
    if step >= warmup:
        assert learning_rate_at(step + 1, parameters) <= rate


def test_scaled_rates_fit_the_width() -> None:
    assert scaled_learning_rate(64) == scaled_learning_rate(192) == 2e-3
    assert scaled_learning_rate(384) == pytest.approx(1e-3)
    assert scaled_learning_rate(8192) == 1e-4
    with pytest.raises(ValueError, match="positive"):
        scaled_learning_rate(0)
