"""Rounds of members that are cut off, late, or of another opinion."""

from __future__ import annotations

from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
from replica_world import DUE_SECONDS, A, B, C, SimulatedReplica, for_seconds, play

from neuroshard.network import InMemoryNetwork
from neuroshard.swarm.certified.effects import VoteRecord
from neuroshard.training.outer_sync import Abandoned, Agreed
from neuroshard.types import NodeId
from neuroshard.wire import EncodedFrame


def test_a_side_of_a_partition_without_a_quorum_trains_on_and_follows_afterwards() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert c.state.outer_step == 1
        network.partition([A, B], [C])
        await for_seconds(8 * DUE_SECONDS, a, b, c)
        assert c.state.outer_step == 1
        assert c.sequences > 2 * DUE_SECONDS
        assert a.state.outer_step == b.state.outer_step >= 2
        network.partition()
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            await c.group.gathering.must_follow.wait()
            c.follow(a)
            await anyio.sleep(4 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert a.standing().line == c.standing().line
        assert a.outcomes[-1] == replace_aggregate(a.outcomes[-1], members=3)

    play(scenario)


def replace_aggregate(outcome: Agreed | Abandoned, members: int) -> Agreed | Abandoned:
    return replace(outcome, members=members) if isinstance(outcome, Agreed) else outcome


def test_who_has_had_no_quorum_for_ten_minutes_goes_on_alone() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        a.may_be_alone = True
        await for_seconds(DUE_SECONDS + 5, a, b)
        network.kill(B)
        await for_seconds(300, a)
        assert a.state.outer_step == 1
        await for_seconds(400, a)
        assert a.state.outer_step > 2
        assert isinstance(a.outcomes[-1], Agreed)
        assert a.outcomes[-1].members == 1

    play(scenario)


def test_a_round_whose_result_the_members_find_worse_is_not_completed() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        a.objection = b.objection = "worse than before"
        await for_seconds(DUE_SECONDS + 100, a, b, c)
        assert not any(isinstance(outcome, Agreed) for outcome in (*a.outcomes, *b.outcomes, *c.outcomes))
        a.objection = b.objection = ""
        await for_seconds(300, a, b, c)
        assert isinstance(a.outcomes[-1], Agreed)

    play(scenario)


def test_what_is_trained_while_a_round_ends_late_is_kept() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        send, write, held = b.group.actor.mail.send, b.book.write, list[tuple[NodeId, EncodedFrame]]()

        def hold(peer: NodeId, message: EncodedFrame) -> None:
            held.append((peer, message))

        def write_and_hold(record: VoteRecord) -> None:
            write(record)
            if record.lock is not None and not held:
                b.group.actor.mail.send = hold  # type: ignore[method-assign]

        b.book.write = write_and_hold  # type: ignore[method-assign]
        await for_seconds(DUE_SECONDS + 60, a, b)  # A does not hear that B has committed
        assert isinstance(a.outcomes[0], Abandoned)
        b.group.actor.mail.send = send  # type: ignore[method-assign]
        for peer, message in held:
            send(peer, message)
        await for_seconds(200, a, b)
        agreed = [outcome for outcome in (*a.outcomes, *b.outcomes) if isinstance(outcome, Agreed)]
        assert any(outcome.late_for is not None for outcome in agreed)
        assert a.standing().line == b.standing().line

    play(scenario)


@pytest.mark.parametrize("place", range(3))  # one of them proposes
def test_what_comes_before_a_member_has_entered_is_not_lost(place: int) -> None:
    """It is called like the others, and enters seconds later: it has a microbatch open."""

    async def scenario(network: InMemoryNetwork) -> None:
        replicas = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C))]
        enter = replicas[place].take_part

        async def late() -> None:
            await anyio.sleep(3)
            await enter()

        replicas[place].take_part = late  # type: ignore[method-assign]
        await for_seconds(DUE_SECONDS + 8, *replicas)
        (outcome,) = replicas[place].outcomes
        assert isinstance(outcome, Agreed)
        assert outcome.members == 3

    play(scenario)
