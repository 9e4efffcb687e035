from __future__ import annotations

from typing import TypeVar

import anyio
import pytest
import torch
import trio
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import MicrobatchKey
from neuroshard.pipeline.microbatch_call import MicrobatchCall, measured_losses
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient
from neuroshard.types import NodeId
from tests.worlds.stages import (
    ARCHITECTURE,
    INPUTS,
    LABELS,
    assert_gradients_of_the_whole,
    chain_of,
    executor_of,
    key,
    whole_model,
)

T = TypeVar("T")
CUTS = [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]
PARTS = (slice(0, 2), slice(2, 5), slice(5, 8))


@pytest.mark.parametrize("kept_graphs", [None, 0], ids=["kept", "recomputed"])
@pytest.mark.parametrize("cuts", CUTS)
def test_any_split_gives_the_loss_and_gradients_of_the_whole_model(
    compute: ComputeThread, cuts: tuple[int, ...], kept_graphs: int | None
) -> None:
    services = chain_of(compute, cuts, kept_graphs=kept_graphs)
    route = [LocalStageClient(service) for service in services]
    _, expected = whole_model()

    async def main() -> None:
        total = 0.0
        for number, part in enumerate(PARTS):
            result = await MicrobatchCall(FixedRouting(route), key(number), INPUTS[part], LABELS[part]).run()
            total += result.loss_sum.item()
        assert total == pytest.approx(expected.item(), rel=1e-5)
        assert all(service.intake.is_full for service in services)
        told = [await measured_losses(FixedRouting(route), INPUTS[part], LABELS[part]) for part in PARTS]
        losses = torch.cat([one.summed for one in told])
        assert losses.shape == (8,)
        assert losses.sum().item() == pytest.approx(expected.item(), rel=1e-5)

    trio.run(main)
    assert_gradients_of_the_whole(services)


class RepeatingHop(LocalStageClient):
    """Asks for everything twice, the second time while the first is under way, as an impatient network does."""

    async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        answers = list[Tensor]()

        async def ask() -> None:
            answers.append(await super(RepeatingHop, self).forward(key, inputs))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
        assert torch.equal(*answers)
        return answers[0]

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        first, _ = await super().loss(key, inputs, labels)
        again, gradient = await super().loss(key, inputs, labels)
        assert torch.equal(first, again)
        return again, gradient

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        first = await super().backward(key, gradient)
        again = await super().backward(key, gradient)
        assert first is again
        await super().forward(key, torch.zeros((1, 1), dtype=torch.int64) if first is None else gradient)
        return again


@pytest.mark.parametrize("cuts", CUTS)
def test_two_interleaved_drivers_and_repetitions_are_accumulated_once(
    compute: ComputeThread, cuts: tuple[int, ...]
) -> None:
    services = chain_of(compute, cuts)
    route = [RepeatingHop(service) for service in services]
    _, expected = whole_model()
    losses = list[float]()

    async def drive(driver: str, rows: range) -> None:
        for row in rows:
            name = MicrobatchKey(NodeId(driver), 1, row)
            result = await MicrobatchCall(FixedRouting(route), name, INPUTS[row : row + 1], LABELS[row : row + 1]).run()
            losses.append(result.loss_sum.item())

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, "one", range(5))
            tasks.start_soon(drive, "other", range(5, 8))

    trio.run(main)
    assert len(losses) == 8
    assert sum(losses) == pytest.approx(expected.item(), rel=1e-5)
    assert_gradients_of_the_whole(services)
    for service in services:
        assert service.intake.accumulated.sequences == 8
        assert service.intake.accumulated.tokens == LABELS.numel()
        assert {driver for driver, _, _ in map(_parts, service.intake.accumulated.keys)} == {"one", "other"}
        assert service.counts.microbatches == 8
        assert service.counts.repeated >= 8
        assert service.counts.given_up == 0


def _parts(name: MicrobatchKey) -> tuple[str, int, int]:
    return name.driver, name.session, name.microbatch


@pytest.mark.parametrize("cuts", CUTS)
def test_a_microbatch_that_is_run_again_after_a_failure_is_accumulated_once(
    compute: ComputeThread, cuts: tuple[int, ...]
) -> None:
    services = chain_of(compute, cuts)
    calls = [f"{step} {index}" for index in range(len(cuts) - 2) for step in ("forward", "backward")] + ["loss"]

    class BrokenHop(LocalStageClient):
        """Loses the answer of one of its calls."""

        def __init__(self, index: int) -> None:
            super().__init__(services[index])
            self.index = index

        async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
            return self.lose(f"forward {self.index}", await super().forward(key, inputs))

        async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
            return self.lose(f"backward {self.index}", await super().backward(key, gradient))

        async def loss(
            self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None]:
            return self.lose("loss", await super().loss(key, inputs, labels))

        def lose(self, call: str, answer: T) -> T:
            if call in lost:
                lost.remove(call)
                raise ConnectionError(call)
            return answer

    route = [BrokenHop(index) for index in range(len(services))]
    lost = list[str]()

    async def main() -> None:
        for row in range(8):
            lost.append(calls[row % len(calls)])
            name, rows = key(row), slice(row, row + 1)
            with pytest.raises(ConnectionError):
                await MicrobatchCall(FixedRouting(route), name, INPUTS[rows], LABELS[rows]).run()
            await MicrobatchCall(FixedRouting(route), name, INPUTS[rows], LABELS[rows]).run()

    trio.run(main)
    assert_gradients_of_the_whole(services)


def test_a_step_divides_by_tokens_clips_and_equals_plain_adamw() -> None:
    executor, plain = executor_of(0, 3), executor_of(0, 3)
    inner = InnerOptimization(learning_rate=1e-2)
    for _ in range(3):
        for part in PARTS:
            executor.loss(INPUTS[part], LABELS[part])
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
    executor.loss(INPUTS, LABELS)
    next(p.grad for p in executor.model.parameters() if p.grad is not None)[0] = float("nan")
    assert not executor.step(1e-2, 1.0, 96).finite
    assert all(torch.equal(a, b) for a, b in zip(before, executor.model.parameters(), strict=True))
    executor.loss(INPUTS, LABELS)
    assert executor.step(1e-2, 1.0, 96).finite


def test_recomputing_keeps_no_activations_and_gives_the_same_gradients() -> None:
    kept, recomputed = executor_of(1, 2), executor_of(1, 2)
    inputs, gradient = torch.randn(2, 16, ARCHITECTURE.hidden_size), torch.randn(2, 16, ARCHITECTURE.hidden_size)
    opened = recomputed.forward(inputs, keeps_graph=False)
    assert opened.output.grad_fn is None
    expected = kept.forward(inputs)
    assert torch.equal(opened.output, expected.output)
    found = recomputed.backward(opened, gradient)
    assert found is not None
    assert torch.equal(found, kept.backward(expected, gradient))  # type: ignore[arg-type]
    for a, b in zip(kept.model.parameters(), recomputed.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
