"""AdamW on averaged gradients: PyTorch's numbers, and the same bytes everywhere."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.optim.adamw import AdamWState, replicated_adamw_step

PARAMETERS = InnerOptimization(beta1=0.9, beta2=0.95, weight_decay=0.1)


def normal(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def fresh(weights: torch.Tensor) -> AdamWState:
    return AdamWState(weights, torch.zeros_like(weights), torch.zeros_like(weights), 0)


def test_it_is_adamw() -> None:
    matrix, vector = normal(600, 1).view(20, 30), normal(30, 2)
    parameters = [torch.nn.Parameter(matrix.clone()), torch.nn.Parameter(vector.clone())]
    groups = [
        {"params": [parameters[0]], "weight_decay": PARAMETERS.weight_decay},
        {"params": [parameters[1]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(PARAMETERS.beta1, PARAMETERS.beta2))
    state = fresh(torch.cat([matrix.flatten(), vector]))
    for step in range(30):
        gradient = normal(630, 10 + step)
        parameters[0].grad, parameters[1].grad = (gradient[:600] * 0.5).view(20, 30), gradient[600:] * 0.5
        optimizer.step()
        state = replicated_adamw_step(state, gradient, PARAMETERS, 3e-3, decayed=[(0, 600)], scale=0.5)
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    torch.testing.assert_close(state.weights, expected, atol=1e-6, rtol=1e-5)
    assert state.steps == 30


def test_threads_change_no_bit_and_what_is_given_stays() -> None:
    """Longer than what is handled at once, with decay that begins and ends within a piece."""
    length = (1 << 20) + 5000
    before, found = fresh(normal(length, 1)), set[str]()
    held = [tensor.clone() for tensor in (before.weights, before.first_moment, before.second_moment)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            state = before
            for step in range(2):
                decayed = [(7, 90), (1 << 19, length - 9)]
                state = replicated_adamw_step(state, normal(length, 5 + step), PARAMETERS, 1e-3, decayed=decayed)
            tensors = (state.weights, state.first_moment, state.second_moment)
            found.add(sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert all(map(torch.equal, held, (before.weights, before.first_moment, before.second_moment)))


def test_decay_begins_and_ends_where_it_is_said() -> None:
    weights, decayed = torch.ones((1 << 20) + 10), [(3, 5), ((1 << 20) - 2, (1 << 20) + 4)]
    after = replicated_adamw_step(fresh(weights), torch.zeros_like(weights), PARAMETERS, 1.0, decayed=decayed).weights
    shrunk = (after != 1).nonzero().flatten().tolist()
    assert shrunk == [3, 4, *range((1 << 20) - 2, (1 << 20) + 4)]
    assert after[3].item() == pytest.approx(0.9)


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(1, 5)])
def test_gradients_that_do_not_fit(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        replicated_adamw_step(fresh(torch.zeros(5)), wrong, PARAMETERS, 1e-3, decayed=[])
