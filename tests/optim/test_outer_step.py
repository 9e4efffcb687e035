"""DiLoCo's outer step: torch's SGD as oracle, the two measured traps, and value semantics."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.optim.outer import (
    OuterState,
    fresh_outer_state,
    nesterov_outer_step,
)

SIZE = 257


def random_vector(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(
    lr=st.floats(0.01, 1.5),
    momentum=st.floats(0.0, 0.99),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_many_steps_equal_torch_sgd_with_nesterov(lr: float, momentum: float, seed: int) -> None:
    state = fresh_outer_state(random_vector(seed))
    weights = torch.nn.Parameter(state.anchor.clone())
    oracle = torch.optim.SGD([weights], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(40):
        gradient = 0.1 * random_vector(seed + step + 1)
        state = nesterov_outer_step(state, gradient, lr, momentum)
        weights.grad = gradient.clone()
        oracle.step()
    assert state.outer_step == 40
    torch.testing.assert_close(state.anchor, weights.detach(), atol=1e-4, rtol=1e-4)


def test_the_formula_by_hand() -> None:
    state = OuterState(torch.tensor([1.0]), torch.tensor([0.5]), 3)
    after = nesterov_outer_step(state, torch.tensor([0.25]), lr=0.5, momentum=0.5)
    assert after.velocity.item() == 0.5  # 0.5 * 0.5 + 0.25
    assert after.anchor.item() == 0.75  # 1 - 0.5 * (0.25 + 0.5 * 0.5)
    assert after.outer_step == 4


def test_the_step_moves_from_the_anchor_towards_the_local_weights() -> None:
    """Trap 1 (sign) and trap 2 (applied to the local weights): both were measured to diverge."""
    anchor, local = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -1.0])
    after = nesterov_outer_step(fresh_outer_state(anchor), anchor - local, lr=0.5, momentum=0.0)
    assert torch.equal(after.anchor, torch.tensor([0.75, -1.5]))


def test_replicas_with_different_local_weights_agree_after_a_round() -> None:
    anchor = random_vector(0)
    locals_ = [anchor + 0.01 * random_vector(i) for i in range(1, 5)]
    aggregate = torch.stack([anchor - w for w in locals_]).mean(0)
    states = [nesterov_outer_step(fresh_outer_state(anchor.clone()), aggregate, 0.7, 0.9) for _ in locals_]
    assert all(torch.equal(states[0].anchor, state.anchor) for state in states)


def descend(outer: bool, rounds: int = 60) -> Tensor:
    """Gradient descent on a quadratic; with outer, every step goes through a round of one: H=1, lr=1, m=0, n=1."""
    target, weights = random_vector(1), 2 * random_vector(1) + 0.5
    state = fresh_outer_state(weights.clone())
    for _ in range(rounds):
        weights = weights - 0.125 * (weights - target)
        if outer:
            state = nesterov_outer_step(state, state.anchor - weights, lr=1.0, momentum=0.0)
            weights = state.anchor.clone()
    return weights


def test_one_inner_step_with_unit_rate_and_no_momentum_changes_nothing() -> None:
    torch.testing.assert_close(descend(outer=True), descend(outer=False), atol=1e-6, rtol=0)


@given(seed=st.integers(0, 2**31), relative=st.floats(0.0, 0.4))
@settings(max_examples=40, deadline=None)
def test_a_unit_round_returns_the_local_weights_bit_for_bit(seed: int, relative: float) -> None:
    """a - (a - w) is exactly w while w lies within a factor of two of a (Sterbenz); beyond, one rounding remains."""
    anchor = random_vector(seed)
    local = anchor * (1 + relative * (2 * torch.rand(SIZE, generator=torch.Generator().manual_seed(seed)) - 1))
    after = nesterov_outer_step(fresh_outer_state(anchor), anchor - local, lr=1.0, momentum=0.0)
    assert torch.equal(after.anchor, local)


def test_the_old_state_is_a_value() -> None:
    state = OuterState(random_vector(1), random_vector(2), 0)
    before = (state.anchor.clone(), state.velocity.clone())
    gradient = random_vector(3)
    nesterov_outer_step(state, gradient, 0.7, 0.9)
    assert torch.equal(state.anchor, before[0])
    assert torch.equal(state.velocity, before[1])


def digest(state: OuterState) -> str:
    return hashlib.sha256(state.anchor.numpy().tobytes() + state.velocity.numpy().tobytes()).hexdigest()


def test_bytes_do_not_depend_on_the_thread_count() -> None:
    size = 3_000_001
    state = OuterState(random_vector(1, size), random_vector(2, size), 0)
    gradient = random_vector(3, size)
    before = torch.get_num_threads()
    results: set[str] = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.add(digest(nesterov_outer_step(state, gradient, 0.7, 0.9)))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


def test_every_operation_is_rounded_on_its_own() -> None:
    """Equal to numpy's separate fp32 products and sums to the last bit: no fused multiply-add."""
    state, gradient = OuterState(random_vector(1), random_vector(2), 0), random_vector(3)
    a, v, d = state.anchor.numpy(), state.velocity.numpy(), gradient.numpy()
    lr, momentum = a.dtype.type(0.7), a.dtype.type(0.9)
    velocity = v * momentum + d
    expected = a - (velocity * momentum + d) * lr
    after = nesterov_outer_step(state, gradient, 0.7, 0.9)
    assert (after.anchor.numpy() == expected).all()
    assert (after.velocity.numpy() == velocity).all()


def test_wrong_vectors_are_refused() -> None:
    state = fresh_outer_state(random_vector(1))
    for wrong in (random_vector(1, SIZE + 1), random_vector(1).double(), random_vector(1)[None]):
        with pytest.raises(ValueError, match="fp32 CPU vector"):
            nesterov_outer_step(state, wrong, 0.7, 0.9)
    with pytest.raises(ValueError, match="one length"):
        nesterov_outer_step(OuterState(random_vector(1), random_vector(1, 3), 0), random_vector(1), 0.7, 0.9)
    with pytest.raises(ValueError, match="fp32 vector"):
        fresh_outer_state(random_vector(1).double())
