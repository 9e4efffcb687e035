"""Rounds of members that are cut off, late, or of another opinion."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest
import torch

from neuroshard.consensus.effects import VoteRecord
from neuroshard.consensus.slices import Encoded
from neuroshard.consensus.sync_strategies import Abandoned, Agreed
from neuroshard.consensus.vote_log import KEPT_STEPS
from neuroshard.network import InMemoryNetwork
from neuroshard.status.rounds import MemberPart
from neuroshard.types import NodeId
from tests.worlds.replicas import DUE_SECONDS, IDENTITIES, A, B, C, SimulatedReplica, for_seconds, play


def test_a_side_of_a_partition_without_a_quorum_trains_on_and_follows_afterwards() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert c.state.outer_step == 1
        network.partition([A, B], [C])
        await for_seconds(5 * DUE_SECONDS, a, b, c)
        assert c.state.outer_step == 1
        assert c.sequences > 2 * DUE_SECONDS
        assert a.state.outer_step == b.state.outer_step >= 2
        network.partition()
        await for_seconds(60 + 4 * DUE_SECONDS, a, b, c)
        assert not c.group.must_follow.is_set()
        assert a.replica_status().line == c.replica_status().line
        assert members_of_last_round(a) == 3

    play(scenario)


def members_of_last_round(replica: SimulatedReplica) -> int:
    outcome = replica.outcomes[-1]
    assert isinstance(outcome, Agreed)
    return outcome.members


def test_who_starts_from_before_a_round_that_it_has_written_down_takes_it_from_there() -> None:
    """As a founder of the line, whose first state no certificate names voters for."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert c.state.outer_step == 1
        network.kill(C)
        again = SimulatedReplica(C, network, 3, steps=5, book=c.book, store=c.store)
        await for_seconds(10, a, b, again)
        assert again.replica_status().line == a.replica_status().line
        assert not again.group.must_follow.is_set()

    play(scenario)


def test_who_is_refused_does_not_end_the_round_of_the_others_and_begins_anew_from_their_state() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        assert c.state.outer_step == 1
        c.weights = c.weights + 1000.0  # far away, in the other direction
        await for_seconds(3 * DUE_SECONDS, a, b, c)
        assert {one.members for one in a.outcomes if isinstance(one, Agreed)} == {3}
        assert not any(isinstance(one, Abandoned) for one in a.outcomes)
        assert (c.weights - c.state.anchor).abs().max() < 10.0
        assert c.replica_status().line == a.replica_status().line
        (without, *_) = (one for one in a.group.status.recent if any(each.refusal for each in one.members))
        assert without.views == 1
        assert {one.node_id: one.part for one in without.members}[C] is MemberPart.REFUSED

    play(scenario)


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_seats_only_the_first_one_continues_alone(is_first: bool) -> None:
    """However long the second one waits, it completes no step, so there are never two lines."""

    async def scenario(network: InMemoryNetwork) -> None:
        seats = (A, B) if is_first else (B, A)
        a, b = (SimulatedReplica(name, network, seed, seats=seats) for seed, name in enumerate((A, B)))
        a.may_be_alone = True
        await for_seconds(DUE_SECONDS + 5, a, b)
        reached = a.state.outer_step
        assert not a.group.obstacle
        network.kill(B)
        await for_seconds(700, a)
        assert (IDENTITIES[B].wallet_id[:8] in a.group.obstacle) is not is_first
        assert (a.state.outer_step > reached + 10) is is_first
        sizes = [outcome.members for outcome in a.outcomes if isinstance(outcome, Agreed)]
        assert sizes[-1] == (1 if is_first else 2)  # of its last completed step

    play(scenario)


def test_a_round_whose_result_the_members_find_worse_is_not_completed() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        a.objects = b.objects = "worse than before"
        await for_seconds(DUE_SECONDS + 30, a, b, c)
        assert not any(isinstance(outcome, Agreed) for outcome in (*a.outcomes, *b.outcomes, *c.outcomes))
        a.objects = b.objects = ""
        await for_seconds(100, a, b, c)
        assert isinstance(a.outcomes[-1], Agreed)

    play(scenario)


def test_what_is_trained_while_a_round_ends_late_is_kept() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        send, write, held = b.group.actor.mail.send, b.book.write, list[tuple[NodeId, Sequence[Encoded]]]()

        def hold(peer: NodeId, message: Sequence[Encoded]) -> None:
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
        assert a.replica_status().line == b.replica_status().line

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


@pytest.mark.parametrize("missed", [1, 3])
def test_who_slept_through_rounds_takes_their_aggregates_and_keeps_what_it_had_trained(missed: int) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        sleeping, change = c.replica_status(), c.state.anchor - c.weights
        assert 0 < c.sequences < 2 * DUE_SECONDS
        network.partition([A, B], [C])
        while a.state.outer_step < sleeping.outer_step + missed:
            await for_seconds(DUE_SECONDS, a, b)
        assert c.replica_status() == sleeping
        network.partition()
        a.is_idle = b.is_idle = c.is_idle = True
        await for_seconds(40, a, b, c)
        assert not c.group.must_follow.is_set()
        taken = [outcome for outcome in c.outcomes if isinstance(outcome, Agreed)][1:]
        assert [outcome.is_without_own for outcome in taken] == [True] * missed
        assert torch.allclose(c.state.anchor - c.weights, change, atol=1e-6)
        assert c.sequences == sleeping.sequences
        assert c.replica_status().line == a.replica_status().line
        assert torch.equal(a.state.velocity, c.state.velocity)
        a.is_idle = b.is_idle = c.is_idle = False
        await for_seconds(3 * DUE_SECONDS, a, b, c)
        assert members_of_last_round(a) == 3

    play(scenario)


def test_who_slept_through_more_rounds_than_are_kept_takes_the_state_of_another() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        network.partition([A, B], [C])
        while a.state.outer_step <= KEPT_STEPS + 1:
            await for_seconds(DUE_SECONDS, a, b)
        network.partition()
        await for_seconds(40, a, b, c)
        assert c.state.outer_step == 1
        assert c.group.must_follow.is_set()

    play(scenario)


def started_again(before: SimulatedReplica, seed: int) -> SimulatedReplica:
    """After a kill: what lies on the disk of its votes, and the state of its checkpoint."""
    before.network.kill(before.name)
    after = SimulatedReplica(
        before.name, before.network, seed, state=before.state, book=before.book, store=before.store
    )
    after.steps, after.sequences, after.wallet_rounds = before.steps, before.sequences, before.wallet_rounds
    after.weights = before.weights.clone()
    return after


async def until_locked(*replicas: SimulatedReplica) -> None:
    """They live until all of them have voted to commit; nobody hears of a commit."""
    async with anyio.create_task_group() as tasks:
        locked = set[NodeId]()

        def watch(replica: SimulatedReplica) -> None:
            write = replica.book.write

            def write_and_note(record: VoteRecord) -> None:
                write(record)
                if record.lock is not None:
                    locked.add(replica.name)
                    replica.group.actor.mail.send = lambda _peer, _payload: None  # type: ignore[method-assign]
                    if len(locked) == len(replicas):
                        tasks.cancel_scope.cancel()

            replica.book.write = write_and_note  # type: ignore[method-assign]

        for replica in replicas:
            watch(replica)
            tasks.start_soon(replica.live)


@pytest.mark.parametrize("is_founding", [True, False])
def test_members_that_all_restart_between_prepare_and_commit_end_the_step_with_what_they_are_locked_on(
    is_founding: bool,
) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        replicas = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C))]
        if not is_founding:
            await for_seconds(DUE_SECONDS + 5, *replicas)
        number = replicas[0].state.outer_step
        await until_locked(*replicas)
        locks = [record.lock for replica in replicas for record in replica.book.votes()[-1:]]
        (digest,) = {lock.value.digest for lock in locks if lock is not None}
        again = [started_again(replica, seed + 10) for seed, replica in enumerate(replicas)]
        assert {replica.state.outer_step for replica in again} == {number}
        await for_seconds(35, *again)
        assert len({replica.replica_status().line for replica in again}) == 1
        for replica in again:
            assert digest in {certificate.value.digest for certificate in replica.book.ended()}

    play(scenario)


def test_who_restarts_locked_asks_at_once_and_takes_the_end_without_its_work_twice() -> None:
    """It crashed between its commit and the end, which the others have."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        number, write, life = c.state.outer_step, c.book.write, anyio.CancelScope()

        def write_and_die(record: VoteRecord) -> None:
            write(record)
            if record.lock is not None:
                network.kill(C)
                life.cancel()  # the others' commits may be here already

        async def live_and_die() -> None:
            with life:
                await c.live()

        c.book.write = write_and_die  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live_and_die)
            while a.state.outer_step == number:
                await for_seconds(DUE_SECONDS, a, b)
        assert c.state.outer_step == number
        assert c.group.actor.locked_in(c.replica_status().root, c.replica_status().height + 1)
        del c.book.write
        again = started_again(c, 9)
        again.is_idle = True
        await for_seconds(4, a, b, again)  # far below the time after which whoever is apart follows
        assert again.state.outer_step > number
        taken = again.outcomes[0]
        assert isinstance(taken, Agreed)
        assert not taken.is_without_own  # C's work was in it
        assert torch.equal(again.weights, again.state.anchor)

    play(scenario)


def test_among_friends_little_work_counts_at_once() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        c = SimulatedReplica(C, network, 3, step_seconds=5.0)
        await for_seconds(5 * DUE_SECONDS, a, b, c)
        assert not any(outcome.is_without_own for outcome in c.outcomes if isinstance(outcome, Agreed))
        assert a.state.outer_step >= 2
        assert a.replica_status().line == c.replica_status().line

    play(scenario)


def test_who_did_little_abstains_and_its_work_is_in_a_later_round() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, is_open=True) for seed, name in enumerate((A, B), start=1))
        c = SimulatedReplica(C, network, 3, step_seconds=5.0, is_open=True)
        await for_seconds(5 * DUE_SECONDS, a, b, c)
        parts = [outcome.is_without_own for outcome in c.outcomes if isinstance(outcome, Agreed)]
        assert parts[0]
        assert not all(parts)
        assert not any(outcome.is_without_own for outcome in a.outcomes if isinstance(outcome, Agreed))
        assert a.state.outer_step - c.state.outer_step <= 1
        assert a.anchors[c.state.outer_step] == c.anchors[c.state.outer_step]

    play(scenario)
