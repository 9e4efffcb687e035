"""Trainers that average their gradients in certified rounds over an in-memory network, with all their real parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
import torch
import trio
from test_group_training import NAMES, Node, node_of, trained_until

from neuroshard.config.run_parameters import CodecName, OuterOptimization
from neuroshard.consensus.sync_strategies import Agreed, Outcome, snapshot_layout
from neuroshard.data.windows import Batch
from neuroshard.model.weights import flatten
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.outer_state import outer_root, state_root
from neuroshard.state.stage_tensors import VELOCITY
from neuroshard.training.gradient_sync import GradientSync
from tests.worlds.stages import IDENTITY, PARAMETERS, make_stage, make_trainer, train

STEP = PARAMETERS.sequences_per_step
AVERAGED = OuterOptimization(strategy="averaging", aggregator="mean", codec="fp32", rank=2, averaged_sequences=6 * STEP)
AVERAGING = replace(PARAMETERS, outer=AVERAGED)


def sync_of(node: Node) -> GradientSync:
    outer = node.trainer.parts.stages[0].outer
    assert isinstance(outer, GradientSync)
    return outer


def of_two(
    folder: Path, scenario: Callable[[list[Node]], Awaitable[None]], outer: OuterOptimization = AVERAGED
) -> list[Node]:
    """Two nodes, and what happens to them."""
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]
    parameters = replace(AVERAGING, outer=outer)

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(280):
            nodes = [
                node_of(compute, folder, name, network, shard, parameters=parameters)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            await scenario(nodes)
            return nodes

    try:
        return trio.run(main)
    finally:
        for compute in computes:
            compute.close()


@pytest.mark.parametrize(("codec", "rank"), [("fp32", 2), ("fp32", 0), ("int8", 0)])
def test_two_trainers_hold_the_same_bytes_after_every_phase(tmp_path: Path, codec: CodecName, rank: int) -> None:
    phases = 2 if rank else 1
    offered = dict[str, list[int | None]]()

    def judged() -> list[tuple[int, list[int]]]:
        """Each outer step with the work of both, which a busy machine may not reach in its first rounds."""
        steps = [counts[phases - 1 :: phases] for counts in offered.values()]
        both = [[count for count in counts if count is not None] for counts in zip(*steps, strict=False)]
        return [(phases * step + phases - 1, counts) for step, counts in enumerate(both) if len(counts) == len(NAMES)]

    async def scenario(nodes: list[Node]) -> None:
        for name, node in zip(NAMES, nodes, strict=True):
            offered[name] = _record_offered(node)
        await trained_until(lambda: all(len(node.weights) >= 3 * phases for node in nodes) and bool(judged()), nodes)

    a, b = of_two(tmp_path, scenario, replace(AVERAGED, codec=codec, rank=rank))
    for number in range(3 * phases):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert torch.equal(a.weights[number], a.anchors[number])
        assert torch.equal(b.weights[number], b.anchors[number])
        assert a.scheduled[number] == b.scheduled[number]
    moved = [not torch.equal(*two) for two in pairwise(a.anchors[: 3 * phases])]
    assert moved == ([True, True] if phases == 1 else [True, False, True, False, True])
    number, counts = judged()[0]
    assert sum(counts) >= 6 * STEP
    before = a.scheduled[number - phases] if number >= phases else 0
    assert a.scheduled[number] - before == min(counts)  # the median of two is the lower one
    told = a.trainer.snapshot().diloco
    assert (told.members, told.inner_steps_total) == (2, 3)
    assert told.certified_root == state_root(sync_of(a).state)
    assert sync_of(a).exact_root() == told.state_root
    assert (sync_of(a).residual is not None) == (codec != "fp32" or rank > 0)


def _record_offered(node: Node) -> list[int | None]:
    """Number of sequences in this node's contribution to each completed round; None if the round left it out."""
    group, offered = node.trainer.parts.stages[0].group, list[int | None]()
    assert group is not None
    exchange = group.exchange

    async def recorded(contribution: torch.Tensor, outer_step: int) -> Outcome:
        outcome = await exchange(contribution, outer_step)
        if isinstance(outcome, Agreed):
            offered.append(outcome.offered)
        return outcome

    group.exchange = recorded  # type: ignore[method-assign]
    return offered


def _object_once(node: Node, outer_step: int) -> None:
    """It votes against the first aggregate of that outer step."""
    replica, objections = node.trainer.parts.stages[0], iter(["it does not like it"])

    async def objection(aggregate: torch.Tensor, next_root: str, choice: int | None = None) -> str:
        await anyio.lowlevel.checkpoint()
        return next(objections, "") if replica.outer.state.outer_step == outer_step else ""

    replica.vote.objection = objection  # type: ignore[method-assign]


def _watch_aborted(node: Node, kept: list[bool]) -> None:
    """Notes of every round that comes to nothing whether all was as before."""
    outer, group = sync_of(node), node.trainer.parts.stages[0].group
    assert group is not None
    honest = group.exchange

    async def watched(contribution: torch.Tensor, outer_step: int) -> Outcome:
        before = state_root(outer.state), outer.residual, outer.gathered
        outcome = await honest(contribution, outer_step)
        if not isinstance(outcome, Agreed):
            kept.append((state_root(outer.state), outer.residual, outer.gathered) == before)
        return outcome

    group.exchange = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_round_aborted_in_a_phase_changes_nothing_and_loses_no_work(tmp_path: Path, aborted: int) -> None:
    kept = list[bool]()

    async def scenario(nodes: list[Node]) -> None:
        for node in nodes:
            _object_once(node, aborted)
            _watch_aborted(node, kept)
        await trained_until(lambda: all(len(node.weights) >= 4 for node in nodes), nodes)

    a, b = of_two(tmp_path, scenario)
    assert len(kept) >= 2
    assert all(kept)
    assert all(sync_of(node).progress.failed >= 1 for node in (a, b))
    for number in range(4):
        assert torch.equal(a.anchors[number], b.anchors[number])


def test_alone_it_is_adamw_on_the_gathered_gradients(compute: ComputeThread, tmp_path: Path) -> None:
    """The same data in steps of two as large."""
    averaging = replace(AVERAGING, outer=replace(AVERAGED, averaged_sequences=2 * STEP))
    gathered = train(compute, tmp_path / "averaging", 10, averaging)
    plain = train(compute, tmp_path / "plain", 5, replace(PARAMETERS, sequences_per_step=2 * STEP))
    found, expected = (flatten(one.parts.stages[0].executor.model) for one in (gathered, plain))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    outer = gathered.parts.stages[0].outer
    assert (outer.state.outer_step, outer.progress.successful) == (10, 0)  # alone, it synchronises with nobody
    assert torch.equal(outer.state.anchor, found)


def test_it_goes_on_after_a_restart_with_what_was_agreed(compute: ComputeThread, tmp_path: Path) -> None:
    averaging = replace(AVERAGING, outer=replace(AVERAGED, averaged_sequences=4 * STEP))
    first = train(compute, tmp_path, 10, averaging)  # two steps, and half of what the third takes
    state = first.parts.stages[0].outer.state
    restored = make_stage(compute, tmp_path, averaging)
    assert restored.is_restored
    assert state_root(restored.outer_state) == state_root(state)
    assert restored.outer_state.velocity.numel() > 2 * state.anchor.numel()  # moments, Q and a basis
    layout = snapshot_layout(IDENTITY.architecture, IDENTITY.layers, averaging.outer)  # known without building it
    assert layout.file_bytes == restored.staging.layout.file_bytes
    newest = restored.keeper.store.generations()[0]
    tensors = Path(newest.path).with_name(restored.keeper.store.read_manifest(Path(newest.path)).tensors.file)
    # as a joiner's download checks it
    assert outer_root(tensors, layout, newest.outer_step, state.line) == state_root(state)
    outer = make_trainer(compute, restored, parameters=averaging).parts.stages[0].outer
    assert isinstance(outer, GradientSync)
    assert (outer.progress.sequences, outer.gathered) == (0, None)
    assert not outer.is_due(1e9)  # nothing to contribute yet
    again = train(compute, tmp_path, 14, averaging)
    assert again.parts.stages[0].outer.state.outer_step == state.outer_step + 2


def test_a_checkpoint_of_another_strategy_is_not_taken(compute: ComputeThread, tmp_path: Path) -> None:
    train(compute, tmp_path, 10)
    stage = make_stage(compute, tmp_path, AVERAGING)
    assert not stage.is_restored
    assert any(VELOCITY in warning or "checkpoint" in warning for warning in stage.warnings)


def test_a_node_without_data_takes_part_in_the_steps_of_the_other(tmp_path: Path) -> None:
    """Its vote and its copy of the state count; the gradient is the other one's alone."""

    async def nothing(sequences: int, *, step: int | None = None) -> Batch:
        await anyio.sleep_forever()
        raise AssertionError(sequences, step)

    async def scenario(nodes: list[Node]) -> None:
        driving = nodes[1].trainer.parts.driving
        assert driving is not None
        driving.feed.next_batch = nothing  # type: ignore[method-assign]
        await trained_until(lambda: all(len(node.weights) >= 4 for node in nodes), nodes)

    a, b = of_two(tmp_path, scenario)
    for number in range(4):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert torch.equal(b.weights[number], b.anchors[number])
    assert not torch.equal(a.anchors[0], a.anchors[1])
    assert (b.trainer.record.progress.steps, sync_of(b).residual) == (0, None)
