"""Coefficients of a subspace and the ids of their tokens, between stages on nodes of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import DisputedTensorError
from neuroshard.pipeline.microbatch_call import MicrobatchCall, measured_losses
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import StageClientOptions
from neuroshard.pipeline.stage_protocol import COARSE, WirePrecision, wire_bytes
from neuroshard.status.pipeline import StarEdge
from tests.worlds.chains import CUTS, DRIVER, ROWS, Swarm, in_swarm, name_of
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, ComputeInPlace, chain_of, executor_of, gradients, key

RANK = 11  # odd: int4 packs two values into a byte
SUBSPACE = replace(ARCHITECTURE, subspace_rank=RANK, free_blocks=1)
IDS = 4 * INPUTS[ROWS].numel()


async def by_star(swarm: Swarm) -> float:
    call = MicrobatchCall(FixedRouting(swarm.hops), key(1), INPUTS[ROWS], LABELS[ROWS])
    return (await call.run()).loss_sum.item()


async def by_chain(swarm: Swarm) -> float:
    return (await swarm.call(1).run()).loss_sum.item()


def whole_model() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the same weights in one piece."""
    whole = executor_of(0, 3, SUBSPACE)
    loss, _ = whole.loss(INPUTS[ROWS], LABELS[ROWS])
    return loss.item(), {name: p.grad for name, p in whole.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", [by_star, by_chain])
def test_stages_on_other_nodes_equal_the_whole_model(
    compute: ComputeThread, way: Callable[[Swarm], Awaitable[float]]
) -> None:
    loss, _, found = in_swarm(compute, way, architecture=SUBSPACE)
    expected_loss, expected = whole_model()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("precision", WirePrecision)
def test_the_chain_gives_what_the_star_gives(compute: ComputeThread, precision: WirePrecision) -> None:
    options = StageClientOptions(precision, timeout_seconds=30)
    star_loss, star, of_star = in_swarm(compute, by_star, options, architecture=SUBSPACE)
    chain_loss, chain, of_chain = in_swarm(compute, by_chain, options, architecture=SUBSPACE)
    # the driver of a star codes an output again, which changes some scales of int4
    rounding = 0.2 if precision in COARSE else 0.0
    assert chain_loss == pytest.approx(star_loss, rel=rounding / 10, abs=0)
    for name, gradient in of_chain.items():
        assert (gradient - of_star[name]).norm() <= rounding * of_star[name].norm(), name
    once = wire_bytes(INPUTS[ROWS].numel(), RANK, precision)
    # the driver sends ids to the first stage and labels to the last one; ids go with coefficients
    assert chain.sent == {DRIVER: 2 * IDS, name_of(0): once + IDS, name_of(1): 2 * once + IDS, name_of(2): once}
    assert star.sent[DRIVER] == 4 * IDS + 4 * once


def test_the_driver_passes_ids_on_where_two_stages_do_not_meet() -> None:
    async def work(swarm: Swarm) -> list[float]:
        swarm.network.partition([name_of(0)], [name_of(1)])
        losses = [(await swarm.call(name).run()).loss_sum.item() for name in range(1, 3)]
        assert swarm.edges.stars() == (StarEdge(name_of(0), name_of(1)),)
        return losses

    clock = MockClock(autojump_threshold=0)
    losses, _, _ = in_swarm(ComputeInPlace(), work, StageClientOptions(), clock=clock, architecture=SUBSPACE)
    assert losses == [pytest.approx(whole_model()[0], rel=1e-5)] * 2


def test_losses_are_measured_and_texts_are_read_over_the_stages(compute: ComputeThread) -> None:
    text = INPUTS[:1, :7]

    async def work(swarm: Swarm) -> tuple[Tensor, Tensor]:
        measured = await measured_losses(FixedRouting(swarm.hops), INPUTS[ROWS], LABELS[ROWS])
        values = text
        for hop in swarm.hops:
            values = await hop.read(1, 0, values, text)
        return measured.summed, values

    (summed, logits), _, _ = in_swarm(compute, work, architecture=SUBSPACE)
    whole = executor_of(0, 3, SUBSPACE)
    torch.testing.assert_close(summed, whole.infer(INPUTS[ROWS], LABELS[ROWS]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, whole.read(text, whole.empty_cache()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "ids", [None, INPUTS[:1], INPUTS[ROWS, :3], INPUTS[ROWS] + 64, INPUTS[ROWS] - 64], ids=lambda ids: str(ids)[:20]
)
def test_a_stage_refuses_coefficients_without_the_ids_of_their_tokens(
    compute: ComputeThread, ids: Tensor | None
) -> None:
    async def work(swarm: Swarm) -> None:
        coefficients = torch.zeros(*INPUTS[ROWS].shape, RANK)
        with pytest.raises(DisputedTensorError):
            await swarm.hops[1].forward(key(1), coefficients, ids)
        assert swarm.endpoints[1].chain is not None

    _, _, found = in_swarm(compute, work, architecture=SUBSPACE)
    assert found == {}


def test_a_stage_of_a_run_without_a_subspace_gets_no_ids(compute: ComputeThread) -> None:
    """A client leaves them out, and a server refuses them."""
    (_, middle, _), services = chain_of(compute, CUTS), chain_of(compute, CUTS)
    activations = torch.zeros(*INPUTS[ROWS].shape, ARCHITECTURE.hidden_size)

    async def work(swarm: Swarm) -> Tensor:
        return await swarm.hops[1].forward(key(1), activations, INPUTS[ROWS])

    output, swarm, _ = in_swarm(compute, work)
    assert output.shape == activations.shape
    assert swarm.sent[DRIVER] == activations.nbytes
    with pytest.raises(Exception, match="come without ids"):
        trio.run(middle.forward, key(1), activations, INPUTS[ROWS])
    assert gradients(services) == {}
