"""Stages of one small model in a chain, each behind its service, all on one compute thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import anyio
import pytest
import torch
import trio
from small_stage import ARCHITECTURE, PARAMETERS, windows
from torch import Tensor
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.adamw import make_inner_optimizer
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import MicrobatchKey, StageBusyError
from neuroshard.pipeline.stage_server import ServiceLimits, StageServer
from neuroshard.types import LayerRange, NodeId

SEED = 11
ROWS = windows(3, 8)
INPUTS, LABELS = ROWS[:, :-1], ROWS[:, 1:]
HIDDEN = ARCHITECTURE.hidden_size
DRIVER = NodeId("driver")
OTHER = NodeId("other")


def key(microbatch: int, session: int = 1, driver: NodeId = DRIVER) -> MicrobatchKey:
    return MicrobatchKey(driver, session, microbatch)


def executor_of(start: int, stop: int) -> StageExecutor:
    model = StageModel(ARCHITECTURE, LayerRange(start, stop))
    initialise(model, SEED)
    optimizer = make_inner_optimizer(model, PARAMETERS.inner)
    return StageExecutor(model, optimizer, torch.device("cpu"))


def service_of(
    compute: ComputeThread,
    start: int,
    stop: int,
    *,
    sequences_per_step: int = 8,
    limits: ServiceLimits | None = None,
    kept_graphs: int | None = None,
    is_open: bool = True,
) -> StageServer:
    service = StageServer(
        compute,
        executor_of(start, stop),
        sequences_per_step=sequences_per_step,
        batch_size=4,
        limits=limits,
        kept_graphs=kept_graphs,
    )
    if is_open:
        service.open()
    return service


def chain_of(compute: ComputeThread, cuts: Sequence[int], *, kept_graphs: int | None = None) -> list[StageServer]:
    return [service_of(compute, a, b, kept_graphs=kept_graphs) for a, b in pairwise(cuts)]


def gradients(services: Sequence[StageServer]) -> dict[str, Tensor]:
    named = [pair for service in services for pair in service.executor.model.named_parameters()]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def whole_model() -> tuple[StageModel, Tensor]:
    """The model in one piece after one backward pass over all rows, and its summed loss."""
    whole = StageModel(ARCHITECTURE)
    initialise(whole, SEED)
    loss = whole.loss_sum(whole(INPUTS), LABELS)
    loss.backward()
    return whole, loss.detach()


def assert_gradients_of_the_whole(services: Sequence[StageServer]) -> None:
    whole, _ = whole_model()
    found = gradients(services)
    assert found.keys() == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def activations(sequences: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequences, ARCHITECTURE.sequence_length, HIDDEN, generator=generator)


def play(scenario: Callable[[MockClock], Awaitable[None]]) -> None:
    """Run a scenario with a clock that only it moves."""
    clock = MockClock()

    async def main() -> None:
        with anyio.fail_after(10_000):
            await scenario(clock)

    trio.run(main, clock=clock)


async def refused_in_the_end(clock: MockClock, service: StageServer, name: MicrobatchKey) -> str:
    """Why a microbatch that waits for a place is refused when its time is over."""
    reasons = list[str]()

    async def ask() -> None:
        with pytest.raises(StageBusyError) as refusal:
            await service.forward(name, activations())
        reasons.append(str(refusal.value))

    async with trio.open_nursery() as tasks:
        tasks.start_soon(ask)
        await wait_all_tasks_blocked()
        assert not reasons
        clock.jump(ServiceLimits().wait_seconds + 1)
    return reasons[0]
