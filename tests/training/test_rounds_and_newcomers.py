"""Replicas that are only coming: rounds wait for them, and not for ever."""

from __future__ import annotations

from dataclasses import replace

import torch
import trio
from trio.testing import MockClock

from neuroshard.consensus.matchmaking import Look, RoundTimes
from neuroshard.consensus.stage_chain import InMemoryChainStore
from neuroshard.consensus.sync_strategies import Agreed
from neuroshard.network import InMemoryNetwork, Link
from tests.worlds.replicas import DUE_SECONDS, A, B, C, SimulatedReplica, for_seconds, play


def test_a_replica_that_is_only_starting_is_waited_for() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        a.may_be_alone = b.is_idle = True
        await for_seconds(DUE_SECONDS + 5, a, b)
        b.is_idle = False
        await for_seconds(2 * DUE_SECONDS, a, b)
        assert {outcome.members for outcome in a.outcomes if isinstance(outcome, Agreed)} == {2}
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_who_takes_the_state_over_finds_it_unchanged() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a = SimulatedReplica(A, network, 1, may_be_alone=True, takers=frozenset({B}), seats=(A,))
        await for_seconds(3 * DUE_SECONDS, a)
        assert not a.outcomes
        b = SimulatedReplica(B, network, 2, seats=(A,))
        b.follow(a)
        await for_seconds(DUE_SECONDS + 10, a, b)
        assert {outcome.members for outcome in a.outcomes if isinstance(outcome, Agreed)} == {2}
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_a_lone_replica_whose_state_somebody_always_fetches_waits_three_minutes_a_step() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a = SimulatedReplica(A, network, 1, may_be_alone=True, takers=frozenset({B}), seats=(A,))
        await for_seconds(170, a)
        assert not a.outcomes
        await for_seconds(230, a)
        assert len(a.outcomes) == 2

    play(scenario)


def test_who_missed_the_steps_of_a_fast_lone_replica_follows_it_after_the_patience() -> None:
    """The other one no longer waits, and makes more steps than this one looks at it."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        a.may_be_alone = True
        while b.state.outer_step < 2:
            await for_seconds(DUE_SECONDS, a, b)
        network.kill(B)
        a.step_seconds = 0.007
        await for_seconds(5, a)
        again = replace(b, state=b.state, sequences=0, store=InMemoryChainStore())
        a.group._matchmaking.times = RoundTimes(patience_seconds=0.0)
        began = a.state.outer_step
        await for_seconds(30, a, again)
        assert a.state.outer_step > began + 300  # it has gone on
        assert again.group.must_follow.is_set()

    play(scenario)


def test_a_replica_that_has_just_started_is_not_alone_before_the_others_could_answer() -> None:
    """Its first look waits for nobody: a step alone would leave a replica behind that is online."""

    async def main() -> None:
        with InMemoryNetwork(default_link=Link(delay_seconds=1)) as network:
            a, b = (SimulatedReplica(name, network, seed, seats=(A, B)) for seed, name in enumerate((A, B)))
            await for_seconds(0.5, a, b)
            assert a.group._matchmaking._look is not None
            assert not a.group.is_alone
        with InMemoryNetwork() as network:
            a = SimulatedReplica(A, network, 1, seats=(A, B))
            await for_seconds(5, a)
            assert a.group.is_alone

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_seat_that_is_silent_is_waited_for_once_its_intent_arrives() -> None:
    """Its answers may be late; a step alone would end the step that it has entered without its work."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A, B)) for seed, name in enumerate((A, B)))
        await for_seconds(5, a, b)
        matchmaking, step, later = a.group._matchmaking, a.group._present_step(), 100.0
        assert step is not None
        matchmaking.looked(Look(a.replica_status(), {}, step, later))
        assert matchmaking.is_alone(step, later)
        due = matchmaking.heard_intent(B, step, later)
        assert due is not None
        assert [member.node_id for member in due.members] == sorted([A, B])
        assert not matchmaking.is_alone(step, later)

    play(scenario)


def test_a_newcomer_that_does_not_come_holds_nobody_up_for_good() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (
            SimulatedReplica(name, network, seed, takers=frozenset({C}), seats=(A, B))
            for seed, name in enumerate((A, B))
        )
        await for_seconds(DUE_SECONDS + 5, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        network.kill(B)
        a.may_be_alone, a.takers = True, frozenset()
        a.known = list  # nobody
        await for_seconds(4 * DUE_SECONDS, a)
        assert a.state.outer_step > 1

    play(scenario)
