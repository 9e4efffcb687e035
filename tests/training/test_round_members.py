"""A round has no more members than the memory of each of them has room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import anyio
import pytest
from replica_world import OUTER, STAGE, SimulatedReplica, play

from neuroshard.network import InMemoryNetwork, PeerRefusedError
from neuroshard.training.outer_sync import Agreed
from neuroshard.training.rounds.calls import Call, CallStep, call_frame, roster_of
from neuroshard.training.transfer.standing import MAX_MEMBERS, Standing
from neuroshard.types import NodeId

DUE_SECONDS = OUTER.inner_steps  # of steps of a second each
LINE = Standing(is_live=True, steps=5, outer_step=1, root="ab" * 32, sequences=10)


def named(number: int) -> NodeId:
    return NodeId(f"node {number}")


class Roomy:
    """Replicas that live for a while; who is left behind follows the furthest. Vectors of others are counted."""

    def __init__(self, network: InMemoryNetwork, *most_members: int) -> None:
        self.replicas = [
            SimulatedReplica(named(number), network, number, most_members=most)
            for number, most in enumerate(most_members)
        ]
        self.most_taken_in = dict.fromkeys((replica.name for replica in self.replicas), 0)
        for replica in self.replicas:
            self._watch(replica)

    def _watch(self, replica: SimulatedReplica) -> None:
        take_in = replica.group.line.open

        def counted(name: str, others: frozenset[NodeId], largest: Mapping[str, int]) -> None:
            self.most_taken_in[replica.name] = max(len(others), self.most_taken_in[replica.name])
            take_in(name, others, largest)

        replica.group.line.open = counted  # type: ignore[method-assign]

    async def live(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                for replica in self.replicas:
                    tasks.start_soon(replica.live)
                    tasks.start_soon(self._keep_following, replica)

    async def _keep_following(self, replica: SimulatedReplica) -> None:
        while True:
            await replica.group.gathering.must_follow.wait()
            replica.follow(max(self.replicas, key=lambda other: other.state.outer_step))

    def agreed(self) -> list[list[int]]:
        """Members of each one's rounds."""
        return [[told.members for told in one.outcomes if isinstance(told, Agreed)] for one in self.replicas]


def test_of_more_replicas_than_fit_the_memory_all_come_to_take_part() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        world = Roomy(network, *[3] * 5)
        await world.live(15 * DUE_SECONDS)
        assert max(world.most_taken_in.values()) == 2  # vectors beside the own one
        rounds = world.agreed()
        assert sum(3 in each for each in rounds) >= 4  # not the same ones in every round
        assert max(one.state.outer_step for one in world.replicas) > 5

    play(scenario)


def test_nobody_takes_in_more_than_it_has_room_for_whatever_room_others_have() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        room = (2, 4, 4, MAX_MEMBERS)
        world = Roomy(network, *room)
        await world.live(15 * DUE_SECONDS)
        assert all(world.agreed()[number] for number in (1, 2, 3))
        for taken_in, most in zip(world.most_taken_in.values(), room, strict=True):
            assert taken_in <= most - 1

    play(scenario)


def test_a_call_to_a_round_that_is_too_large_is_refused() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        small = SimulatedReplica(named(0), network, 0, most_members=2)
        caller = network.join(named(1))
        own = small.standing()
        assert own.most_members == 2
        call = Call(*own.line, 0, (named(0), named(1), named(2)), CallStep.ASK)
        with pytest.raises(PeerRefusedError, match="rounds of 2 members at most"):
            await caller.request(named(0), call_frame(STAGE, call), timeout_seconds=60)

    play(scenario)


@pytest.mark.parametrize(
    ("room", "size"),
    [
        ((2, 64, 64, 64), 2),
        ((64, 2, 64, 64), 3),  # one is left out, so that the others are more
        ((64, 3, 3, 3), 3),
        ((4, 4, 4, 4), 4),
        ((64, 1, 1, 1), 1),
        ((64, *[200] * 99), 64),
    ],
)
def test_as_many_take_part_as_fit_everyones_memory(room: tuple[int, ...], size: int) -> None:
    own, *others = (replace(LINE, most_members=most) for most in room)
    told = {named(number): standing for number, standing in enumerate(others, 1)}
    roster = roster_of(STAGE, named(0), own, told)
    assert roster[0] == named(0)
    assert len(set(roster)) == len(roster) == size
    assert all(told[node].most_members >= size for node in roster[1:])
