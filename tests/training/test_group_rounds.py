from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest
import torch

from neuroshard.consensus.all_reduce import AllReduce
from neuroshard.consensus.effects import VoteRecord
from neuroshard.consensus.matchmaking import RoundTimes, WorkToRound
from neuroshard.consensus.message_queue import PART, MessagePart
from neuroshard.consensus.round_machine import RoundStateMachine
from neuroshard.consensus.round_status import NO_QUORUM
from neuroshard.consensus.stage_chain import CHAIN, CHAIN_ANSWER_LIMITS, ChainRequest
from neuroshard.consensus.sync_strategies import Abandoned, Agreed, Outcome
from neuroshard.messages import Frame, TensorPart, TensorSpec
from neuroshard.network import InMemoryNetwork, Link, PeerRefusedError
from neuroshard.optim.outer import CertifiedWork, OuterState
from neuroshard.state.download import DONOR_PATIENCE_SECONDS
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.types import NodeId
from tests.worlds.replicas import (
    DUE_SECONDS,
    LENGTH,
    NAMES,
    OUTER,
    SEQUENCES_PER_STEP,
    STAGE,
    A,
    B,
    C,
    SimulatedReplica,
    for_seconds,
    play,
)


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
        assert a.replica_status().line == b.replica_status().line

    play(scenario)


class _OneLook(RoundTimes):
    def pause(self, work: WorkToRound, replicas: int) -> float:
        return 1_000.0


class _LateReplica(SimulatedReplica):
    """It does not know the root of its state at its first look, and looks only once."""

    knows_root = False

    def own_status(self) -> ReplicaStatus:
        status = super().own_status()
        return status if self.knows_root else replace(status, root="")


def test_an_intent_that_comes_before_the_first_look_from_a_known_state_makes_a_seat_vote() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), _LateReplica(B, network, 2, times=_OneLook(near_seconds=1_000))

        async def learn_root() -> None:
            await anyio.sleep(1)
            b.knows_root = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(learn_root)
            await for_seconds(DUE_SECONDS + 5, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        assert not any(isinstance(outcome, Abandoned) for outcome in (*a.outcomes, *b.outcomes))

    play(scenario)


def rounds_in_memory() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (AllReduce, RoundStateMachine)]  # isinstance asks proxies


def test_nothing_of_a_round_is_held_once_it_has_ended() -> None:
    """What its members sent each other is several contributions."""

    async def scenario(network: InMemoryNetwork) -> None:
        earlier = {id(one): one for one in rounds_in_memory()}  # other tests of the process may hold theirs
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        assert a.state.outer_step == b.state.outer_step == 1
        assert not [one for one in rounds_in_memory() if id(one) not in earlier]

    play(scenario)


def test_a_newcomer_enters_at_the_next_round() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        c = SimulatedReplica(C, network, 3)
        c.follow(a)
        await for_seconds(2 * DUE_SECONDS, a, b, c)
        last = c.outcomes[0]
        assert isinstance(last, Agreed)
        assert last.members == 3
        assert torch.equal(c.state.anchor, a.state.anchor)
        assert not c.group.must_follow.is_set()

    play(scenario)


def test_newcomers_complete_nothing_without_the_seats() -> None:
    """Two of them agree with each other for as long as they like."""

    async def scenario(network: InMemoryNetwork) -> None:
        voters = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C))]
        await for_seconds(DUE_SECONDS + 5, *voters)
        newcomers = [SimulatedReplica(name, network, 10 + seed) for seed, name in enumerate(NAMES[3:5])]
        for one in newcomers:
            one.follow(voters[0])
        for voter in voters:
            voter.may_take_part = False
        await for_seconds(300, *voters, *newcomers)
        assert {one.state.outer_step for one in newcomers} == {1}
        for voter in voters:
            voter.may_take_part = True
        await for_seconds(60, *voters, *newcomers)
        assert {one.replica_status().line for one in newcomers} == {voters[0].replica_status().line}
        assert voters[0].state.outer_step >= 2

    play(scenario)


def test_a_replica_of_another_line_is_left_out_and_must_follow() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        c = SimulatedReplica(C, network, 3, steps=5, state=OuterState(torch.ones(LENGTH), torch.zeros(LENGTH), 0))
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            await c.group.must_follow.wait()
            assert 15 <= anyio.current_time() - began < 30
            c.follow(b)
            await anyio.sleep(2 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert not a.group.must_follow.is_set()
        assert not b.group.must_follow.is_set()
        assert torch.equal(c.state.anchor, a.state.anchor)
        assert c.outcomes

    play(scenario)


@pytest.mark.parametrize("doubted", [(A,), (A, B)])
def test_a_replica_follows_no_donor_that_has_failed_until_the_doubt_ends(doubted: tuple[NodeId, ...]) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        a.is_idle = b.is_idle = True
        c = SimulatedReplica(C, network, 3, steps=5, state=OuterState(torch.ones(LENGTH), torch.zeros(LENGTH), 0))
        began = anyio.current_time()
        for donor in doubted:
            c.asking.failed.note(donor, began - DONOR_PATIENCE_SECONDS)
            c.asking.failed.note(donor, began)
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            await c.group.must_follow.wait()
            tasks.cancel_scope.cancel()
        waited = anyio.current_time() - began
        assert waited < 30 if len(doubted) == 1 else DONOR_PATIENCE_SECONDS <= waited < DONOR_PATIENCE_SECONDS + 15

    play(scenario)


def test_a_contributor_completes_nothing_alone_and_takes_the_state_of_the_seat() -> None:
    """Apart from the owner it trains on; the owner's steps alone have no aggregate that it could apply."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        network.partition([A], [B])
        a.may_be_alone = b.may_be_alone = True
        await for_seconds(3 * DUE_SECONDS + 5, a, b)
        assert (a.state.outer_step, b.state.outer_step) == (3, 0)
        assert b.sequences > 2 * DUE_SECONDS
        network.partition()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.live)
            tasks.start_soon(b.live)
            await b.group.must_follow.wait()
            assert not a.group.must_follow.is_set()
            b.follow(a)
            await anyio.sleep(4 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert a.replica_status().line == b.replica_status().line
        assert a.state.outer_step > 3

    play(scenario)


@pytest.mark.parametrize(
    "messages", [pytest.param(count, marks=[pytest.mark.long] if count in {2, 4, 6, 7} else []) for count in range(9)]
)
def test_a_member_that_dies_during_a_round_stops_nobody(messages: int) -> None:
    """B ends with its n-th message of the round; A and C go on, and what was abandoned has changed nothing.

    Two of three seats are a quorum, whatever B has seen.
    """

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        b.dies_at_message = messages
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            await anyio.sleep(DUE_SECONDS + 5)
            assert B not in network.nodes()
            for replica in (a, c):
                if replica.state.outer_step == 0:
                    assert replica.sequences == SEQUENCES_PER_STEP * replica.steps
                    assert torch.equal(replica.state.anchor, torch.zeros(LENGTH))
            await anyio.sleep(200)
            tasks.cancel_scope.cancel()
        assert max(a.state.outer_step, c.state.outer_step) >= 2
        assert a.replica_status().line == c.replica_status().line

    play(scenario)


@pytest.mark.parametrize("messages", [0, 1, 3])
def test_training_waits_for_no_round_that_cannot_end(messages: int) -> None:
    """The only seat ends within a round: the other trains again as soon as the membership has noticed it."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        a.dies_at_message = messages
        async with anyio.create_task_group() as tasks:
            for replica in (a, b):
                tasks.start_soon(replica.live)
            while A in network.nodes():
                await anyio.sleep(0.1)
            await anyio.sleep(5)
            assert b.steps > DUE_SECONDS + 1
            assert all(outcome == Abandoned(NO_QUORUM, is_soon_again=True) for outcome in b.outcomes)
            assert f"too few voting nodes are online. Start those of {a.member.wallet_id[:8]}" in b.group.obstacle
            tasks.cancel_scope.cancel()

    play(scenario)


def test_a_member_that_enters_its_step_again_while_it_ends_keeps_the_end_from_nobody() -> None:
    """It enters again after the step was decided here, and before it has told the others."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        enter, write, entries = a.group.actor.enter, a.book.write, list[Callable[[], None]]()

        def note_entry(*terms: Any) -> None:
            entries.append(partial(enter, *terms))
            enter(*terms)

        def store(record: VoteRecord) -> None:
            write(record)
            if record.lock is not None and len(entries) == 1:
                entries.pop()()

        a.group.actor.enter, a.book.write = note_entry, store  # type: ignore[method-assign]
        await for_seconds(DUE_SECONDS + 5, a, b)
        assert not entries
        assert a.state.outer_step == b.state.outer_step == 1
        assert a.replica_status().line == b.replica_status().line

    play(scenario)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_ends_with_what_a_node_sent_in_an_abandoned_try_keeps_its_work_since_then(overlap: bool) -> None:
    """C votes no, trains on and contributes again. The others hear that late, and end the step with the first one."""

    async def scenario(network: InMemoryNetwork) -> None:
        outer = replace(OUTER, overlap=overlap, codec="fp32")
        a, b, c = (SimulatedReplica(name, network, seed, scheme=outer) for seed, name in enumerate((A, B, C)))
        c.objects, entered, sent = "worse than before", anyio.Event(), list[torch.Tensor]()
        exchange, enter = c.group.exchange, c.group.actor.enter

        async def exchange_and_note(contribution: torch.Tensor, outer_step: int) -> Outcome:
            if c.group.due is not None:
                sent.append(contribution)
            return await exchange(contribution, outer_step)

        def enter_with_slow_lines(*terms: Any) -> None:
            if len(sent) == 2:
                for other in (A, B):
                    network.set_link(C, other, Link(delay_seconds=3))
                entered.set()
            enter(*terms)

        async def measured(aggregate: torch.Tensor, next_root: str, choice: int | None = None) -> str:
            await entered.wait()
            return ""

        for one in (a, b):
            one.objection = measured  # type: ignore[method-assign]
        c.group.exchange, c.group.actor.enter = exchange_and_note, enter_with_slow_lines  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            while not c.state.outer_step:
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        agreed = c.outcomes[-1]
        assert isinstance(agreed, Agreed)
        assert len(sent) == 2
        assert agreed.late_for is not None
        torch.testing.assert_close(agreed.late_for, sent[0])
        assert c.sequences == SEQUENCES_PER_STEP * c.steps - (agreed.offered or 0) > 0

    play(scenario)


def test_a_step_alone_is_not_ended_once_more_by_an_abandoned_round() -> None:
    """A gives up while the aggregate is checked. When the other member has left, the check ends after A's own step."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed, seats=(A,)) for seed, name in enumerate((A, B)))
        a.may_be_alone, checking, may_end, root_after = True, anyio.Event(), anyio.Event(), a.root_after

        async def slow(aggregate: torch.Tensor, outer_step: int, work: CertifiedWork) -> str:
            root = await root_after(aggregate, outer_step, work)
            checking.set()
            await may_end.wait()
            return root

        a.root_after = slow  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.live)
            tasks.start_soon(b.live)
            await checking.wait()
            network.kill(B)
            a.group.actor.give_up("it takes too long")
            while a.state.outer_step == 0:
                await anyio.sleep(0.01)
            may_end.set()
            await anyio.sleep(10 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert a.group.chain.fork is None
        assert a.state.outer_step >= 8
        assert all(not isinstance(one, Agreed) or one.members == 1 for one in a.outcomes)

    play(scenario)


def slow_down(network: InMemoryNetwork, seconds: float) -> None:
    """All that B sends."""
    network.set_link(B, A, Link(delay_seconds=seconds))


def test_a_member_whose_messages_are_slow_is_waited_for() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        slow_down(network, 1.5)
        await for_seconds(DUE_SECONDS + 60, a, b)
        assert isinstance(a.outcomes[0], Agreed)
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


@pytest.mark.parametrize("gone", [A, B, C])
def test_when_a_seat_is_gone_the_others_go_on(gone: NodeId) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        replicas = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C))]
        left = [replica for replica in replicas if replica.name != gone]
        for replica, other in zip(left, reversed(left), strict=True):
            replica.known = partial(list, [gone, other.name])  # the membership has not noticed
        network.kill(gone)
        await for_seconds(DUE_SECONDS + 60, *left)
        assert left[0].outcomes
        assert torch.equal(left[0].state.anchor, left[1].state.anchor)

    play(scenario)


def test_a_step_that_is_due_follows_within_seconds_of_the_return_of_an_absent_seat() -> None:
    """Whatever its interval of looks: its own work has been done for long, so that it looks seldom."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B)))
        back = DUE_SECONDS + 91.5
        a.known, b.known = (lambda other=other: [other] if anyio.current_time() > back else [] for other in (B, A))
        await for_seconds(back + 3, a, b)
        assert a.state.outer_step == b.state.outer_step == 1

    play(scenario)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_replica_without_work_takes_part_in_the_rounds_of_the_other_and_holds_none_of_them_up(
    has_begun: bool,
) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2, is_idle=not has_begun)
        await for_seconds(2 * DUE_SECONDS + 2, a, b)
        rounds = len(a.outcomes)
        assert rounds >= 1
        for idle, busy in ((b, a), (a, b)):  # drivers keep to one of them, then to the other
            idle.is_idle, busy.is_idle = True, False
            await for_seconds(4 * DUE_SECONDS, a, b)
            assert len(a.outcomes) >= rounds + 3
            rounds = len(a.outcomes)
            assert torch.equal(idle.weights, idle.state.anchor)  # nothing of its own on top
        assert torch.equal(a.state.anchor, b.state.anchor)
        assert all(isinstance(outcome, Agreed) and outcome.members == 2 for outcome in [*a.outcomes, *b.outcomes])

    play(scenario)


def test_nobody_waits_for_a_replica_that_may_not_take_part() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        c.may_take_part = False
        await for_seconds(DUE_SECONDS + 5, a, b, c)
        agreed = a.outcomes[0]
        assert isinstance(agreed, Agreed)
        assert agreed.members == 2
        assert not c.entered
        assert all(isinstance(end, Agreed) and end.is_without_own for end in c.outcomes)

    play(scenario)


def test_who_withdraws_holds_nobody_up_for_good() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.live)
            b.is_reluctant = True
            tasks.start_soon(b.live)
            await anyio.sleep(DUE_SECONDS + 50)
            assert isinstance(a.outcomes[0], Abandoned)
            assert a.sequences == 2 * a.steps  # all of the work is still to be contributed
            b.is_reluctant = False
            await anyio.sleep(100)
            tasks.cancel_scope.cancel()
        assert isinstance(a.outcomes[-1], Agreed)
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_parts_of_strangers_are_refused_and_a_newcomer_gets_the_chain() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, stranger = SimulatedReplica(A, network, 1), network.join(NAMES[3])
        part = Frame(PART, MessagePart(STAGE, 1, 0, 1), (TensorPart(TensorSpec("piece 0", "uint8", (1,)), b"x"),))
        await stranger.request(A, part, timeout_seconds=60)
        a.known = lambda: [B]
        with pytest.raises(PeerRefusedError, match="that train these layers"):
            await stranger.request(A, part, timeout_seconds=60)
        known = a.group.chain.chain
        assert known is not None
        asked = Frame(CHAIN, ChainRequest(STAGE, known.statement))
        answer = await stranger.request(A, asked, reply=CHAIN_ANSWER_LIMITS, timeout_seconds=60)
        assert answer.kind == CHAIN
        with pytest.raises(PeerRefusedError, match="another foundation"):
            await stranger.request(A, Frame(CHAIN, ChainRequest(STAGE, "e" * 64)), timeout_seconds=60)

    play(scenario)
