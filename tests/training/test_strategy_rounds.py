"""Rounds about parts of the vector, over the network: members that are behind, late or new, and other strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from neuroshard.config.run_parameters import OuterOptimization, StrategyName
from neuroshard.consensus.chain import Chain
from neuroshard.consensus.effects import VoteRecord
from neuroshard.consensus.slices import Encoded
from neuroshard.consensus.sync_strategies import Abandoned, Agreed, FragmentStep, StageRounds, part_at, strategy_at
from neuroshard.consensus.vote_log import KEPT_STEPS
from neuroshard.model.weights import TensorSchema
from neuroshard.network import InMemoryNetwork
from neuroshard.types import NodeId
from tests.worlds.replicas import (
    DUE_SECONDS,
    NAMES,
    OUTER,
    RUN,
    SCHEMA,
    A,
    B,
    C,
    SimulatedReplica,
    for_seconds,
    founding_of,
    play,
)

PARTS: tuple[StrategyName, ...] = ("sparta", "streaming")


@pytest.mark.parametrize(
    ("strategy", "outer_step", "part"),
    [
        ("diloco", 5, "all weights"),
        ("streaming", 5, "quarter 2 of 4"),
        ("streaming", 7, "quarter 4 of 4"),
        ("sparta", 26, "slice 7 of 20"),
        ("averaging", 5, "gradient"),
    ],
)
def test_a_step_says_what_it_is_about(strategy: StrategyName, outer_step: int, part: str) -> None:
    assert part_at(replace(OUTER, strategy=strategy), SCHEMA, outer_step) == part


def test_the_two_steps_of_factors_say_which_they_are() -> None:
    schema = TensorSchema(("matrix", "vector"), ((64, 64), (64,)))
    outer = replace(OUTER, strategy="averaging", codec="fp32", rank=2)
    assert [part_at(outer, schema, step) for step in (4, 5)] == ["gradient, phase 1 of 2", "gradient, phase 2 of 2"]


def outer_of(strategy: StrategyName) -> OuterOptimization:
    """Of either a round is due every 10 steps, in which every second of a replica is one."""
    return replace(OUTER, strategy=strategy, inner_steps=40 if strategy == "streaming" else OUTER.inner_steps)


def replicas(network: InMemoryNetwork, outer: OuterOptimization, count: int = 3) -> list[SimulatedReplica]:
    return [SimulatedReplica(name, network, seed, scheme=outer) for seed, name in enumerate(NAMES[:count])]


def lengths(member: SimulatedReplica) -> list[int]:
    return [len(outcome.aggregate) for outcome in member.outcomes if isinstance(outcome, Agreed)]


def are_one_line(members: list[SimulatedReplica]) -> bool:
    first = members[0].state
    return all(
        one.state.outer_step == first.outer_step
        and torch.equal(one.state.anchor, first.anchor)
        and torch.equal(one.state.velocity, first.velocity)
        for one in members
    )


@pytest.mark.parametrize("strategy", PARTS)
def test_who_missed_the_rounds_about_some_parts_takes_them_over_one_after_the_other(strategy: StrategyName) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = replicas(network, outer_of(strategy))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert c.state.outer_step == 1
        network.partition([A, B], [C])
        await for_seconds(15 * DUE_SECONDS, a, b, c)
        assert c.state.outer_step == 1
        assert a.state.outer_step >= 3
        network.partition()
        await for_seconds(60 + 4 * DUE_SECONDS, a, b, c)
        assert not c.group.must_follow.is_set()
        missed = [outcome for outcome in c.outcomes if isinstance(outcome, Agreed) and outcome.is_without_own]
        assert len(missed) >= 2
        assert are_one_line([a, b, c])
        assert isinstance(last := c.outcomes[-1], Agreed)
        assert last.members == 3

    play(scenario)


def test_who_missed_more_steps_than_whole_aggregates_are_kept_takes_them_over_when_they_are_about_parts() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = replicas(network, outer_of("sparta"))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        network.partition([A, B], [C])
        await for_seconds(50 * DUE_SECONDS, a, b, c)
        missed = a.state.outer_step - c.state.outer_step
        assert missed > KEPT_STEPS + 2
        network.partition()
        await for_seconds(180, a, b, c)
        assert not c.group.must_follow.is_set()
        assert sum(isinstance(one, Agreed) and one.is_without_own for one in c.outcomes) >= missed
        assert are_one_line([a, b, c])

    play(scenario)


@pytest.mark.parametrize("strategy", PARTS)
def test_two_members_that_are_at_different_parts_come_together_again(strategy: StrategyName) -> None:
    """B commits the step about one part and is silent; A goes on about the same part until it hears of the end."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = replicas(network, outer_of(strategy), 2)
        send, write, held = b.group.actor.mail.send, b.book.write, list[tuple[NodeId, Sequence[Encoded]]]()

        def hold(peer: NodeId, message: Sequence[Encoded]) -> None:
            held.append((peer, message))

        def write_and_hold(record: VoteRecord) -> None:
            write(record)
            if record.lock is not None and not held:
                b.group.actor.mail.send = hold  # type: ignore[method-assign]

        b.book.write = write_and_hold  # type: ignore[method-assign]
        await for_seconds(DUE_SECONDS + 60, a, b)
        assert isinstance(a.outcomes[0], Abandoned)
        assert (a.state.outer_step, b.state.outer_step) == (0, 1)
        b.group.actor.mail.send = send  # type: ignore[method-assign]
        for peer, message in held:
            send(peer, message)
        await for_seconds(200, a, b)
        agreed = [outcome for outcome in (*a.outcomes, *b.outcomes) if isinstance(outcome, Agreed)]
        assert any(outcome.late_for is not None for outcome in agreed)
        assert are_one_line([a, b])

    play(scenario)


def test_a_step_about_another_part_has_another_name() -> None:
    """Whoever is at another part, or takes the vector apart in another way, exchanges nothing with the others."""
    chain = Chain.founded(founding_of([A]))
    place = "0" * 64, chain.standing, chain.ledger, chain.owner
    parameters = [replace(OUTER, strategy=strategy) for strategy in ("diloco", *PARTS)]
    rounds = [StageRounds(RUN, 0, SCHEMA, outer) for outer in parameters]
    terms = {one.step(number, *place).terms for one in rounds for number in range(4)}
    assert f"int4 mean {SCHEMA.sha256}" in terms  # DiLoCo's, as older versions of the program name it
    assert len(terms) == 1 + 4 + 4


def test_another_strategy_holds_from_an_outer_step_on_for_everybody() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        schemes: list[OuterOptimization] = [
            replace(OUTER, codec="int8"),
            replace(OUTER, codec="int4", strategy="sparta"),
            *([replace(OUTER, codec="int8", strategy="streaming")] * 5),
            replace(OUTER, codec="topk", aggregator="mean"),
            OUTER,
        ]

        def at(outer_step: int) -> OuterOptimization:
            return schemes[min(outer_step, len(schemes) - 1)]

        members = [
            SimulatedReplica(name, network, seed, scheme=schemes[0], versions=at) for seed, name in enumerate(NAMES[:3])
        ]
        await for_seconds(15 * DUE_SECONDS, *members)
        assert members[0].state.outer_step > len(schemes)
        assert are_one_line(members)
        for one in members:
            assert not one.given_up
            assert lengths(one)[:9] == [strategy_at(at(step), SCHEMA, step, 0).length for step in range(9)]

    play(scenario)


@pytest.mark.parametrize("strategy", PARTS)
def test_who_takes_the_state_over_in_the_middle_of_a_cycle_goes_on_with_the_others(strategy: StrategyName) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = replicas(network, outer_of(strategy), 2)
        await for_seconds(3 * DUE_SECONDS + 5, a, b)
        c = SimulatedReplica(C, network, 3, scheme=outer_of(strategy))
        c.follow(a)
        before = c.state.outer_step
        assert before >= 2
        await for_seconds(3 * DUE_SECONDS, a, b, c)
        assert are_one_line([a, b, c])
        assert c.state.outer_step > before
        outcome = c.outcomes[-1]
        assert isinstance(outcome, Agreed)
        assert outcome.members == 3

    play(scenario)


@pytest.mark.parametrize("strategy", PARTS)
def test_who_took_a_state_over_that_the_others_have_left_meanwhile_catches_up(strategy: StrategyName) -> None:
    """The chain that they prove has the value after its state, so it knows the seats of the first missed step."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = replicas(network, outer_of(strategy), 2)
        await for_seconds(3 * DUE_SECONDS + 5, a, b)
        c = SimulatedReplica(C, network, 3, scheme=outer_of(strategy))
        c.follow(a)
        network.partition([A, B], [C])  # a long fetch
        while (missed := a.state.outer_step - c.state.outer_step) < 3:
            await for_seconds(DUE_SECONDS, a, b)
        network.partition()
        await for_seconds(120, a, b, c)
        assert not c.group.must_follow.is_set()
        assert sum(isinstance(one, Agreed) and one.is_without_own for one in c.outcomes) >= missed
        assert are_one_line([a, b, c])

    play(scenario)


@pytest.mark.parametrize("strategy", PARTS)
def test_only_the_part_of_a_round_becomes_equal(strategy: StrategyName) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = replicas(network, outer_of(strategy))
        for one in members:
            one.is_idle = True
            one.weights = one.weights - torch.rand(len(one.weights), generator=torch.Generator().manual_seed(one.seed))
            one.sequences = 100
        before = [one.weights for one in members]
        await for_seconds(30, *members)
        step = strategy_at(outer_of(strategy), SCHEMA, 0, 0)
        assert isinstance(step, FragmentStep)
        part = torch.zeros(SCHEMA.total_size)
        step.fragment.put(torch.ones(step.length), part)
        for one, weights in zip(members, before, strict=True):
            assert one.state.outer_step == 1
            assert torch.equal(one.weights[part == 1], members[0].weights[part == 1])
            assert torch.equal(one.weights[part == 0], weights[part == 0])
            assert not one.state.anchor[part == 0].any()

    play(scenario)
