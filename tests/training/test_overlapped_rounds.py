"""Rounds that go on while their members make the next inner steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import anyio
import pytest
import torch

from neuroshard.config.run_parameters import CodecName, OuterOptimization
from neuroshard.consensus.sync_strategies import Abandoned, Agreed
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.types import NodeId
from tests.worlds.replicas import (
    DUE_SECONDS,
    NAMES,
    OUTER,
    SEQUENCES_PER_STEP,
    A,
    B,
    C,
    SimulatedReplica,
    for_seconds,
    play,
)

BESIDE = replace(OUTER, overlap=True)
FAR = Link(delay_seconds=0.7)  # a round takes several inner steps


def replicas(network: InMemoryNetwork, count: int, outer: OuterOptimization = BESIDE) -> list[SimulatedReplica]:
    for one, other in permutations(NAMES[:count], 2):
        network.set_link(one, other, FAR)
    return [SimulatedReplica(name, network, seed, scheme=outer) for seed, name in enumerate(NAMES[:count])]


def hold_the_same_bytes(members: list[SimulatedReplica]) -> bool:
    """After every outer step, as far as each of them has come."""
    steps = {step for one in members for step in one.anchors}
    return all(len({one.anchors[step] for one in members if step in one.anchors}) == 1 for step in steps)


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_train_on_while_a_round_runs_and_hold_the_same_bytes_after_each(codec: CodecName, count: int) -> None:
    made = dict[bool, int]()

    async def scenario(network: InMemoryNetwork, *, overlap: bool) -> None:
        members = replicas(network, count, replace(OUTER, codec=codec, overlap=overlap))
        await for_seconds(12 * DUE_SECONDS, *members)
        assert hold_the_same_bytes(members)
        assert len(members[0].anchors) >= 3
        assert all(isinstance(outcome, Agreed) and outcome.members == count for outcome in members[0].outcomes)
        made[overlap] = members[0].steps
        if overlap:
            taken = [outcome for outcome in members[0].outcomes if isinstance(outcome, Agreed)]
            begun = [contribution for contribution, _ in members[0].begun]
            assert [any(one.late_for is other for other in begun) for one in taken] == [True] * len(taken)
            assert len(begun) - len(taken) <= 1  # one at a time
            # here a step begins anew when a round begins and when its end is taken over
            assert 12 * DUE_SECONDS - 2 * len(begun) - 1 <= made[True]
            assert made[False] < made[True]

    for overlap in (False, True):

        async def play_one(network: InMemoryNetwork, overlap: bool = overlap) -> None:
            await scenario(network, overlap=overlap)

        play(play_one)


def test_what_is_trained_during_a_round_stays_and_counts_for_the_next_one() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = replicas(network, 2)
        one = members[0]
        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(member.live)
            while not one.begun:
                await anyio.sleep(0.1)
            contribution, sequences = one.begun[0]
            anchor = one.state.anchor
            sent = anchor - contribution
            while not one.outcomes:
                before, counted = one.weights, one.sequences
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        steps = (counted - sequences) // SEQUENCES_PER_STEP
        assert steps >= 3
        torch.testing.assert_close(one.weights, one.state.anchor + (before - sent))
        assert one.sequences == counted - sequences

    play(scenario)


def test_an_overlapped_round_that_is_voted_down_changes_nothing_and_the_next_good_one_passes() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = replicas(network, 3)
        states = [one.state for one in members]
        for one in members:
            one.objects = "worse than before"
        await for_seconds(DUE_SECONDS + 40, *members)
        for one, state in zip(members, states, strict=True):
            assert one.outcomes
            assert all(isinstance(outcome, Abandoned) for outcome in one.outcomes)
            assert one.state is state
            assert one.residual is None
            assert one.sequences == one.steps * SEQUENCES_PER_STEP >= DUE_SECONDS
            one.objects = ""
        await for_seconds(400, *members)
        assert all(isinstance(one.outcomes[-1], Agreed) for one in members)
        assert hold_the_same_bytes(members)

    play(scenario)


def test_a_member_that_dies_in_an_overlapped_round_does_not_end_the_line() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = replicas(network, 4)
        members[3].dies_at_message = 5
        await for_seconds(60 * DUE_SECONDS, *members)
        living = members[:3]
        assert hold_the_same_bytes(members)
        assert min(len(one.anchors) for one in living) >= 3

    play(scenario)


def test_alone_a_round_is_over_at_once() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        one = SimulatedReplica(A, network, 1, scheme=BESIDE, may_be_alone=True, seats=(A,))
        await for_seconds(4 * DUE_SECONDS + 0.5, one)
        assert [outcome.members for outcome in one.outcomes if isinstance(outcome, Agreed)] == [1] * 4
        assert not one.begun

    play(scenario)


def test_who_overlaps_and_who_does_not_end_a_round_together() -> None:
    """A later version of the run may hold for one of them a little before the others."""

    async def scenario(network: InMemoryNetwork) -> None:
        overlaps: dict[NodeId, bool] = {A: True, B: False, C: True}
        members = [
            SimulatedReplica(name, network, seed, scheme=replace(OUTER, overlap=overlap))
            for seed, (name, overlap) in enumerate(overlaps.items())
        ]
        await for_seconds(5 * DUE_SECONDS, *members)
        assert hold_the_same_bytes(members)
        assert min(len(one.anchors) for one in members) >= 3

    play(scenario)


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
def test_who_ends_in_an_overlapped_round_and_starts_again_keeps_what_it_trained_meanwhile(codec: CodecName) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        scheme = replace(BESIDE, codec=codec, aggregator="mean" if codec == "topk" else BESIDE.aggregator)
        members = replicas(network, 3, scheme)
        one, others = members[2], members[:2]
        async with anyio.create_task_group() as tasks:
            for member in others:
                tasks.start_soon(member.live)
            await until_it_has_trained_on(one)
            network.kill(one.name)
            again = SimulatedReplica(
                one.name,
                network,
                9,
                steps=one.steps,
                sequences=one.sequences,
                scheme=scheme,
                book=one.book,
                is_idle=True,
            )
            again.weights = one.weights
            contribution, sequences = one.begun[0]
            anchor, before = again.state.anchor, again.weights
            tasks.start_soon(again.live)
            while not again.outcomes:
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        (outcome,) = again.outcomes
        assert isinstance(outcome, Agreed)
        assert outcome.late_for is not None
        assert again.anchors[1] in {other.anchors.get(1) for other in others}
        assert again.sequences == one.sequences - sequences > 0
        # what the others have of its work leaves its weights, and nothing else
        torch.testing.assert_close(again.weights, again.state.anchor + (before - (anchor - outcome.late_for)))
        assert (outcome.late_for - contribution).abs().max() <= (0.0 if codec == "fp32" else 0.1)

    play(scenario)


async def until_it_has_trained_on(one: SimulatedReplica) -> None:
    """Live until three steps after its contribution has gone out and some vote of it is on the disk."""
    async with anyio.create_task_group() as life:
        life.start_soon(one.live)
        while not (one.begun and one.sequences >= one.begun[0][1] + 3 * SEQUENCES_PER_STEP and one.book.votes()):
            await anyio.sleep(0.1)
        assert not one.outcomes
        life.cancel_scope.cancel()


@pytest.mark.parametrize("overlap", [pytest.param(True, marks=pytest.mark.long), False])
def test_computers_of_unequal_speed_meet_by_the_clock_and_wait_little(overlap: bool) -> None:
    """1, 2 and 4 times as fast; a round takes about a tenth of the time between two of them."""
    outer = replace(BESIDE, inner_steps=10_000, max_round_seconds=120.0, overlap=overlap)
    seconds, step_seconds = 1500.0, (1.0, 0.5, 0.25)

    async def scenario(network: InMemoryNetwork) -> None:
        members = replicas(network, 3, outer)
        for one, pace in zip(members, step_seconds, strict=True):
            one.step_seconds = pace
        await for_seconds(seconds, *members)
        assert hold_the_same_bytes(members)
        for one, pace in zip(members, step_seconds, strict=True):
            agreed = [outcome for outcome in one.outcomes if isinstance(outcome, Agreed)]
            assert len(agreed) >= 9
            assert not any(outcome.is_without_own for outcome in agreed)  # the slow one's work counts, too
            trained = one.steps * pace / seconds
            assert trained >= (0.98 if overlap else 0.85), f"{trained:.3f}"

    play(scenario)
