"""Every contributor compares its own norm with the reducers', bit for bit: false statistics of others are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from neuroshard.aggregation import MemberFacts, TrimmedMean
from neuroshard.compression import Codec, Fp32Codec, Int4Codec, Int8Codec, make_codec
from neuroshard.consensus.all_reduce import ANSWER_SECONDS
from neuroshard.consensus.effects import CompareNorms, MakeStatistics
from neuroshard.consensus.round_messages import Value
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import SlicePlan, draw
from neuroshard.types import NodeId
from tests.worlds.rounds import TIMING, World

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
SLICES = 16


def world_of(names: str, *, is_open: bool = False, seed: int = 1) -> World:
    work = RoundWork(SlicePlan(SLICES * 4096), Int4Codec(), TrimmedMean(0.1))
    return World(names, seed=seed, is_open=is_open, work=work)


def false_norm(row: int, count: int, only: int | None = None) -> Callable[[int, bytes], bytes]:
    """The last bit of the norm of one contribution is another one, in one slice or in all."""

    def broken(index: int, made: bytes) -> bytes:
        data = bytearray(made)
        data[count + 8 * row] ^= only in (None, index)
        return bytes(data)

    return broken


def value_at(world: World, node: NodeId) -> Value:
    tip = world.nodes[node].chain.tip
    assert tip is not None
    return tip.value


@pytest.mark.parametrize("victim", ["a", "c", "d"])
def test_friends_find_false_statistics_of_one_reducer_by_their_own_norms(victim: str) -> None:
    """Nobody else computes these statistics, and the blocks of an audit do not show them."""
    world, healthy = world_of("abcd"), world_of("acd")
    world.broken_statistics[B] = false_norm("abcd".index(victim), 4)
    for one in (world, healthy):
        one.start_all()
        assert one.settle()
    assert world.now < TIMING.redo_seconds
    assert value_at(world, A).aggregate == value_at(healthy, A).aggregate  # the next view is without that reducer
    for name in "acd":
        accused = world.nodes[NodeId(name)].accused
        assert {one.node for one in accused} == {"b"}
        assert not any(one.is_malice for one in accused)
        assert world.nodes[NodeId(name)].failed is None
    world.check_safety()


def test_a_friend_without_a_seat_finds_them_too() -> None:
    world = world_of("abc")
    world.add("z", A)
    world.broken_statistics[B] = false_norm(3, 4)
    world.start_all()
    assert world.settle()
    assert world.now < TIMING.redo_seconds
    assert [member.node_id for member in value_at(world, A).members] == ["a", "c", "z"]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_member_that_mistakes_its_own_norm_costs_two_slices_and_accuses_nobody(is_open: bool) -> None:
    world = world_of("abcd", is_open=is_open)
    world.doubts_norms = {C}
    world.start_all()
    assert world.settle()
    assert world.now == 0
    assert not any(one.accused for one in world.nodes.values())
    assert len(value_at(world, A).accepted) == 4


def test_a_friend_whose_bad_memory_contradicts_an_honest_reducer_delays_nobody() -> None:
    world = world_of("abcd")
    world.doubts_norms = {C}
    world.broken_statistics[C] = false_norm(2, 4)  # of its own contribution, where it reduces and where it checks
    world.broken_statistics[C] = lambda index, made: made if C in reducers(world, index) else false_norm(2, 4)(0, made)
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[NodeId(name)].done for name in "abd"))
    assert world.now < ANSWER_SECONDS + 2
    assert len(value_at(world, A).accepted) == 4
    assert {one.node for name in "abd" for one in world.nodes[NodeId(name)].accused} <= {"c"}


def reducers(world: World, index: int) -> tuple[NodeId, ...]:
    exchange = next(iter(world.nodes[A].machines.values()))._exchange  # pyright: ignore[reportPrivateUsage]
    assert exchange is not None
    return exchange._slices[index].reducers  # pyright: ignore[reportPrivateUsage]


def test_two_friends_that_contradict_each_other_lose_one_view() -> None:
    """No quorum says which of them is right, and the third is away."""
    world = world_of("abc")
    world.calls_the_living = True
    world.kill(C)
    world.broken_statistics[B] = false_norm(0, 2)
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[name].done for name in (A, B)))
    assert TIMING.view_seconds <= world.now < 2 * TIMING.view_seconds
    assert len(value_at(world, A).members) == 2


@pytest.mark.parametrize("seed", range(5))
def test_among_strangers_the_victim_finds_two_reducers_that_lie_together(seed: int) -> None:
    """A secret check finds them only if a seat has chosen this slice."""
    names = "abcdefg"
    world = world_of(names, is_open=True, seed=seed)
    liars = draw(world.plan, list(world.nodes), world.nodes[A].chain.ledger.seed, 2)[0]
    victim = next(name for name in names if name not in liars)
    world.broken_statistics = dict.fromkeys(liars, false_norm(names.index(victim), len(names), only=0))
    honest = [name for name in world.nodes if name not in liars]
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[name].done for name in honest))
    assert not {member.node_id for member in value_at(world, honest[0]).members} & {*liars}
    assert all(
        one.failed is not None and {*one.failed.wrong} == {*liars} for one in map(world.nodes.get, honest) if one
    )
    world.check_safety(liars)


@pytest.mark.parametrize(
    "codec", [Fp32Codec(), Int8Codec(), Int4Codec(), make_codec("topk")], ids=lambda codec: codec.name
)
def test_a_norm_is_the_same_next_to_any_other_rows(codec: Codec) -> None:
    work = RoundWork(SlicePlan(5 * 4096 + 100), codec, TrimmedMean(0.1))
    vectors = [torch.randn(work.plan.length, generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
    parts = [work.encoded(vector) for vector in vectors]
    for count in (1, 2, 5, 9):
        members = MemberFacts.of_equals(count)
        rows = {index: [part[index] for part in parts[:count]] for index in range(work.plan.count)}
        statistics = work.statistics(MakeStatistics("0" * 64, rows, members))
        for row in range(count):
            own = dict(enumerate(parts[row]))
            assert work.norms_compared(CompareNorms("0" * 64, row, own, statistics, members)) == frozenset()
            false = {**statistics, 1: false_norm(row, count)(1, statistics[1])}
            if count < 8:  # from eight members on, the Gram matrix contains the norms as well
                assert work.norms_compared(CompareNorms("0" * 64, row, own, false, members)) == {1}
