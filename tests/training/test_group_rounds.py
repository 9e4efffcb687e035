from __future__ import annotations

import anyio
import torch
from replica_world import OUTER, SimulatedReplica, play

from neuroshard.network import InMemoryNetwork
from neuroshard.training.outer_sync import Abandoned, Agreed
from neuroshard.types import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
DUE_SECONDS = OUTER.inner_steps  # of steps of a second each


async def for_seconds(seconds: float, *replicas: SimulatedReplica) -> None:
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(replica.live)


def test_replicas_hold_the_same_bytes_after_every_round_and_both_ones_work_is_in_them() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        assert torch.equal(a.state.anchor, b.state.anchor)
        assert torch.equal(a.state.velocity, b.state.velocity)
        (mine,) = a.outcomes
        assert isinstance(mine, Agreed)
        assert mine.members == 2
        await for_seconds(5 * DUE_SECONDS, a, b)
        assert a.state.outer_step >= 4
        assert not any(isinstance(outcome, Abandoned) for outcome in (*a.outcomes, *b.outcomes))
        assert a.standing().line == b.standing().line

    play(scenario)
