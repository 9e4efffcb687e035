from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import anyio
import pytest
import torch
import trio
from trio.testing import MockClock

from neuroshard.aggregation import (
    AggregatorConfig,
    CentredClipping,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Refusal,
    TrimmedMean,
)
from neuroshard.compression import Fp32Codec
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.swarm.frames import contribution_frame, root_frame
from neuroshard.swarm.group import Group, RoundDescriptor, round_id
from neuroshard.swarm.outcome import Aborted, AbortKind, Completed, RoundOutcome
from neuroshard.swarm.round import CONTRIBUTION_KIND, ROOT_KIND, NobodyElse, run_round
from neuroshard.types import NodeId, RunId
from tests.swarm.round_post import RoundPost

DESCRIPTOR = RoundDescriptor(RunId("ab" * 32), 0, 3, "fp32", "trimmed_mean(0.1)", "cd" * 32)
DEADLINE = 60.0
_Value = TypeVar("_Value")


async def at_once(function: Callable[[], _Value], /) -> _Value:
    return function()


def contributions(count: int, length: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(length, generator=generator)
    return [common + torch.randn(length, generator=generator) for _ in range(count)]


@dataclass
class Swarm:
    """Members of one round on one network; `outcomes` by member."""

    vectors: list[torch.Tensor]
    network: InMemoryNetwork = field(default_factory=InMemoryNetwork)
    outcomes: dict[NodeId, RoundOutcome] = field(default_factory=dict)
    aggregators: dict[NodeId, AggregatorConfig] = field(default_factory=dict)
    descriptors: dict[NodeId, RoundDescriptor] = field(default_factory=dict)
    silent: frozenset[NodeId] = frozenset()
    posts: dict[NodeId, RoundPost] = field(default_factory=dict)
    trouble: Callable[[], Awaitable[None]] | None = None

    @property
    def members(self) -> tuple[NodeId, ...]:
        return tuple(NodeId(f"node-{i}") for i in range(len(self.vectors)))

    def run(self) -> list[RoundOutcome]:
        """The outcomes in the members' order, under a virtual clock."""
        trio.run(self._run, clock=MockClock(autojump_threshold=0))
        return [self.outcomes[member] for member in self.members if member not in self.silent]

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for member, vector in zip(self.members, self.vectors, strict=True):
                post = self.posts[member] = RoundPost(self.network, member)
                if member not in self.silent:
                    tasks.start_soon(self._member, post, member, vector)
            if self.trouble is not None:
                tasks.start_soon(self.trouble)
        self.network.close()  # members join anew for the next round

    async def _member(self, post: RoundPost, member: NodeId, vector: torch.Tensor) -> None:
        self.outcomes[member] = await run_round(
            post,
            self.descriptors.get(member, DESCRIPTOR),
            Group(self.members, member),
            vector,
            aggregator=self.aggregators.get(member, TrimmedMean()),
            codec=Fp32Codec(),
            deadline_seconds=DEADLINE,
            offload=at_once,
        )


def completed(outcome: RoundOutcome) -> Completed:
    assert isinstance(outcome, Completed), outcome
    return outcome


def aborted(outcome: RoundOutcome) -> Aborted:
    assert isinstance(outcome, Aborted), outcome
    return outcome


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("config", [TrimmedMean(), Median(), Mean(), CentredClipping()], ids=str)
def test_all_members_end_with_the_same_bytes(count: int, config: AggregatorConfig) -> None:
    swarm = Swarm(contributions(count))
    swarm.aggregators = dict.fromkeys(swarm.members, config)
    outcomes = [completed(outcome) for outcome in swarm.run()]
    assert len(outcomes) == count
    assert len({outcome.root for outcome in outcomes}) == 1
    assert len({outcome.aggregate.numpy().tobytes() for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome.members == outcome.accepted == swarm.members
        assert outcome.refused == ()
        assert outcome.robust == (count >= 3)


def test_a_group_of_one_gets_its_own_contribution_back_without_a_copy() -> None:
    (vector,) = contributions(1)
    (outcome,) = Swarm([vector]).run()
    assert completed(outcome).aggregate.data_ptr() == vector.data_ptr()


def test_two_members_get_their_mean() -> None:
    outcomes = Swarm([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]).run()
    assert completed(outcomes[0]).aggregate.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("config", [Krum(), MultiKrum()], ids=str)
def test_a_group_too_small_for_krum_aborts_and_says_so(config: AggregatorConfig) -> None:
    for count, complete in ((1, True), (2, False), (3, True)):
        swarm = Swarm(contributions(count))
        swarm.aggregators = dict.fromkeys(swarm.members, config)
        for outcome in swarm.run():
            assert isinstance(outcome, Completed) == complete
            assert complete or "needs 3 contributions, and there are 2" in aborted(outcome).reason


def test_the_round_works_in_threads_and_under_asyncio() -> None:
    async def scenario() -> None:
        me = NodeId("me")
        outcome = await run_round(
            NobodyElse(),
            DESCRIPTOR,
            Group.alone(me),
            torch.ones(3),
            aggregator=Mean(),
            codec=Fp32Codec(),
            deadline_seconds=DEADLINE,
        )
        assert completed(outcome).aggregate.tolist() == [1, 1, 1]

    for backend in ("trio", "asyncio"):
        anyio.run(scenario, backend=backend)


def test_a_refused_member_is_named_by_everybody_and_the_rest_completes() -> None:
    vectors = contributions(5)
    vectors[3] = -100 * vectors[3]
    for outcome in Swarm(vectors).run():
        (refused,) = completed(outcome).refused
        assert (refused.member, refused.reason) == ("node-3", Refusal.NORM)
        assert "node-3" not in completed(outcome).accepted


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_zero_contribution_aborts_a_small_group(count: int) -> None:
    vectors = contributions(count)
    vectors[0] = torch.zeros_like(vectors[0])
    for outcome in Swarm(vectors).run():
        assert aborted(outcome).kind is AbortKind.REFUSED
        assert "refused" in aborted(outcome).reason or "zero" in aborted(outcome).reason


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_not_finite_stays_at_home(count: int) -> None:
    vectors = contributions(count)
    vectors[0][7] = math.nan
    first, *others = Swarm(vectors).run()
    assert aborted(first).kind is AbortKind.REFUSED
    assert "not finite" in aborted(first).reason
    assert all(aborted(outcome).kind is AbortKind.DEADLINE for outcome in others)


def test_an_abort_changes_nothing() -> None:
    vectors = contributions(3)
    before = [vector.clone() for vector in vectors]
    swarm = Swarm(vectors, silent=frozenset({NodeId("node-1")}))
    for outcome in swarm.run():
        assert aborted(outcome).kind is AbortKind.DEADLINE
        assert "60 s" in aborted(outcome).reason
    assert all(torch.equal(a, b) for a, b in zip(before, vectors, strict=True))


def test_slow_links_complete_and_too_slow_ones_abort() -> None:
    for delay, kind in ((10.0, Completed), (70.0, Aborted)):
        swarm = Swarm(contributions(3))
        for other in swarm.members[1:]:
            swarm.network.set_link(swarm.members[0], other, Link(delay_seconds=delay))
        assert {type(outcome) for outcome in swarm.run()} == {kind}


def test_a_partition_aborts_both_sides() -> None:
    swarm = Swarm(contributions(5))
    swarm.network.partition(swarm.members[:2], swarm.members[2:])
    assert {aborted(outcome).kind for outcome in swarm.run()} == {AbortKind.DEADLINE}


def test_a_member_that_dies_aborts_the_round() -> None:
    swarm = Swarm(contributions(3))
    victim = swarm.members[2]
    for other in swarm.members[:2]:
        swarm.network.set_link(other, victim, Link(delay_seconds=5))

    async def die() -> None:
        await anyio.sleep(1)
        swarm.posts[victim].close()

    swarm.trouble = die
    assert {aborted(outcome).kind for outcome in swarm.run()} == {AbortKind.UNREACHABLE}


def test_members_that_compute_differently_disagree_and_abort() -> None:
    swarm = Swarm(contributions(3))
    swarm.aggregators[swarm.members[1]] = Mean()
    assert {aborted(outcome).kind for outcome in swarm.run()} == {AbortKind.DISAGREEMENT}


def test_different_descriptors_do_not_mix() -> None:
    swarm = Swarm(contributions(2))
    swarm.descriptors[swarm.members[0]] = replace(DESCRIPTOR, outer_step=4)
    assert {aborted(outcome).kind for outcome in swarm.run()} == {AbortKind.DEADLINE}


def with_messages(frames: list[tuple[str, bytes]], sender: str = "node-1") -> RoundOutcome:
    """The outcome of node-0 when `sender` sends these frames and then falls silent."""
    swarm = Swarm(contributions(2), silent=frozenset({NodeId("node-1")}))

    async def talk() -> None:
        post = swarm.posts.get(NodeId(sender)) or RoundPost(swarm.network, NodeId(sender))
        for kind, frame in frames:
            await post.send(NodeId("node-0"), kind, frame)

    swarm.trouble = talk
    return swarm.run()[0]


ROUND = round_id(DESCRIPTOR, Group((NodeId("node-0"), NodeId("node-1")), NodeId("node-0")))
GOOD = Fp32Codec().encode(contributions(2)[1])


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (contribution_frame(ROUND, GOOD[:-4]), "not an fp32 vector"),
        (contribution_frame(ROUND, GOOD + bytes(4)), "longer than"),
        (contribution_frame(ROUND, GOOD)[:-1] + b"\xff", "does not match its hash"),
        (ROUND, "does not match its hash"),
    ],
    ids=["short", "long", "damaged", "empty"],
)
def test_a_malformed_contribution_aborts_and_names_the_sender(frame: bytes, words: str) -> None:
    outcome = aborted(with_messages([(CONTRIBUTION_KIND, frame)]))
    assert outcome.kind is AbortKind.MALFORMED
    assert words in outcome.reason
    assert "node-1" in outcome.reason


def test_a_malformed_or_wrong_root_aborts() -> None:
    good = (CONTRIBUTION_KIND, contribution_frame(ROUND, GOOD))
    short = with_messages([good, (ROOT_KIND, root_frame(ROUND, bytes(31)))])
    wrong = with_messages([good, (ROOT_KIND, root_frame(ROUND, bytes(32)))])
    assert aborted(short).kind is AbortKind.MALFORMED
    assert aborted(wrong).kind is AbortKind.DISAGREEMENT


def test_strangers_and_other_rounds_are_not_heard() -> None:
    frame = contribution_frame(ROUND, GOOD)
    other_round = contribution_frame(bytes(32), GOOD)
    assert aborted(with_messages([(CONTRIBUTION_KIND, frame)], sender="mallory")).kind is AbortKind.DEADLINE
    assert aborted(with_messages([(CONTRIBUTION_KIND, other_round)] * 5)).kind is AbortKind.DEADLINE


def test_one_peer_that_sends_five_times_counts_once() -> None:
    vectors = contributions(3)
    swarm = Swarm(vectors)
    the_round = round_id(DESCRIPTOR, Group(swarm.members, swarm.members[0]))
    loud = contribution_frame(the_round, Fp32Codec().encode(vectors[2]))

    async def repeat() -> None:
        for _ in range(5):
            for other in swarm.members[:2]:
                await swarm.posts[swarm.members[2]].send(other, CONTRIBUTION_KIND, loud)

    swarm.trouble = repeat
    plain = completed(Swarm(vectors).run()[0])
    assert {completed(outcome).root for outcome in swarm.run()} == {plain.root}


def test_a_closed_messenger_is_an_outcome() -> None:
    swarm = Swarm(contributions(2), silent=frozenset({NodeId("node-1")}))

    async def close() -> None:
        await anyio.lowlevel.checkpoint()
        swarm.posts[NodeId("node-0")].close()

    swarm.trouble = close
    assert aborted(swarm.run()[0]).kind is AbortKind.UNREACHABLE


def test_several_rounds_follow_one_another_and_an_abandoned_one_leaves_no_trace() -> None:
    swarm = Swarm(contributions(3))
    swarm.network.partition(swarm.members[:1], swarm.members[1:])
    assert all(isinstance(outcome, Aborted) for outcome in swarm.run())
    swarm.network.partition()
    for step in range(3):
        swarm.descriptors = dict.fromkeys(swarm.members, replace(DESCRIPTOR, outer_step=step, view=1))
        assert len({completed(outcome).root for outcome in swarm.run()}) == 1


@pytest.mark.parametrize("vector", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64)], ids=["matrix", "float64"])
def test_wrong_calls_are_errors(vector: torch.Tensor) -> None:
    me = NodeId("me")
    call = partial(run_round, NobodyElse(), DESCRIPTOR, Group.alone(me), aggregator=Mean())

    async def scenario() -> None:
        with pytest.raises(ValueError, match="fp32 CPU vector"):
            await call(vector, codec=Fp32Codec(), deadline_seconds=1)

    trio.run(scenario)
