"""Trainers of one model in one process that average over an in-memory network, with all their real parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
import trio

from neuroshard.config.run_parameters import OuterOptimization, RunParameters, StrategyName
from neuroshard.consensus.sync_strategies import Abandoned, Agreed, FragmentStep, Outcome, strategy_at
from neuroshard.data.windows import Batch
from neuroshard.model.weights import TensorSchema, flatten
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.outer_state import state_root
from tests.worlds.trainers import NAMES, TOGETHER, Node, accepted_rounds, node_of, trained_until


def test_a_paused_node_agrees_to_no_round(tmp_path: Path) -> None:
    compute = ComputeThread(cpu_threads=1)
    with InMemoryNetwork() as network:
        trainer = node_of(compute, tmp_path, NAMES[0], network, 0).trainer
        group = trainer.parts.stages[0].group
        assert group is not None
        assert group.replica_status().is_ready
        trainer.pause()
        assert not group.replica_status().is_ready
        trainer.resume()
        assert group.replica_status().is_ready
    compute.close()


def test_two_trainers_hold_the_same_weights_after_each_round(tmp_path: Path) -> None:
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(280):
            nodes = [
                node_of(compute, tmp_path, name, network, shard)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]

            await trained_until(lambda: all(len(node.weights) >= 3 for node in nodes), nodes)
            return nodes

    try:
        a, b = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    for number in range(3):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert torch.equal(a.weights[number], b.weights[number])
        assert torch.equal(a.weights[number], a.anchors[number])
        assert a.scheduled[number] == b.scheduled[number] > 0
    told = a.trainer.snapshot().diloco
    assert told.members == 2
    (rounds,) = told.rounds
    assert [record.outer_step for record in rounds.recent] == list(range(rounds.completed))
    assert {len(record.members) for record in rounds.recent} == {2}
    group = a.trainer.parts.stages[0].group
    assert group is not None
    assert (
        told.certified_root
        == group.certified_root(told.outer_steps)
        == state_root(a.trainer.parts.stages[0].outer.state)
    )
    at, other = a.trainer.record.progress, b.trainer.record.progress
    # each has data of its own: whoever is twice as fast may end at the place of the other one, after more sequences
    assert (at.position, at.sequences) != (other.position, other.sequences)


OVERLAPPED = replace(TOGETHER, outer=replace(TOGETHER.outer, overlap=True, codec="int8"))  # finer than the tolerances


def trained_overlapped(folder: Path, parameters: RunParameters, delay_seconds: float = 0.05) -> list[Node]:
    """Both nodes after three rounds of each of their stages, over a line on which a round takes several steps."""
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]

    async def main() -> list[Node]:
        with InMemoryNetwork(default_link=Link(delay_seconds=delay_seconds)) as network, anyio.fail_after(280):
            nodes = [
                node_of(compute, folder, name, network, shard, parameters=parameters)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            stages = [noted for node in nodes for noted in (node, *node.others)]
            await trained_until(lambda: all(len(noted.weights) >= 3 for noted in stages), nodes)
            return nodes

    try:
        return trio.run(main)
    finally:
        for compute in computes:
            compute.close()


def test_two_replicas_of_every_stage_train_on_during_their_rounds(tmp_path: Path) -> None:
    a, b = trained_overlapped(tmp_path, replace(OVERLAPPED, stage_count=3), delay_seconds=0.2)
    for one, other in zip((a, *a.others), (b, *b.others), strict=True):
        for number in range(3):
            assert torch.equal(one.anchors[number], other.anchors[number])
            assert not torch.equal(one.weights[number], one.anchors[number])
            assert one.scheduled[number] == other.scheduled[number] > 0
    for part in (*a.trainer.parts.stages, *b.trainer.parts.stages):
        assert (part.outer.progress.successful >= 3, part.outer.progress.failed) == (True, 0)


@pytest.mark.parametrize(
    ("strategy", "numbers"), [("diloco", 6), pytest.param("sparta", 6, marks=pytest.mark.long), ("streaming", 24)]
)
def test_two_trainers_train_on_during_their_rounds(tmp_path: Path, strategy: StrategyName, numbers: int) -> None:
    scheme = replace(OVERLAPPED.outer, inner_steps=numbers, strategy=strategy)
    a, b = trained_overlapped(tmp_path, replace(OVERLAPPED, outer=scheme))
    for number in range(3):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert not torch.equal(a.weights[number], a.anchors[number])  # they hold steps that the anchor lacks
        assert not torch.equal(a.weights[number], b.weights[number])
        assert a.scheduled[number] == b.scheduled[number] > 0
    (rounds,) = a.trainer.snapshot().diloco.rounds
    assert all(record.certificate is not None and not record.is_late for record in rounds.recent)
    for node in (a, b):
        progress, record = node.trainer.parts.stages[0].outer.progress, node.trainer.record.progress
        assert progress.successful >= 3
        assert progress.failed == 0
        assert 0 < progress.inner_steps < record.steps


@pytest.mark.parametrize(("strategy", "numbers"), [("sparta", 6), ("streaming", 24)])
def test_two_trainers_agree_on_a_part_of_the_weights_in_each_round(
    tmp_path: Path, strategy: StrategyName, numbers: int
) -> None:
    """A part has its turn after 6 inner steps; the rest of the weights are each node's own."""
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]
    parameters = replace(TOGETHER, outer=OuterOptimization(inner_steps=numbers, strategy=strategy))

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(280):
            nodes = [
                node_of(compute, tmp_path, name, network, shard, parameters=parameters)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            await trained_until(lambda: all(len(node.weights) >= 6 for node in nodes), nodes)
            return nodes

    try:
        a, b = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    schema = TensorSchema.of(a.trainer.parts.stages[0].executor.model)
    together = set.intersection(*map(accepted_rounds, (a, b), NAMES))
    assert together
    for number in range(6):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert not torch.equal(a.weights[number], b.weights[number])
        if number not in together:
            continue  # work that the aggregate does not contain is still in the weights
        step = strategy_at(parameters.outer, schema, number, 0)
        assert isinstance(step, FragmentStep)
        part = step.fragment.of
        assert torch.equal(part(a.weights[number]), part(a.anchors[number]))
        assert torch.equal(part(b.weights[number]), part(a.anchors[number]))
    for node in (a, b):
        vote = node.trainer.parts.stages[0].vote
        assert vote is not None
        assert "No objection" in vote.explanation


def test_an_aggregate_that_makes_the_model_worse_is_voted_down_and_the_next_good_one_passes(tmp_path: Path) -> None:
    """One of two hands in the opposite of what it has learned, many times over.

    Both train equally fast, however busy the computer is. The opposite of less work would be outweighed.
    """
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]

    async def main() -> tuple[list[Node], list[Outcome]]:
        with InMemoryNetwork() as network, anyio.fail_after(280):
            nodes = [
                node_of(compute, tmp_path, name, network, shard, batch_seconds=0.1)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            groups = [group for node in nodes if (group := node.trainer.parts.stages[0].group) is not None]
            honest, outcomes = [group.exchange for group in groups], list[Outcome]()

            async def poisoned(contribution: torch.Tensor, outer_step: int) -> Outcome:
                return await honest[1](-20 * contribution, outer_step)

            async def noted(contribution: torch.Tensor, outer_step: int) -> Outcome:
                outcomes.append(await honest[0](contribution, outer_step))
                if len(outcomes) == 2:
                    groups[1].exchange = honest[1]  # type: ignore[method-assign]
                return outcomes[-1]

            groups[0].exchange, groups[1].exchange = noted, poisoned  # type: ignore[method-assign]

            await trained_until(lambda: all(node.anchors for node in nodes), nodes)
            return nodes, outcomes

    try:
        nodes, outcomes = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    for refused in outcomes[:2]:
        assert isinstance(refused, Abandoned)
        assert "votes no: held-out loss" in refused.reason
    assert torch.equal(nodes[0].anchors[0], nodes[1].anchors[0])
    vote = nodes[0].trainer.parts.stages[0].vote
    assert vote is not None
    assert vote.explanation.startswith("No objection: held-out loss")


def test_who_stops_during_an_overlapped_round_goes_on_from_its_checkpoint_without_a_loss(
    tmp_path: Path,
) -> None:
    """Its work up to the contribution is in the aggregate; what it did since is in its weights, and only there."""
    computes = [ComputeThread(cpu_threads=1) for _ in (*NAMES, "again")]
    agreements = list[Agreed]()

    async def main() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Node]:
        with InMemoryNetwork(default_link=Link(delay_seconds=0.05)) as network, anyio.fail_after(280):
            a, b = (
                node_of(compute, tmp_path, name, network, shard, parameters=OVERLAPPED)
                for shard, (compute, name) in enumerate(zip(computes[:2], NAMES, strict=True))
            )
            held, begun, has_ended = a.trainer.parts.stages[0], list[torch.Tensor](), anyio.Event()
            began_at = list[torch.Tensor]()
            group = held.group
            assert group is not None
            exchange = group.exchange

            async def up_to_the_end(contribution: torch.Tensor, outer_step: int) -> Outcome:
                if group.due is None:
                    has_ended.set()
                    await anyio.sleep_forever()
                began_at.append(held.outer.state.anchor.clone())
                begun.append(began_at[-1] - contribution)
                return await exchange(contribution, outer_step)

            group.exchange = up_to_the_end  # type: ignore[method-assign]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(b.trainer.run)
                await trained_until(lambda: has_ended.is_set() and bool(b.anchors), [a])
                assert not a.anchors
                stopped = flatten(held.executor.model).clone()
                network.kill(NAMES[0])
                again = node_of(computes[2], tmp_path, NAMES[0], network, 0, parameters=OVERLAPPED)
                halt(again)
                note_agreements(again, agreements)
                tasks.start_soon(again.trainer.run)
                while not again.weights:
                    await anyio.sleep(0.02)
                assert torch.equal(again.anchors[0], b.anchors[0])
                for node in (again, b):
                    node.trainer.stop()
            return stopped, begun[-1], began_at[-1], again

    try:
        stopped, sent, anchor, again = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    assert (stopped - sent).abs().max() > 1e-3
    # on a busy computer the other one may have stepped without this contribution: then all its work is left
    kept = stopped - (anchor if agreements[0].is_without_own else sent)
    torch.testing.assert_close(again.weights[0] - again.anchors[0], kept, rtol=0, atol=2e-4)


def note_agreements(node: Node, agreements: list[Agreed]) -> None:
    group = node.trainer.parts.stages[0].group
    assert group is not None
    exchange = group.exchange

    async def noted(contribution: torch.Tensor, outer_step: int) -> Outcome:
        outcome = await exchange(contribution, outer_step)
        if isinstance(outcome, Agreed):
            agreements.append(outcome)
        return outcome

    group.exchange = noted  # type: ignore[method-assign]


def halt(node: Node) -> None:
    """It gets no data: it takes part in rounds, and trains no further."""
    driving = node.trainer.parts.driving
    assert driving is not None

    async def next_batch(_sequences: int, *, step: int | None = None) -> Batch:
        await anyio.sleep_forever()
        raise AssertionError(step)

    driving.feed.next_batch = next_batch  # type: ignore[method-assign]
