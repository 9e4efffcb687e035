from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import trio
from small_stage import ARCHITECTURE, PARAMETERS, windows
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.initial_weights import initialise
from neuroshard.model.transformer import StageModel
from neuroshard.optim.inner import make_inner_optimizer
from neuroshard.training.compute import ComputeThread
from neuroshard.training.executor import SessionError, SessionId, StageExecutor
from neuroshard.training.pipeline import LocalHop, run_microbatch, sequence_losses
from neuroshard.types import LayerRange

ROWS = windows(3, 6)
INPUTS, LABELS = ROWS[:, :-1], ROWS[:, 1:]


def executor_of(start: int, stop: int) -> StageExecutor:
    model = StageModel(ARCHITECTURE, LayerRange(start, stop))
    initialise(model, 11)
    return StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"))


def gradients(executors: list[StageExecutor]) -> dict[str, Tensor]:
    named = [pair for executor in executors for pair in executor.model.named_parameters()]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_any_split_gives_the_loss_and_gradients_of_the_whole_model(
    compute: ComputeThread, cuts: tuple[int, ...]
) -> None:
    whole = StageModel(ARCHITECTURE)
    initialise(whole, 11)
    expected = whole.loss_sum(whole(INPUTS), LABELS)
    expected.backward()
    executors = [executor_of(a, b) for a, b in pairwise(cuts)]
    route = [LocalHop(compute, executor) for executor in executors]

    async def main() -> None:
        total = 0.0
        for number, part in enumerate((slice(0, 2), slice(2, 6))):
            result = await run_microbatch(route, SessionId(number), INPUTS[part], LABELS[part])
            total += result.loss_sum.item()
        assert total == pytest.approx(expected.item(), rel=1e-5)
        losses = await sequence_losses(route, INPUTS, LABELS)
        assert losses.shape == (6,)
        assert losses.sum().item() * LABELS.shape[1] == pytest.approx(expected.item(), rel=1e-5)

    trio.run(main)
    found = gradients(executors)
    assert found.keys() == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_a_step_divides_by_tokens_clips_and_equals_plain_adamw() -> None:
    executor, plain = executor_of(0, 3), executor_of(0, 3)
    inner = InnerOptimization(learning_rate=1e-2)
    for number in range(3):
        for part in (slice(0, 2), slice(2, 6)):
            executor.forward(SessionId(number), INPUTS[part], LABELS[part])
            executor.backward(SessionId(number))
        result = executor.step(inner.learning_rate, 0.5, LABELS.numel())
        loss = plain.model.loss_sum(plain.model(INPUTS), LABELS) / LABELS.numel()
        plain.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        for group in plain.optimizer.param_groups:
            group["lr"] = inner.learning_rate
        plain.optimizer.step()
        assert result.finite
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert result.grad_norm > 0.5  # so that it was clipped
    for a, b in zip(executor.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_non_finite_gradient_changes_nothing_and_is_forgotten() -> None:
    executor = executor_of(0, 3)
    before = [parameter.detach().clone() for parameter in executor.model.parameters()]
    executor.forward(SessionId(1), INPUTS, LABELS)
    executor.backward(SessionId(1))
    next(p.grad for p in executor.model.parameters() if p.grad is not None)[0] = float("nan")
    assert not executor.step(1e-2, 1.0, 96).finite
    assert all(torch.equal(a, b) for a, b in zip(before, executor.model.parameters(), strict=True))
    executor.forward(SessionId(2), INPUTS, LABELS)
    executor.backward(SessionId(2))
    assert executor.step(1e-2, 1.0, 96).finite


def test_sessions_are_bounded_and_gradients_checked() -> None:
    model = StageModel(ARCHITECTURE, LayerRange(1, 2))
    initialise(model, 1)
    executor = StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"), max_sessions=2)
    activations = torch.randn(1, 16, 32)
    executor.forward(SessionId(1), activations)
    with pytest.raises(SessionError, match="already open"):
        executor.forward(SessionId(1), activations)
    executor.forward(SessionId(2), activations)
    with pytest.raises(SessionError, match="2 microbatches are open"):
        executor.forward(SessionId(3), activations)
    with pytest.raises(SessionError, match="not open"):
        executor.backward(SessionId(9), activations)
    with pytest.raises(SessionError, match="shape"):
        executor.backward(SessionId(1), activations[:, :3])
    with pytest.raises(SessionError, match="non-finite"):
        executor.backward(SessionId(1), torch.full_like(activations, torch.inf))
    gradient = executor.backward(SessionId(1), activations)
    assert gradient is not None
    assert gradient.shape == activations.shape
    executor.discard()
    executor.forward(SessionId(2), activations)
