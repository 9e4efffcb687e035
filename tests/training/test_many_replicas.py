"""More replicas than a round has members: they take turns, and all of them come to the same bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from neuroshard.consensus.matchmaking import RoundTimes
from neuroshard.consensus.sync_strategies import Agreed
from neuroshard.network import InMemoryNetwork
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import StageName
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.replicas import DUE_SECONDS, NAMES, SimulatedReplica, for_seconds, play

MOST = 4
TIMES = replace(RoundTimes(), near_seconds=2.0, behind_seconds=2.0)
STAGE = StageName(RunId("1" * 64), LayerRange(0, 2))
OWN = ReplicaStatus(True, 10, 3, "a" * 64, sequences=5)


def crowd(count: int, status: ReplicaStatus = OWN) -> dict[NodeId, ReplicaStatus]:
    return {NodeId(f"n{number}"): status for number in range(count)}


def test_more_replicas_than_members_take_turns_and_end_with_the_same_bytes() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        def replica(seed: int) -> SimulatedReplica:
            return SimulatedReplica(NAMES[seed], network, seed, times=TIMES, most_members=MOST)

        replicas = [replica(seed) for seed in range(3)]
        await for_seconds(DUE_SECONDS + 5, *replicas)
        for seed in range(3, 7):  # they come one after the other and take the state over
            newcomer = replica(seed)
            newcomer.follow(replicas[0])
            newcomer.sequences = 0
            replicas.append(newcomer)
            while not newcomer.outcomes:
                await for_seconds(DUE_SECONDS, *replicas)
                if newcomer.group.must_follow.is_set():  # until it has a certificate it takes states over
                    newcomer.follow(max(replicas, key=lambda other: other.state.outer_step))
                    newcomer.sequences = 0
        parts = [len(one.outcomes) for one in replicas]
        before = replicas[0].state.outer_step
        await for_seconds(15 * DUE_SECONDS, *replicas)
        assert replicas[0].state.outer_step >= before + 8
        assert not any(one.group.must_follow.is_set() for one in replicas)
        assert all(len(one.outcomes) > count for one, count in zip(replicas, parts, strict=True))
        for one in replicas:
            one.is_idle = True
            rounds = [outcome for outcome in one.outcomes if isinstance(outcome, Agreed)]
            assert any(not outcome.is_without_own for outcome in rounds[-12:]), "its work never counts"
        await for_seconds(5 * DUE_SECONDS, *replicas)
        assert all(torch.equal(one.state.anchor, replicas[0].state.anchor) for one in replicas)
        assert all(torch.equal(one.state.velocity, replicas[0].state.velocity) for one in replicas)

    play(scenario)
