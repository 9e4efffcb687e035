from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
import torch
from replica_world import LENGTH, OUTER, SEQUENCES_PER_STEP, STAGE, SimulatedReplica, play

from neuroshard.network import InMemoryNetwork, PeerRefusedError
from neuroshard.training.outer_sync import Abandoned, Agreed
from neuroshard.training.rounds.calls import Call, CallStep, call_frame, turn_order
from neuroshard.training.rounds.line import PART_BYTES
from neuroshard.training.transfer.fields import request_about
from neuroshard.types import NodeId
from neuroshard.wire import Frame, TensorPart, TensorSpec, WireValue

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
        assert not c.group.gathering.must_follow.is_set()

    play(scenario)


def test_a_replica_of_another_line_is_left_out_and_must_follow() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        await for_seconds(DUE_SECONDS + 5, a, b)
        c = SimulatedReplica(C, network, 3, steps=5)  # it was away during the round
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            await c.group.gathering.must_follow.wait()
            assert 15 <= anyio.current_time() - began < 30
            c.follow(b)
            await anyio.sleep(2 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert not a.group.gathering.must_follow.is_set()
        assert not b.group.gathering.must_follow.is_set()
        assert torch.equal(c.state.anchor, a.state.anchor)
        assert c.outcomes

    play(scenario)


def test_two_lines_become_one_in_favour_of_the_one_with_more_work() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        network.partition([A], [B])
        a.known = b.known = list  # each believes that it is alone
        a.may_be_alone = b.may_be_alone = True
        await for_seconds(3 * DUE_SECONDS + 2, a)
        await for_seconds(DUE_SECONDS + 2, b)
        assert (a.state.outer_step, b.state.outer_step) == (3, 1)
        network.partition()
        a.known = b.known = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.live)
            tasks.start_soon(b.live)
            await b.group.gathering.must_follow.wait()
            assert not a.group.gathering.must_follow.is_set()
            b.follow(a)
            await anyio.sleep(4 * DUE_SECONDS)
            tasks.cancel_scope.cancel()
        assert a.standing().line == b.standing().line
        assert a.state.outer_step > 3

    play(scenario)


@pytest.mark.parametrize("messages", range(4))  # two contributions, two roots
def test_a_member_that_dies_during_a_round_stops_nobody_for_good(messages: int) -> None:
    """B ends with its n-th message of the round; A either completes, or keeps its work for the next one, with C."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        b.dies_at_message = messages
        async with anyio.create_task_group() as tasks:
            for replica in (a, b, c):
                tasks.start_soon(replica.live)
            await anyio.sleep(DUE_SECONDS + 5)
            assert not network.transport_of(B)
            for replica in (a, c):
                if replica.state.outer_step == 0:  # what was abandoned has changed nothing
                    assert replica.sequences == SEQUENCES_PER_STEP * replica.steps
                    assert torch.equal(replica.state.anchor, torch.zeros(LENGTH))
            await anyio.sleep(300)
            tasks.cancel_scope.cancel()
        followers = [replica for replica in (a, c) if replica.group.gathering.must_follow.is_set()]
        assert len(followers) <= 1  # the one whose last message did not come
        assert max(a.state.outer_step, c.state.outer_step) >= 2
        if not followers:
            assert torch.equal(a.state.anchor, c.state.anchor)

    play(scenario)


def test_a_member_that_is_gone_before_it_sends_ends_the_round_soon() -> None:
    """It has all that A sends, and nobody would tell A for a minute."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)

        async def never(*_: object) -> None:
            await anyio.sleep(3)
            network.kill(B)
            await anyio.sleep_forever()

        b.group.line.send = never  # type: ignore[method-assign]
        await for_seconds(DUE_SECONDS + 15, a, b)
        (outcome,) = a.outcomes
        assert isinstance(outcome, Abandoned)
        assert "gone" in outcome.reason
        assert outcome.is_soon_again

    play(scenario)


def test_a_member_whose_connection_was_closed_and_that_still_works_is_waited_for() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        send = b.group.line.send

        async def late(*message: Any) -> None:
            await anyio.sleep(20)
            await send(*message)

        b.group.line.send = late  # type: ignore[method-assign]
        a.absent.add(B)
        await for_seconds(DUE_SECONDS + 60, a, b)
        assert isinstance(a.outcomes[0], Agreed)
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_when_the_caller_is_gone_another_one_calls() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        replicas = [SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C))]
        own = replicas[0].standing()
        caller = turn_order(STAGE, own, [A, B, C])[0]
        left = [replica for replica in replicas if replica.name != caller]
        for replica, other in zip(left, reversed(left), strict=True):
            replica.known = partial(list, [caller, other.name])  # the membership has not noticed
        network.kill(caller)
        await for_seconds(DUE_SECONDS + 60, *left)
        assert left[0].outcomes
        assert torch.equal(left[0].state.anchor, left[1].state.anchor)

    play(scenario)


def test_a_replica_without_work_does_not_keep_the_other_from_its_rounds() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2, is_idle=True)
        await for_seconds(6 * DUE_SECONDS, a, b)
        assert a.group.gathering.is_alone  # a round of its own is in order
        assert not a.outcomes
        b.is_idle = False
        await for_seconds(3 * DUE_SECONDS, a, b)
        assert a.outcomes
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_a_replica_that_is_only_starting_is_waited_for() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2, is_idle=True)
        a.may_be_alone = True
        await for_seconds(DUE_SECONDS + 5, a, b)
        b.is_idle = False
        await for_seconds(2 * DUE_SECONDS, a, b)
        assert {outcome.members for outcome in a.outcomes if isinstance(outcome, Agreed)} == {2}
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_a_replica_that_may_not_take_part_is_waited_for_and_then_left_out() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = (SimulatedReplica(name, network, seed) for seed, name in enumerate((A, B, C)))
        c.group.gathering.may_take_part = lambda: False
        await for_seconds(DUE_SECONDS + 25, a, b, c)
        assert not a.outcomes
        await for_seconds(20, a, b, c)
        (agreed,) = a.outcomes
        assert isinstance(agreed, Agreed)
        assert agreed.members == 2
        assert c.state.outer_step == 0

    play(scenario)


def test_who_withdraws_is_no_reason_to_wait_long() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.live)
            b.is_reluctant = True
            tasks.start_soon(b.live)
            await anyio.sleep(DUE_SECONDS + 40)
            assert isinstance(a.outcomes[0], Abandoned)
            assert a.sequences == 2 * a.steps  # all of the work is still to be contributed
            b.is_reluctant = False
            await anyio.sleep(60)
            tasks.cancel_scope.cancel()
        assert isinstance(a.outcomes[-1], Agreed)
        assert torch.equal(a.state.anchor, b.state.anchor)

    play(scenario)


def test_parts_of_strangers_and_of_other_rounds_are_refused() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        stranger = network.join(C)
        line, name = a.group.line, "ab" * 32
        line.open(name, frozenset({B}), {"x": 10})

        async def part(**changes: WireValue) -> None:
            fields: dict[str, WireValue] = {"round": name, "message": "x", "total": 4, "start": 0, **changes}
            tensor = TensorPart(TensorSpec("part", "uint8", (4,)), b"1234")
            header = request_about("round/part", STAGE, **fields).header
            await stranger.request(A, Frame("round/part", header, (tensor,)), timeout_seconds=60)

        with pytest.raises(PeerRefusedError, match="no message of the round"):
            await part()
        with pytest.raises(PeerRefusedError, match="not in such a round"):
            await part(round="cd" * 32)
        line.open(name, frozenset({C}), {"x": 10})
        for wrong in ({"total": 11}, {"message": "y"}, {"total": 10**14}):
            with pytest.raises(PeerRefusedError, match="no message of the round"):
                await part(**wrong)
        for wrong in ({"start": 2}, {"total": 3}):
            with pytest.raises(PeerRefusedError, match="does not follow"):
                await part(**wrong)
        await part()
        with pytest.raises(PeerRefusedError, match="does not follow"):
            await part()  # each message once
        assert (await line.receive("x")).payload == b"1234"
        line.close()
        assert b.group.line.stage == STAGE

    play(scenario)


def test_who_is_no_replica_waits_for_no_round_and_nobody_twice() -> None:
    """Sixteen parts at a time may wait for a round that is agreed on elsewhere: not those of strangers."""

    async def scenario(network: InMemoryNetwork) -> None:
        a, c = SimulatedReplica(A, network, 1), network.join(C)
        began = anyio.current_time()

        async def part() -> None:
            tensor = TensorPart(TensorSpec("part", "uint8", (4,)), b"1234")
            header = request_about("round/part", STAGE, round="ab" * 32, message="x", total=4, start=0).header
            await c.request(A, Frame("round/part", header, (tensor,)), timeout_seconds=60)

        async def early() -> None:
            with pytest.raises(PeerRefusedError, match="not in such a round"):
                await part()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(early)
            await anyio.sleep(1)
            with pytest.raises(PeerRefusedError, match="Another part waits"):
                await part()
            assert anyio.current_time() == began + 1
        a.known = lambda: [B]
        began = anyio.current_time()
        call = Call(0, a.standing().root, 0, (C, A), CallStep.ASK)
        with pytest.raises(PeerRefusedError, match="at work on these layers"):
            await c.request(A, call_frame(STAGE, call), timeout_seconds=60)
        with pytest.raises(PeerRefusedError, match="at work on these layers"):
            await part()
        assert anyio.current_time() == began

    play(scenario)


def test_long_messages_travel_in_parts() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = SimulatedReplica(A, network, 1), SimulatedReplica(B, network, 2)
        message = bytes(range(256)) * (PART_BYTES // 100)
        for line, other in ((a.group.line, B), (b.group.line, A)):
            line.open("ab" * 32, frozenset({other}), {"x": len(message), "empty": 0})
        await a.group.line.send(B, "x", message)
        await a.group.line.send(B, "empty", b"")
        assert (await b.group.line.receive("x")).payload == message
        assert (await b.group.line.receive("empty")).payload == b""

    play(scenario)
