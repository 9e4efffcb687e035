"""Muon: each logical matrix of a layer moves along its orthogonalised momentum, all other parameters as AdamW's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.inner_optimizer import clipped_step, make_inner_optimizer, muon_update, zero_moments
from neuroshard.types import Architecture

SHAPE = Architecture(
    hidden_size=8,
    layer_count=2,
    head_count=2,
    key_value_head_count=1,
    feed_forward_size=20,
    vocabulary_size=16,
    sequence_length=4,
)
LOGICAL = {  # rows of each logical matrix
    "attention.query_key_value.weight": (8, 4, 4),
    "attention.output.weight": (8,),
    "feed_forward.gate_up.weight": (20, 20),
    "feed_forward.down.weight": (8,),
}
INNER = InnerOptimization(learning_rate=1e-2, weight_decay=0.3)
MUON = replace(INNER, optimizer="muon")


def new_model() -> StageModel:
    model = StageModel(SHAPE)
    initialise(model, 3)
    return model


def gradients_at(model: StageModel, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def trained(inner: InnerOptimization, steps: int, *, tokens: int = 1, max_norm: float = 1e9) -> StageModel:
    model = new_model()
    optimizer = make_inner_optimizer(model, inner)
    for step in range(steps):
        gradients = gradients_at(model, step)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name] * tokens
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        clipped_step(optimizer, inner.learning_rate, tokens=tokens, grad_norm=norm, max_norm=max_norm)
    return model


def textbook_update(momentum: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration, in double precision."""
    x = momentum / momentum.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return 0.2 * max(momentum.shape) ** 0.5 * x


def is_of_muon(name: str) -> bool:
    return name.startswith("layers.") and not name.endswith("norm.weight")


def test_steps_equal_the_textbook_form() -> None:
    expected = {name: parameter.detach().double() for name, parameter in new_model().named_parameters()}
    momenta = {name: torch.zeros_like(weights) for name, weights in expected.items()}
    for step in range(4):
        for name, gradient in gradients_at(new_model(), step).items():
            if is_of_muon(name):
                momenta[name] = 0.95 * momenta[name] + gradient
                parts = (0.95 * momenta[name] + gradient).split(LOGICAL[name.partition(".")[2].partition(".")[2]])
                update = torch.cat([textbook_update(part) for part in parts])
                expected[name] = expected[name] * (1 - 1e-2 * 0.3) - 1e-2 * update
    for name, parameter in trained(MUON, 4).named_parameters():
        if is_of_muon(name):
            torch.testing.assert_close(parameter.detach().double(), expected[name], atol=1e-5, rtol=1e-4)


def test_embedding_head_and_vectors_are_those_of_adamw_bit_for_bit() -> None:
    of_adamw = dict(trained(INNER, 3, tokens=7, max_norm=1.0).named_parameters())
    for name, parameter in trained(MUON, 3, tokens=7, max_norm=1.0).named_parameters():
        assert torch.equal(parameter, of_adamw[name]) is not is_of_muon(name), name


@pytest.mark.parametrize("shape", [(8, 8), (20, 8), (4, 8), (64, 192)])
def test_an_update_is_almost_orthogonal_and_as_large_as_adamws(shape: tuple[int, int]) -> None:
    momentum = (
        torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-4, 1, 1e3])[:, None, None]
    )
    update = muon_update(momentum)
    sizes = update.pow(2).mean(dim=(1, 2)).sqrt()
    assert ((sizes > 0.13) & (sizes < 0.24)).all()  # 0.2 for exactly orthogonal rows
    largest = torch.linalg.matrix_norm(update, ord=2) / (0.2 * max(shape) ** 0.5)
    assert ((largest > 0.7) & (largest < 1.3)).all()
    assert torch.equal(muon_update(torch.zeros(1, *shape)), torch.zeros(1, *shape))


def test_the_number_of_tokens_and_clipping_do_not_change_the_direction_of_the_first_step() -> None:
    plain, clipped = trained(MUON, 1), trained(MUON, 1, tokens=512, max_norm=0.1)
    for (name, one), other in zip(plain.named_parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, msg=name)


def test_a_matrix_of_a_layer_has_one_moment_and_everything_else_two() -> None:
    model = new_model()
    moments = zero_moments(model, MUON)
    for name, parameter in model.named_parameters():
        expected = ["momentum_buffer"] if is_of_muon(name) else ["step", "exp_avg", "exp_avg_sq"]
        assert list(moments[parameter]) == expected, name
