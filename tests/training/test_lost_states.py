"""A kill between a certificate and the checkpoint of its state: the node knows a newer state than the one it has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.consensus.lone_steps import LOST_STATE
from neuroshard.consensus.stage_chain import InMemoryChainStore
from neuroshard.consensus.vote_log import KEPT_STEPS, MOST_KEPT_STEPS
from neuroshard.errors import StorageError
from neuroshard.network import InMemoryNetwork
from neuroshard.optim.outer import OuterState
from tests.worlds.replicas import DUE_SECONDS, A, B, C, SimulatedReplica, for_seconds, play


def from_checkpoint(replica: SimulatedReplica, state: OuterState) -> SimulatedReplica:
    """The node after a kill: its votes and its chain are on the disk, its state is this older one."""
    return replace(replica, state=state, sequences=0)


async def killed_after_a_lone_step(network: InMemoryNetwork) -> tuple[SimulatedReplica, SimulatedReplica]:
    """The owner's node before the kill, and after it."""
    before = SimulatedReplica(A, network, 0, may_be_alone=True, seats=(A,))
    start = before.state
    await for_seconds(1.5 * DUE_SECONDS, before)
    assert before.state.outer_step == 1
    network.kill(A)
    return before, from_checkpoint(before, start)


def certified(replica: SimulatedReplica) -> tuple[int, str | None]:
    """Outer step and root of the newest certified state that a replica knows."""
    chain = replica.group.chain.chain
    assert chain is not None
    return chain.standing.outer_step, chain.standing.root


def test_a_lone_node_continues_from_the_state_that_it_has() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        _, after = await killed_after_a_lone_step(network)
        await for_seconds(2 * DUE_SECONDS, after)
        assert after.state.outer_step == 0  # a friend may be about to start
        await for_seconds(5 * DUE_SECONDS, after)
        assert after.state.outer_step >= 3
        assert certified(after) == (after.state.outer_step, after.replica_status().root)
        assert not after.group.must_follow.is_set()
        assert after.group.obstacle == ""

    play(scenario)


def test_a_node_whose_state_another_one_has_takes_it_from_there() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        before, after = await killed_after_a_lone_step(network)
        friend = SimulatedReplica(B, network, 1, seats=(A,), store=before.store)
        friend.follow(before)
        await for_seconds(4 * DUE_SECONDS, after, friend)
        assert after.group.must_follow.is_set()
        assert (after.state.outer_step, friend.state.outer_step) == (0, 1)
        assert certified(after) == (1, friend.replica_status().root)

    play(scenario)


def test_a_friend_at_the_lost_state_learns_what_replaces_it() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        before, after = await killed_after_a_lone_step(network)
        while after.state.outer_step < 2:
            await for_seconds(DUE_SECONDS, after)
        friend = SimulatedReplica(B, network, 1, seats=(A,), store=before.store)
        friend.follow(before)
        await for_seconds(3 * DUE_SECONDS, after, friend)
        assert friend.group.must_follow.is_set()
        assert certified(friend) == certified(after)
        assert friend.group.chain.fork is None

    play(scenario)


def test_a_friend_with_a_state_on_the_way_holds_nobody() -> None:
    """Nothing leads from its state to the newest one, which is lost: it is no donor."""

    async def scenario(network: InMemoryNetwork) -> None:
        owner = SimulatedReplica(A, network, 0, may_be_alone=True, seats=(A,))
        start = owner.state
        await for_seconds(1.5 * DUE_SECONDS, owner)
        between, known = owner.state, InMemoryChainStore()
        known.stored = owner.store.read()
        await for_seconds(DUE_SECONDS, owner)
        assert (between.outer_step, owner.state.outer_step) == (1, 2)
        network.kill(A)
        after = from_checkpoint(owner, start)
        friend = SimulatedReplica(B, network, 1, seats=(A,), store=known, state=between)
        await for_seconds(8 * DUE_SECONDS, after, friend)
        assert not after.group.must_follow.is_set()
        assert after.state.outer_step >= 3
        assert friend.group.must_follow.is_set()

    play(scenario)


def test_the_work_of_others_is_not_replaced_by_an_older_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's seat is a quorum of two alone, but the lost states have the work of both."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (
            SimulatedReplica(name, network, seed, may_be_alone=True, seats=(A, B)) for seed, name in enumerate((A, B))
        )
        start = a.state
        await for_seconds(1.5 * DUE_SECONDS, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        network.kill(A)
        network.kill(B)
        monkeypatch.setattr(a.book, "aggregate", lambda _certificate: None)  # it is damaged
        a = from_checkpoint(a, start)
        await for_seconds(12 * DUE_SECONDS, a)
        assert a.state.outer_step == 0
        assert a.group.obstacle == LOST_STATE

    play(scenario)


def test_a_value_that_was_locked_before_a_kill_is_completed_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes after the owner's vote left and before the end of the step is on its disk."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        a.may_be_alone = True
        while a.state.outer_step < 2:
            await for_seconds(DUE_SECONDS / 2, a, b)
        before, known = a.state, InMemoryChainStore()
        known.stored = a.store.read()

        def fails(*_: object) -> None:
            raise StorageError("The disk is gone.", "")

        with monkeypatch.context() as patch:
            patch.setattr(a.book, "end", fails)
            while b.state.outer_step == before.outer_step:
                await for_seconds(DUE_SECONDS / 2, a, b)
        decided = certified(b)
        network.kill(A)
        network.kill(B)
        after = replace(a, state=before, sequences=0, store=known)
        await for_seconds(1, after)
        assert certified(after) == decided
        await for_seconds(4 * DUE_SECONDS, after)
        assert after.state.outer_step > decided[0]
        b = replace(b)
        await for_seconds(3 * DUE_SECONDS, after, b)
        assert after.group.chain.fork is None
        assert b.group.chain.fork is None

    play(scenario)


def test_a_seat_that_decides_nothing_alone_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (
            SimulatedReplica(name, network, seed, may_be_alone=True, seats=(A, B)) for seed, name in enumerate((A, B))
        )
        start = b.state
        await for_seconds(1.5 * DUE_SECONDS, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        network.kill(A)
        network.kill(B)
        monkeypatch.setattr(b.book, "aggregate", lambda _certificate: None)  # it is damaged
        b = from_checkpoint(b, start)
        await for_seconds(6 * DUE_SECONDS, b)
        assert b.state.outer_step == 0
        assert b.group.obstacle == LOST_STATE
        assert not b.group.must_follow.is_set()

    play(scenario)


@pytest.mark.parametrize("steps", [KEPT_STEPS + 3, MOST_KEPT_STEPS - 1])
def test_members_that_are_killed_at_once_reach_the_newest_state_from_their_disks(steps: int) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        names = (A, B, C)
        replicas = [SimulatedReplica(name, network, seed, saved_outer_step=0) for seed, name in enumerate(names)]
        start = replicas[0].state
        while replicas[0].state.outer_step < steps:
            await for_seconds(DUE_SECONDS, *replicas)
        before = certified(replicas[0])
        assert replicas[0].group.replica_status().kept == before[0]
        for name in names:
            network.kill(name)
        replicas = [from_checkpoint(replica, start) for replica in replicas]
        await for_seconds(6 * DUE_SECONDS, *replicas)
        assert before[0] < replicas[0].state.outer_step < before[0] + 7
        assert len({replica.replica_status().root for replica in replicas}) == 1
        assert not any(replica.group.must_follow.is_set() for replica in replicas)

    play(scenario)
