"""Codecs and strategies through the rounds over the network: the same bytes for all, and what is lost comes later."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from neuroshard.config.run_parameters import CodecName, OuterOptimization, StrategyName
from neuroshard.consensus.sync_strategies import Agreed, strategy_at
from neuroshard.network import InMemoryNetwork
from tests.worlds.replicas import DUE_SECONDS, NAMES, OUTER, SCHEMA, SimulatedReplica, for_seconds, play

SPARSE = replace(OUTER, codec="topk", aggregator="mean")


def replicas(network: InMemoryNetwork, count: int, outer: OuterOptimization) -> list[SimulatedReplica]:
    return [SimulatedReplica(name, network, seed, scheme=outer) for seed, name in enumerate(NAMES[:count])]


def states(members: list[SimulatedReplica]) -> set[tuple[int, bytes, bytes]]:
    return {
        (one.state.outer_step, one.state.anchor.numpy().tobytes(), one.state.velocity.numpy().tobytes())
        for one in members
    }


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_hold_the_same_bytes_after_rounds_in_every_codec(codec: CodecName, count: int) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        outer = SPARSE if codec == "topk" else replace(OUTER, codec=codec)
        members = replicas(network, count, outer)
        await for_seconds(5 * DUE_SECONDS, *members)
        assert len(states(members)) == 1
        assert members[0].state.outer_step >= 3
        for one in members:
            assert all(isinstance(outcome, Agreed) and outcome.members == count for outcome in one.outcomes)
            assert (one.residual is None) == (codec == "fp32")

    play(scenario)


def test_top_k_has_no_outer_momentum() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        members = replicas(network, 3, SPARSE)
        await for_seconds(DUE_SECONDS + 5, *members)
        (outcome,) = members[0].outcomes
        assert isinstance(outcome, Agreed)
        await for_seconds(2 * DUE_SECONDS, *members)
        last = members[0].outcomes[-1]
        assert isinstance(last, Agreed)
        assert last is not outcome
        assert torch.equal(members[0].state.velocity, last.aggregate)

    play(scenario)


def test_another_codec_holds_from_an_outer_step_on_for_everybody() -> None:
    """What the codec before has lost is part of the first contribution in the next one."""

    async def scenario(network: InMemoryNetwork) -> None:
        schemes = (replace(OUTER, codec="int8"), replace(OUTER, codec="int4"), SPARSE, OUTER)
        members = [
            SimulatedReplica(name, network, seed, scheme=OUTER, versions=lambda step: schemes[min(step, 3)])
            for seed, name in enumerate(NAMES[:3])
        ]
        await for_seconds(7 * DUE_SECONDS, *members)
        assert len(states(members)) == 1
        assert members[0].state.outer_step >= 5
        assert all(isinstance(outcome, Agreed) for one in members for outcome in one.outcomes)

    play(scenario)


@pytest.mark.parametrize("strategy", ["sparta", "streaming"])
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_an_outer_step_on_a_part_of_the_vector_is_the_same_for_all(strategy: StrategyName, codec: CodecName) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        outer = replace(OUTER, strategy=strategy, codec=codec)
        members = replicas(network, 3, outer)
        await for_seconds(10 * DUE_SECONDS, *members)
        assert len(states(members)) == 1
        state = members[0].state
        assert state.outer_step >= 9
        assert not any(one.given_up for one in members)
        for one in members:
            assert [outcome.aggregate.shape for outcome in one.outcomes if isinstance(outcome, Agreed)] == [
                (strategy_at(outer, SCHEMA, step, 0).length,) for step in range(state.outer_step)
            ]
            assert not torch.equal(one.weights, members[0].weights) or one is members[0]
            assert (one.residual is None) == (codec == "fp32")

    play(scenario)
