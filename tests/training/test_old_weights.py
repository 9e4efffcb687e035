"""A hop that works with old weights: what a driver notices of it, and what it cannot know."""

from __future__ import annotations

import anyio
import pytest
import torch
import trio
from torch import Tensor

from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import MicrobatchKey, StageGoneError, UnknownMicrobatchError
from neuroshard.pipeline.microbatch_call import MicrobatchCall
from neuroshard.pipeline.routing import ChoiceInTurn, FixedRouting, SwarmRouting
from neuroshard.pipeline.stage_client import LocalStageClient, MicrobatchResult
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import LARGEST_ROUNDING, are_alike
from neuroshard.types import NodeId
from tests.worlds.stages import INPUTS, LABELS, activations, chain_of, key

CUTS = (0, 1, 2, 3)
ROWS = slice(0, 4)
FIRST, SECOND = NodeId("a"), NodeId("b")


class DyingHop(LocalStageClient):
    """Does the forward pass and is gone before the backward pass."""

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        raise StageGoneError("It died.")


class ReplayingHop(LocalStageClient):
    """Gives for every microbatch what it gave for the first one, under the name that was asked for."""

    first: Tensor | None = None

    async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        output = await super().forward(key, inputs)
        self.first = output if self.first is None else self.first
        return self.first


def move_weights(service: StageServer, by: float) -> None:
    """By noise of so many of their norms."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in service.executor.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(by * parameter.norm() / noise.norm() * noise)


@pytest.mark.parametrize(("apart", "is_exact"), [(0.0, True), (1e-4, True), (0.2, False)])
def test_who_names_the_weights_of_another_and_has_older_ones_is_not_counted_as_equal(
    compute: ComputeThread, apart: float, is_exact: bool
) -> None:
    before, *others = chain_of(compute, CUTS)
    middle, old = (chain_of(compute, CUTS)[1] for _ in range(2))
    move_weights(old, apart)
    stages = {
        (0, FIRST): LocalStageClient(before, FIRST),
        (1, FIRST): DyingHop(old, FIRST, lambda: "ab"),
        (1, SECOND): LocalStageClient(middle, SECOND, lambda: "ab"),
        (2, FIRST): LocalStageClient(others[1], FIRST),
    }
    routing = SwarmRouting(
        3,
        lambda stage: [node for number, node in stages if number == stage],
        lambda stage, node: stages[stage, node],
        ChoiceInTurn(NodeId("driver")),
    )
    run = MicrobatchCall(routing, key(1), INPUTS[ROWS], LABELS[ROWS])

    async def main() -> MicrobatchResult:
        with anyio.fail_after(20):
            return await run.run()

    assert trio.run(main).loss_sum.item() > 0
    (replacement,) = run.replacements
    assert (replacement.stage, replacement.before.node_id, replacement.after.node_id) == (1, FIRST, SECOND)
    assert replacement.is_exact is is_exact
    assert [service.counts.microbatches for service in (before, middle, others[1])] == [1, 1, 1]


def test_outputs_are_alike_as_far_as_rounding_goes() -> None:
    output = activations(2)
    assert are_alike(output, output.bfloat16().float())
    assert are_alike(output, (1 + 0.9 * LARGEST_ROUNDING) * output)
    assert not are_alike(output, (1 + 1.1 * LARGEST_ROUNDING) * output)
    assert not are_alike(output, activations(2, seed=1))


def test_an_answer_of_before_under_a_new_name_spoils_its_microbatch_and_nothing_else(compute: ComputeThread) -> None:
    services = chain_of(compute, CUTS)
    first, middle, last = (LocalStageClient(service) for service in services)
    lying = FixedRouting((first, ReplayingHop(services[1]), last))
    honest = FixedRouting((first, middle, last))

    async def loss(number: int, rows: slice, routing: FixedRouting) -> float:
        run = MicrobatchCall(routing, key(number), INPUTS[rows], LABELS[rows])
        assert not run.replacements
        return (await run.run()).loss_sum.item()

    async def main() -> None:
        with anyio.fail_after(20):
            await loss(1, slice(0, 2), lying)
            spoilt, unspoilt = await loss(2, slice(2, 4), lying), await loss(3, slice(2, 4), honest)
        assert 0 < spoilt != pytest.approx(unspoilt, rel=1e-3)  # the driver has nothing to compare it with

    trio.run(main)
    assert [service.counts.microbatches for service in services] == [3, 3, 3]


def test_no_backward_pass_is_done_with_other_weights_than_its_forward_pass(compute: ComputeThread) -> None:
    service = chain_of(compute, CUTS)[1]

    async def main() -> None:
        output = await service.forward(key(1), activations(2))
        await service.discard("A step was restored.")  # as whenever the weights change under an open microbatch
        service.open()
        with pytest.raises(UnknownMicrobatchError):
            await service.backward(key(1), torch.ones_like(output))

    trio.run(main)
    assert service.counts.microbatches == 0
