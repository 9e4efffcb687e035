"""The choice of the outer step: how a seat measures it, and what the replicas of a stage make of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.config.run_parameters import OuterOptimization, StrategyName
from neuroshard.consensus.sync_strategies import Agreed, certified_lead
from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import chosen_candidate, paired_difference
from neuroshard.model.weights import TensorSchema, flatten
from neuroshard.network import InMemoryNetwork
from neuroshard.optim.outer import SEQUENCES_PER_CHOICE, CertifiedWork, LineProgress
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.outer_state import state_root
from neuroshard.training.held_out_vote import HeldOutVote
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.stage_checkpoint import Stage
from neuroshard.types import LayerRange
from tests.worlds.replicas import LENGTH, NAMES, OUTER, SimulatedReplica, for_seconds, play
from tests.worlds.rounds import member_named, value_of
from tests.worlds.stages import IDENTITY, PARAMETERS, make_replica, make_stage, train, windows
from tests.worlds.trainers import NAMES as TRAINERS
from tests.worlds.trainers import TOGETHER, Node, node_of, trained_until

MEASURED = replace(PARAMETERS, outer=replace(PARAMETERS.outer, choice="measured"))
LATE = 4 * 400  # sequences of a line whose momentum has its full value
LOSSES = st.lists(st.floats(0.0, 20.0), min_size=8, max_size=8)


@given(LOSSES, LOSSES, LOSSES)
def test_no_choice_is_worse_than_the_plain_mean_by_more_than_a_standard_error(
    plain: list[float], half: list[float], full: list[float]
) -> None:
    worse = paired_difference([plain, half, full][chosen_candidate([plain, half, full], 8)], plain)
    assert worse.mean <= worse.standard_error


def test_the_best_candidate_is_chosen() -> None:
    assert chosen_candidate([[3.0] * 8, [2.0] * 8, [2.5] * 8], 8) == 1
    assert chosen_candidate([[3.0] * 8, [2.5] * 8, [2.0] * 8], 8) == 2
    assert chosen_candidate([[2.0] * 8, [2.0] * 8, [2.5] * 8], 8) == 0


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_loses_to_the_plain_mean(spoilt: float) -> None:
    assert chosen_candidate([[3.0] * 8, [spoilt] + [1.0] * 7, [2.0] * 8], 8) == 2
    assert chosen_candidate([[spoilt] + [3.0] * 7, [1.0] * 8, [1.0] * 8], 8) == 0


def test_too_few_losses_of_any_candidate_are_no_measurement() -> None:
    assert chosen_candidate([[3.0] * 8, [], [2.0] * 8], 8) == 0
    assert chosen_candidate([[3.0] * 7, [2.0] * 8, [2.0] * 8], 8) == 0
    assert chosen_candidate([[3.0] * 8, [2.0] * 20], 8) == 1  # only equal sequences are compared


@pytest.fixture(scope="module")
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread(cpu_threads=1)
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def local(compute: ComputeThread, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights (d,) that have learned something."""
    trainer = train(compute, tmp_path_factory.mktemp("trained"), 40)
    return compute.submit(lambda: flatten(trainer.parts.stages[0].executor.model)).result()


@pytest.fixture
def learned(compute: ComputeThread, local: Tensor, tmp_path: Path) -> tuple[Stage, OuterSync, HeldOutVote, Tensor]:
    """A late stage before an outer step, its vote, and what leads to better weights as a pseudo-gradient (d,)."""
    stage = make_stage(compute, tmp_path)
    outer = make_replica(compute, stage, MEASURED).outer
    outer.replace_state(replace(outer.state, line=LineProgress(LATE)))
    vote = HeldOutVote(compute, stage.executor, outer, PARAMETERS.batch_size)
    vote.pin(HeldOut(windows(-1, 32), 4.0), windows(-2, 32))
    return stage, outer, vote, outer.state.anchor - local


def with_velocity(outer: OuterSync, velocity: Tensor) -> None:
    outer.replace_state(replace(outer.state, velocity=velocity))


def test_a_seat_chooses_momentum_where_it_helps_and_the_plain_mean_where_it_does_not(
    learned: tuple[Stage, OuterSync, HeldOutVote, Tensor],
) -> None:
    _, outer, vote, gained = learned
    weights = outer.state.anchor
    with_velocity(outer, gained)
    assert trio.run(vote.choice, 0.1 * gained) == 2
    with_velocity(outer, -gained)
    assert trio.run(vote.choice, 0.1 * gained) == 0
    assert outer.state.anchor is weights


def test_a_candidate_that_overflows_is_not_chosen(learned: tuple[Stage, OuterSync, HeldOutVote, Tensor]) -> None:
    _, outer, vote, gained = learned
    with_velocity(outer, torch.full_like(gained, 3e38))
    assert trio.run(vote.choice, 3e38 * torch.sign(gained)) == 0
    assert trio.run(vote.objection, gained, "1" * 64, 0) == ""
    aggregate = 3e38 * torch.sign(gained)
    assert trio.run(vote.objection, aggregate, "2" * 64, 2) == "the weights it leads to are not finite"


def test_without_a_loss_the_choice_is_the_plain_mean(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, HeldOutVote, Tensor], tmp_path: Path
) -> None:
    stage, outer, vote, gained = learned
    with_velocity(outer, gained)
    vote.pin(HeldOut(windows(-1, 32), 4.0))  # the sequences of the reports serve no choice
    assert trio.run(vote.choice, 0.1 * gained) == 0
    vote.pin(HeldOut(windows(-1, 32), 4.0), windows(-2, 7))
    assert trio.run(vote.choice, 0.1 * gained) == 0
    vote.pin(HeldOut(windows(-1, 32), 4.0), windows(-2, 8))
    assert trio.run(vote.choice, 0.1 * gained) == 2
    assert trio.run(vote.choice, gained[1:]) == 0  # of another step
    compute.submit(stage.executor.suspend).result()
    assert trio.run(vote.choice, 0.1 * gained) == 0

    parameters, identity = replace(MEASURED, stage_count=3), replace(IDENTITY, layers=LayerRange(0, 1))
    part = make_stage(compute, tmp_path / "part", parameters, identity)
    outer = make_replica(compute, part, parameters, identity).outer
    outer.replace_state(replace(outer.state, line=LineProgress(LATE)))
    vote = HeldOutVote(compute, part.executor, outer, PARAMETERS.batch_size)
    vote.pin(HeldOut(windows(-1, 32), 4.0), windows(-2, 32))
    assert len(outer.strategy.candidates) == 3
    assert trio.run(vote.choice, torch.ones_like(outer.state.anchor)) == 0


@pytest.mark.parametrize("choice", [0, 1, 2, None])
def test_a_certificate_gives_the_mean_of_the_replicas_as_they_compute_it(
    learned: tuple[Stage, OuterSync, HeldOutVote, Tensor], choice: int | None
) -> None:
    stage, outer, _, gained = learned
    line = LineProgress(LATE, choice=1, chosen_at=1_000)
    outer.replace_state(replace(outer.state, line=line, velocity=gained))

    async def exchange(_contribution: Tensor, _outer_step: int) -> Agreed:
        await anyio.lowlevel.checkpoint()
        return Agreed(0.1 * gained, 2, work=CertifiedWork(8, choice=choice), is_certified=True)

    assert trio.run(outer.run_round, exchange, 0.0)
    members = tuple(sorted(map(member_named, "ab")))
    value = value_of(outer_step=1, members=members, sequences=8)
    schema = TensorSchema.of(stage.executor.model)
    assert certified_lead(value, outer.state.line, MEASURED, schema) == outer.progress.lead is not None
    for alone in (value_of(members=members[:1]), value_of(members=members, round_id=None)):
        assert certified_lead(alone, outer.state.line, MEASURED, schema) is None


@pytest.mark.parametrize("choice", [0, 1, 2, None])
def test_the_state_after_a_round_is_the_one_that_was_voted_on(
    compute: ComputeThread, learned: tuple[Stage, OuterSync, HeldOutVote, Tensor], choice: int | None
) -> None:
    """Without a measurement, the last choice applies."""
    _, outer, _, gained = learned
    last = 1
    line = LineProgress(LATE, choice=last, chosen_at=1_000)
    outer.replace_state(replace(outer.state, line=line, velocity=gained))
    assert outer.measured_candidates() == (3 if line.needs_choice else 1) == 1
    work = CertifiedWork(8, choice=choice)
    expected = outer.strategy.next_state(outer.state, 0.1 * gained, last if choice is None else choice)

    async def exchange(_contribution: Tensor, _outer_step: int) -> Agreed:
        await anyio.lowlevel.checkpoint()
        return Agreed(0.1 * gained, 2, work=work, is_certified=True)

    async def main() -> str:
        root = await outer.root_after(0.1 * gained, 0, work)
        assert await outer.run_round(exchange, 0.0)
        return root

    assert trio.run(main) == state_root(outer.state)
    assert torch.equal(outer.state.anchor, expected.anchor)
    assert torch.equal(outer.state.velocity, expected.velocity)
    chosen = (last, 1_000) if choice is None else (choice, LATE)
    assert (outer.state.line.choice, outer.state.line.chosen_at) == chosen


CHOICES = dict(zip(NAMES[:3], (2, 1, 0), strict=True))


VOTED = replace(OUTER, choice="measured")


def replicas_at(
    network: InMemoryNetwork, line: LineProgress, outer: OuterOptimization = VOTED
) -> list[SimulatedReplica]:
    found = list[SimulatedReplica]()
    for seed, (name, choice) in enumerate(CHOICES.items()):
        one = SimulatedReplica(name, network, seed, chooses=choice, scheme=outer)
        one.state = replace(one.state, line=line)
        found.append(one)
    return found


@pytest.mark.parametrize("strategy", ["diloco", "streaming"])
def test_replicas_that_measure_differently_hold_the_same_bytes_and_measure_by_schedule(strategy: StrategyName) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        outer = replace(VOTED, strategy=strategy, momentum=0.5)
        members = replicas_at(network, LineProgress(1_400, chosen_at=800), outer=outer)
        await for_seconds(80, *members)
        assert len({state_root(one.state) for one in members}) == 1
        line = members[0].state.line
        assert 800 + SEQUENCES_PER_CHOICE <= line.chosen_at < line.sequences
        (measured,) = {step for one in members for step in one.measured}  # once, and not at first
        assert 0 < measured < members[0].state.outer_step - 1
        assert line.choice in {0, 1}  # the lower median of two or three of the choices

    play(scenario)


def test_a_member_that_missed_the_measured_round_adopts_its_choice() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        *two, late = replicas_at(network, LineProgress(SEQUENCES_PER_CHOICE))
        for one in two:
            one.chooses = 1
        await for_seconds(30, *two)
        assert two[0].state.outer_step >= 1
        await for_seconds(15, *two, late)
        assert late.measured == []
        assert late.state.line.choice == 1
        assert len({state_root(one.state) for one in (*two, late)}) == 1

    play(scenario)


def test_early_replicas_those_of_a_run_with_the_law_and_a_lone_one_measure_nothing() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        early = replicas_at(network, LineProgress())
        await for_seconds(40, *early)
        assert early[0].state.outer_step >= 3
        assert [one.measured for one in early] == [[], [], []]

    async def by_law(network: InMemoryNetwork) -> None:
        late = replicas_at(network, LineProgress(SEQUENCES_PER_CHOICE), OUTER)
        await for_seconds(40, *late)
        assert late[0].state.outer_step >= 3
        assert ([one.measured for one in late], late[0].state.line.chosen_at) == ([[], [], []], 0)

    async def alone(network: InMemoryNetwork) -> None:
        lone = SimulatedReplica(NAMES[0], network, 0, chooses=2, may_be_alone=True, seats=NAMES[:1], scheme=VOTED)
        lone.state = replace(lone.state, line=LineProgress(SEQUENCES_PER_CHOICE))
        await for_seconds(40, lone)
        assert lone.state.outer_step >= 3
        assert (lone.measured, lone.state.line.choice) == ([], 0)
        assert torch.equal(lone.state.velocity, torch.zeros(LENGTH))

    play(scenario)
    play(by_law)
    play(alone)


def test_trainers_measure_the_candidates_and_end_the_round_with_the_same_bytes(tmp_path: Path) -> None:
    computes = [ComputeThread(cpu_threads=1) for _ in TRAINERS]
    parameters = replace(TOGETHER, outer=OuterOptimization(inner_steps=2, interval="fixed", choice="measured"))

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(60):
            nodes = [
                node_of(compute, tmp_path, name, network, shard, parameters=parameters)
                for shard, (compute, name) in enumerate(zip(computes, TRAINERS, strict=True))
            ]
            for node in nodes:
                outer = node.trainer.parts.stages[0].outer
                outer.replace_state(replace(outer.state, line=LineProgress(LATE)))
            await trained_until(lambda: all(len(node.anchors) >= 2 for node in nodes), nodes)
            return nodes

    try:
        a, b = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    lines = [node.trainer.parts.stages[0].outer.state.line for node in (a, b)]
    assert [line.chosen_at for line in lines] == [LATE, LATE]
    assert lines[0].choice == lines[1].choice
    assert all(torch.equal(*anchors) for anchors in zip(a.anchors[:2], b.anchors[:2], strict=True))
