"""As many open microbatches keep what their backward pass needs as memory allows; the others compute it again."""

from __future__ import annotations

import pytest
import torch
import trio
from trio.testing import MockClock

from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.stage_client import LocalStageClient
from tests.worlds.stages import DRIVER, activations, executor_of, gradients, key, service_of


def test_the_first_ones_keep_their_graph_and_free_places_go_to_the_next(compute: ComputeThread) -> None:
    service = service_of(compute, 1, 2, kept_graphs=2)

    async def main() -> None:
        for number in range(4):
            await service.forward(key(number), activations(seed=number))
        assert [service.computed(key(number))[1] for number in range(4)] == [False, False, True, True]
        await service.backward(key(0), activations(seed=10))
        await service.forward(key(4), activations(seed=4))
        await service.forward(key(5), activations(seed=5))
        assert [service.computed(key(number))[1] for number in (4, 5)] == [False, True]
        for number in (1, 2, 3, 4, 5):
            await service.backward(key(number), activations(seed=10 + number))
        assert (service.counts.microbatches, service.counts.recomputed) == (6, 3)

    trio.run(main)


def test_both_ways_mixed_give_the_gradients_of_either(compute: ComputeThread) -> None:
    services = [service_of(compute, 1, 2, kept_graphs=kept) for kept in (None, 1, 0)]

    async def main() -> None:
        for service in services:
            for number in range(3):
                await service.forward(key(number), activations(2, seed=number))
            for number in (2, 0, 1):
                await service.backward(key(number), activations(2, seed=10 + number))

    trio.run(main)
    assert [service.counts.recomputed for service in services] == [0, 2, 3]
    expected, *others = (gradients([service]) for service in services)
    for other in others:
        assert other.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ends", ["session", "step", "deadline"])
def test_what_is_given_up_frees_its_place(compute: ComputeThread, ends: str) -> None:
    service = service_of(compute, 1, 2, kept_graphs=1, sequences_per_step=2)

    async def scenario() -> None:
        await service.forward(key(1), activations())
        if ends == "session":
            service.close(DRIVER, 1)
        elif ends == "step":
            await service.discard("The test ends it.")
        else:
            await service.drain("The test ends it.")
        service.open()
        await service.forward(key(1, session=2), activations())
        assert not service.computed(key(1, session=2))[1]

    trio.run(scenario, clock=MockClock(autojump_threshold=0.01))


def test_the_last_stage_does_both_passes_at_once_and_recomputes_nothing(compute: ComputeThread) -> None:
    service = service_of(compute, 2, 3, kept_graphs=0)

    async def main() -> None:
        hop = LocalStageClient(service)
        labels = torch.zeros(1, 16, dtype=torch.int64)
        for number in range(3):
            await hop.loss(key(number), activations(), labels)
        assert (service.counts.microbatches, service.counts.recomputed) == (3, 0)
        assert all(timing.recompute_seconds == 0 for timing in hop.timings)

    trio.run(main)


def test_without_its_graph_an_open_microbatch_holds_its_ends_only() -> None:
    executor = executor_of(1, 2)
    opened = executor.forward(activations(), keeps_graph=False)
    assert opened.output.grad_fn is None
    assert executor.forward(activations()).output.grad_fn is not None
