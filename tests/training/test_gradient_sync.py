"""What a node keeps of its gathered gradients, however a round ends; its rounds are scripted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
import trio
from test_averaging_trainers import AVERAGING
from torch import Tensor

from neuroshard.consensus.sync_strategies import Abandoned, Agreed, Outcome, UnderWay
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.executor import ComputeThread, StepResult
from neuroshard.state.outer_state import state_root
from neuroshard.training.gradient_sync import GradientSync, make_outer_sync
from tests.worlds.stages import make_stage

TOKENS = 64


class Script:
    """The rounds of a node: each ends as the next entry says, made of what it offered until then."""

    def __init__(self, endings: Sequence[str]) -> None:
        self.offered = list[Tensor]()
        self._endings = iter(endings)

    async def exchange(self, contribution: Tensor, _outer_step: int) -> Outcome:
        await anyio.lowlevel.checkpoint()
        self.offered.append(contribution)
        match next(self._endings):
            case "aborted":
                return Abandoned("nobody came", is_soon_again=True)
            case "under way":
                return UnderWay()
            case "agreed":
                return Agreed(contribution, 2, contribution)
            case "late":  # the first of the last two offers is in it
                return Agreed(self.offered[-2], 2, self.offered[-2], late_for=self.offered[-2], offered=8)
            case "without":
                return Agreed(2 * contribution, 2, is_without_own=True)
            case "refused":
                return Agreed(2 * contribution, 2)
            case other:
                raise AssertionError(other)


@pytest.fixture
def sync(compute: ComputeThread, tmp_path: Path) -> GradientSync:
    stage = make_stage(compute, tmp_path, AVERAGING)
    made = make_outer_sync(compute, stage, lambda _step: AVERAGING, 0)
    assert isinstance(made, GradientSync)
    made.progress = made.progress.__class__(members=2)
    return made


async def gather(sync: GradientSync, seed: int) -> Tensor:
    """One inner step; its gradient (d,)."""
    gradient = torch.randn(sync.state.anchor.shape, generator=torch.Generator().manual_seed(seed))

    class Executor:
        def take_gradient(self, _tokens: int) -> tuple[StepResult, Tensor]:
            return StepResult(1.0, 1.0, finite=True), TOKENS * gradient

    await sync.inner_step(Executor(), 0.1, 1.0, TOKENS)  # type: ignore[arg-type]
    sync.after_step(4)
    return gradient


def played(sync: GradientSync, *endings: str) -> list[Tensor]:
    """A gradient before each round; all of them."""
    exchange = Script(endings).exchange
    gradients = list[Tensor]()

    async def main() -> None:
        for number in range(len(endings)):
            gradients.append(await gather(sync, number))
            await sync.run_round(exchange, 0.0)

    trio.run(main)
    return gradients


def waiting(sync: GradientSync) -> Tensor:
    """What the next contribution is made of (d,), a token's."""
    assert sync.gathered is not None
    return sync.gathered.mean


def test_a_round_that_comes_to_nothing_keeps_all(sync: GradientSync) -> None:
    root = state_root(sync.state)
    gradients = played(sync, "aborted", "under way", "aborted")
    assert state_root(sync.state) == root
    torch.testing.assert_close(waiting(sync), torch.stack(gradients).mean(dim=0))
    assert (sync.progress.sequences, sync.progress.failed, sync.residual) == (12, 2, None)


def test_both_phases_use_the_work_up_and_leave_what_was_lost(sync: GradientSync) -> None:
    before = sync.state.anchor.clone()
    first = played(sync, "agreed")[0]
    assert torch.equal(sync.state.anchor, before)
    torch.testing.assert_close(waiting(sync), first)  # the basis uses nothing up
    assert (sync.progress.sequences, sync.residual) == (4, None)
    played(sync, "agreed")
    assert sync.gathered is None
    assert sync.residual is not None
    assert (sync.progress.sequences, sync.state.outer_step) == (0, 2)
    assert not torch.equal(sync.state.anchor, before)
    assert torch.equal(sync._executor.vector(), sync.state.anchor)


def test_what_was_gathered_after_a_contribution_that_counts_late_stays(sync: GradientSync) -> None:
    gradients = played(sync, "agreed", "aborted", "late")
    torch.testing.assert_close(waiting(sync), gradients[2], atol=1e-5, rtol=1e-4)
    assert sync.progress.sequences == 4
    mean = torch.stack(gradients[:2]).mean(dim=0)
    assert sync.residual is not None
    assert float(sync.residual.norm()) < float(mean.norm())  # of the two that are in it


def test_an_end_without_this_node_keeps_its_work_and_its_residual(sync: GradientSync) -> None:
    played(sync, "agreed", "agreed")
    residual = sync.residual
    gradients = played(sync, "without", "without")
    assert sync.residual is residual
    torch.testing.assert_close(waiting(sync), torch.stack(gradients).mean(dim=0))
    assert (sync.progress.sequences, sync.state.outer_step) == (8, 4)


def test_refused_work_is_gone_and_leaves_no_residual(sync: GradientSync) -> None:
    played(sync, "agreed", "agreed")
    played(sync, "agreed", "refused")
    assert (sync.gathered, sync.residual, sync.progress.sequences) == (None, None, 0)


def test_the_root_is_never_that_of_the_state_before(sync: GradientSync) -> None:
    for _phase in range(2):
        trio.run(sync.update_root)
        played(sync, "agreed")
        assert sync.progress.state_root == ""  # others would take this node for one of the step before
        trio.run(sync.update_root)
        assert sync.progress.state_root == state_root(sync.state)


def test_what_was_offered_before_a_restore_takes_nothing_that_was_gathered_since(sync: GradientSync) -> None:
    played(sync, "agreed", "agreed")
    script = Script(["aborted", "late"])

    async def main() -> Tensor:
        await gather(sync, 1)
        await sync.run_round(script.exchange, 0.0)
        sync.restore(sync.state, sync.residual, sync.progress)
        since = await gather(sync, 2)
        await sync.run_round(script.exchange, 0.0)
        return since

    residual, since = sync.residual, trio.run(main)
    played(sync)
    assert sync.residual is residual
    torch.testing.assert_close(waiting(sync), since)


def test_who_has_gathered_nothing_offers_nothing(sync: GradientSync) -> None:
    script = Script(["without"])
    trio.run(sync.run_round, script.exchange, 0.0)
    assert not script.offered[0].any()
    assert sync.state.outer_step == 1


def test_a_gradient_that_is_not_finite_is_not_gathered(compute: ComputeThread, tmp_path: Path) -> None:
    stage = make_stage(compute, tmp_path, AVERAGING)
    executor = stage.executor
    rows = torch.randint(0, 60, (2, 9))

    def work() -> tuple[StepResult, Tensor | None]:
        executor.loss(rows[:, :-1], rows[:, 1:])
        gradient = next(iter(executor.model.parameters())).grad
        assert gradient is not None
        gradient[0, 0] = torch.nan
        return executor.take_gradient(16)

    result, gradient = compute.submit(work).result()
    assert not result.finite
    assert gradient is None
    assert all(parameter.grad is None for parameter in executor.model.parameters())


def test_the_learning_rate_that_is_told_is_that_of_the_groups_steps(sync: GradientSync) -> None:
    before = sync.learning_rate()
    played(sync, "aborted", "aborted", "aborted")
    assert sync.learning_rate() == before  # gathering is no step
    played(sync, "agreed", "agreed")
    assert sync.learning_rate() == pytest.approx(learning_rate_at(1, AVERAGING.inner), rel=1e-6)
    assert sync.learning_rate() != before
