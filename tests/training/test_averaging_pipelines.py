"""Averaged gradients in pipelines: the replicas of each stage step together, whoever drives what through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
import trio

from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.data.windows import Batch
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient
from neuroshard.state.outer_state import state_root
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.trainer import Trainer
from neuroshard.types import DataPosition, ShardId
from tests.worlds.stages import IDENTITY, MemoryFeed, make_replica, make_stage
from tests.worlds.trainers import NAMES, WHOLE, Node, node_of, trained_until, weights

STAGES, SEQUENCES = 3, 8  # of each stage's accumulating
AVERAGED = OuterOptimization(strategy="averaging", aggregator="mean", codec="fp32", averaged_sequences=2 * SEQUENCES)
PIPELINE = replace(WHOLE, stage_count=STAGES, sequences_per_step=SEQUENCES, outer=AVERAGED)


def of_two(
    folder: Path,
    parameters: RunParameters,
    are_done: Callable[[Sequence[Node]], bool],
    prepare: Callable[[Sequence[Node]], None] = lambda _nodes: None,
) -> list[Node]:
    """Two nodes with a replica of every stage each, trained until they are done."""
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(280):
            nodes = [
                node_of(compute, folder, name, network, shard, parameters=parameters)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            prepare(nodes)
            await trained_until(lambda: are_done(nodes), nodes)
            return nodes

    try:
        return trio.run(main)
    finally:
        for compute in computes:
            compute.close()


def cross(nodes: Sequence[Node]) -> None:
    """Each drives its own first and last stage, and the other's in the middle."""
    hops = [[local_hop(node, stage) for stage in range(STAGES)] for node in nodes]
    services = [hop[1].service for hop in hops]
    for hop, service in zip(hops, reversed(services), strict=True):
        hop[1].service = service


def local_hop(node: Node, stage: int) -> LocalStageClient:
    routing = driving_of(node).routing
    assert isinstance(routing, FixedRouting)
    hop = routing._route[stage]
    assert isinstance(hop, LocalStageClient)
    return hop


def driving_of(node: Node) -> DriverParts:
    assert node.trainer.parts.driving is not None
    return node.trainer.parts.driving


@pytest.mark.long
def test_the_replicas_of_every_stage_hold_one_root_and_learn(tmp_path: Path) -> None:
    """With factors, in two phases; `test_averaging_trainers` has whole gradients."""
    rounds = 20  # two for each step
    roots: list[dict[tuple[int, int], str]] = [{} for _ in NAMES]

    def are_done(nodes: Sequence[Node]) -> bool:
        for node, found in zip(nodes, roots, strict=True):
            for held in node.trainer.parts.stages:
                assert held.service.counts.given_up == 0
                if held.outer.progress.state_root:
                    found[held.index, held.outer.state.outer_step] = held.outer.progress.state_root
        return all(len(noted.weights) >= rounds for node in nodes for noted in (node, *node.others))

    a, b = of_two(tmp_path, replace(PIPELINE, outer=replace(AVERAGED, rank=2)), are_done, cross)
    for one, other in zip((a, *a.others), (b, *b.others), strict=True):
        for number in range(rounds):
            assert torch.equal(one.anchors[number], other.anchors[number])
            assert torch.equal(one.weights[number], one.anchors[number])
            assert torch.equal(other.weights[number], one.anchors[number])
    common = roots[0].keys() & roots[1].keys()
    assert {stage for stage, _ in common} == set(range(STAGES))
    assert all(roots[0][key] == roots[1][key] for key in common)
    for node in (a, b):
        losses = [point.loss for point in node.trainer.record.history.snapshot()]
        assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.1
        for held in node.trainer.parts.stages:
            assert held.outer.progress.failed == 0
            assert held.group is not None
            told = {(one.strategy, one.part, one.codec) for one in held.group.status.recent}
            assert told == {("averaging", f"gradient, phase {phase} of 2", "fp32") for phase in (1, 2)}
            assert (held.outer.status().strategy, held.outer.status().codec) == ("averaging", "fp32")


class Gated(MemoryFeed):
    """Gives so many sequences for a step of the group; the last ones only when all others of the step are in."""

    def __init__(self, shard: int, each_step: int, step: Callable[[], int], may_proceed: Callable[[int], bool]) -> None:
        super().__init__(DataPosition(shard, ShardId(shard), 0))
        self._each_step, self._given = each_step, 0
        self._step, self._may_go_on = step, may_proceed

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """See Feed."""
        while self._step() < self._given // self._each_step or not self._may_go_on(self._given % self._each_step):
            await anyio.sleep(0.002)
        batch = await super().next_batch(sequences, step=step)
        self._given += sequences
        return batch


class InTurn(MemoryFeed):
    """The data of two nodes: for each step so many of the one, then so many of the other."""

    def __init__(self, shares: Sequence[int]) -> None:
        super().__init__()
        self._feeds = [MemoryFeed(DataPosition(shard, ShardId(shard), 0)) for shard in range(len(shares))]
        self._shares, self._given = shares, 0

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """See Feed."""
        turn = 0 if self._given % sum(self._shares) < self._shares[0] else 1
        self._given += sequences
        return await self._feeds[turn].next_batch(sequences, step=step)


def in_work(nodes: Sequence[Node], stage: int) -> int:
    """Sequences of the present step that a stage's replicas have."""
    held = [node.trainer.parts.stages[stage] for node in nodes]
    return sum(one.outer.progress.sequences + one.service.intake.accumulated.sequences for one in held)


@pytest.mark.parametrize(
    ("shares", "is_crossed"),
    [((8, 8), False), ((12, 8), True)],
    ids=["equal and straight", "with a step in work and crossed"],
)
def test_it_is_what_one_process_computes_of_the_same_data(
    compute: ComputeThread, tmp_path: Path, shares: tuple[int, int], is_crossed: bool
) -> None:
    """Also of what a stage has accumulated of its next step: no gradient of older weights is in a later step."""
    steps, total, microbatch = 5, sum(shares), PIPELINE.batch_size

    def prepare(nodes: Sequence[Node]) -> None:
        def present() -> int:
            return min(held.outer.state.outer_step for node in nodes for held in node.trainer.parts.stages)

        def all_but_the_last_are_in(given: int) -> bool:
            return given < shares[1] - microbatch or all(
                in_work(nodes, stage) == total - microbatch for stage in range(STAGES)
            )

        gates: tuple[Callable[[int], bool], ...] = (lambda _given: True, all_but_the_last_are_in)
        for shard, node in enumerate(nodes):
            feed = Gated(shard, shares[shard], present, gates[shard])
            driving_of(node).feed.next_batch = feed.next_batch  # type: ignore[method-assign]
        if is_crossed:
            cross(nodes)

    a, b = of_two(
        tmp_path / "pipeline",
        PIPELINE,
        lambda nodes: all(len(noted.weights) >= steps for node in nodes for noted in (node, *node.others)),
        prepare,
    )
    alone = replace(WHOLE, sequences_per_step=total, outer=OuterOptimization(inner_steps=1000))
    stage = make_stage(compute, tmp_path / "alone", alone)
    held = make_replica(compute, stage, alone)
    routing = FixedRouting([LocalStageClient(held.service, IDENTITY.node_id)])
    whole = Trainer(TrainerParts(alone, (held,), DriverParts(IDENTITY.node_id, InTurn(shares), routing)))
    trio.run(whole.run, steps)
    expected = weights(whole)
    for node in (a, b):
        found = weights(node.trainer)
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-3, atol=1e-5)


def test_a_replica_through_which_nothing_passes_takes_part(tmp_path: Path) -> None:
    """The other node's driver sends all through its own stages; nothing arrives here, and the steps are made."""

    async def nothing(sequences: int, *, step: int | None = None) -> Batch:
        await anyio.sleep_forever()
        raise AssertionError(sequences, step)

    def prepare(nodes: Sequence[Node]) -> None:
        driving_of(nodes[1]).feed.next_batch = nothing  # type: ignore[method-assign]

    a, b = of_two(
        tmp_path,
        PIPELINE,
        lambda nodes: all(len(noted.weights) >= 3 for node in nodes for noted in (node, *node.others)),
        prepare,
    )
    for held, other in zip(a.trainer.parts.stages, b.trainer.parts.stages, strict=True):
        assert other.service.counts.microbatches == 0
        steps = min(held.outer.state.outer_step, other.outer.state.outer_step)
        assert steps >= 3
        if held.outer.state.outer_step == other.outer.state.outer_step:
            assert state_root(held.outer.state) == state_root(other.outer.state)
    for one, other in zip((a, *a.others), (b, *b.others), strict=True):
        assert all(torch.equal(*two) for two in zip(one.anchors[:3], other.weights[:3], strict=True))
