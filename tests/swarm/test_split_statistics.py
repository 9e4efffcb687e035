"""Two reducers that show two halves of the committee different statistics of a slice: they cost one view."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import pytest
from msgspec import structs

from neuroshard.aggregation import TrimmedMean
from neuroshard.aggregation.slice_statistics import read_statistics, statistics_bytes
from neuroshard.compression import Int8Codec
from neuroshard.consensus.all_reduce import AllReduce
from neuroshard.consensus.effects import Effect, Judge, Reduce, Say
from neuroshard.consensus.round_messages import ResultDigests, ResultSaid, StatementSaid, StatisticsDigests
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import SlicePlan, digest_of, draw
from neuroshard.consensus.vote_log import InMemoryVoteLog
from neuroshard.network import InMemoryNetwork
from neuroshard.types import NodeId
from tests.swarm.test_round_audits import colluders, lies_about_first_slice, truth_of, value_at
from tests.worlds.replicas import DUE_SECONDS, IDENTITIES, NAMES, SimulatedReplica, for_seconds, play
from tests.worlds.rounds import TIMING, Liar, Twist, World

SEVEN = [NodeId(name) for name in "abcdefg"]


def exchange_of(one: Liar) -> AllReduce:
    (machine,) = one.machines.values()
    return cast("AllReduce", machine._exchange)  # pyright: ignore[reportPrivateUsage]


def false_dot_products(true: bytes, members: int) -> bytes:
    """No norm is false, so no contributor notices anything."""
    known = read_statistics(true, members, with_gram=False)
    return statistics_bytes(replace(known, center_dots=(*known.center_dots[:-1], -1e7)))


def with_false_statistics(one: Liar, said: StatementSaid) -> StatementSaid:
    """The liar's signed statement with other statistics of the first slice."""
    lies = dict(said.statistics)
    lies[0] = false_dot_products(bytes(lies[0]), len(exchange_of(one).members))
    digests = tuple((index, digest_of(made).hex()) for index, made in sorted(lies.items()))
    return StatementSaid(one.signed(StatisticsDigests(said.signed.body.round_id, digests)), lies)


def shows_two_faces(world: World, deceived: frozenset[NodeId]) -> Twist:
    """The deceived see other dot products of the first slice, with the results that follow from them."""

    def lie(one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, StatementSaid(statistics=statistics) as said) if 0 in statistics:
                return [Say(to - deceived, said), Say(to & deceived, with_false_statistics(one, said))]
            case Say(to, ResultSaid(signed, slices)):
                exchange = exchange_of(one)
                judged_on = exchange._judged_on  # pyright: ignore[reportPrivateUsage]
                statistics = [bytes(judged_on[index]) for index in range(world.plan.count)]
                statistics[0] = false_dot_products(statistics[0], len(exchange.members))
                work = cast("RoundWork", world.work)
                reduction = work.judged(Judge(exchange.round_id, statistics, exchange.facts)).reduction
                assert reduction is not None
                own = exchange._slices  # pyright: ignore[reportPrivateUsage]
                order = [member.node_id for member in exchange.members]
                rows = {index: tuple(own[index].parts[node] for node in order) for index, _ in signed.body.digests}
                made = work.reduced(Reduce(exchange.round_id, rows, reduction))
                digests = tuple((index, digest_of(result).hex()) for index, result in sorted(made.items()))
                body = ResultDigests(exchange.round_id, digests, digest_of(b"".join(statistics)).hex())
                said = ResultSaid(one.signed(body), {index: made[index] for index in slices})
                return [Say(to - deceived, effect.message), Say(to & deceived, said)]
            case _:
                return [effect]

    return lie


@pytest.mark.parametrize("deceived", [1, 2, 3])
def test_different_statistics_for_two_halves_cost_one_view_and_no_honest_name(deceived: int) -> None:
    world = World(SEVEN, seed=1, is_open=True, work=RoundWork(SlicePlan(8 * 4096), Int8Codec(), TrimmedMean(0.1)))
    liars = colluders(world)
    honest = [name for name in SEVEN if name not in liars]
    world.twist = dict.fromkeys(liars, shows_two_faces(world, frozenset(honest[-deceived:])))
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[name].done for name in honest))
    assert world.now < TIMING.redo_seconds
    world.check_safety(liars)
    named = Counter[NodeId]()
    for name in honest:
        one = world.nodes[name]
        assert {each.node for each in one.accused} <= liars
        assert all(len(each.proof) == 2 for each in one.accused if "has signed two" in each.what)
        assert one.failed is not None
        assert set(one.failed.wrong) <= liars
        named.update(one.failed.wrong)
    assert max(named.values()) == len(honest)  # a quorum bars it; the other one is seen next time


def test_false_words_about_the_statistics_bar_their_author_only() -> None:
    """Its results are true. Nobody else has seen what it says that it has judged on."""
    liar = NodeId("d")

    def lie(one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ResultSaid(signed, slices)):
                return [Say(to, ResultSaid(one.signed(structs.replace(signed.body, basis="e" * 64)), slices))]
            case _:
                return [effect]

    world = World(SEVEN, seed=2, is_open=True, plan=SlicePlan(8 * 4096))
    world.twist = {liar: lie}
    world.start_all()
    honest = [name for name in SEVEN if name != liar]
    assert world.settle(until=lambda: all(world.nodes[name].done for name in honest))
    assert world.now < TIMING.redo_seconds
    for name in honest:
        assert value_at(world, name).aggregate == truth_of(world, value_at(world, name))
        assert not world.nodes[name].accused
        failed = world.nodes[name].failed
        assert failed is not None
        assert failed.wrong == (liar,)


@pytest.mark.parametrize("seed", range(4))
def test_false_results_are_found_whatever_their_authors_say_about_the_statistics(seed: int) -> None:
    """A seat that has found one false result checks all slices of the two reducers, as without their excuse."""
    world = World(SEVEN, seed=seed, is_open=True, plan=SlicePlan(4096))
    liars = frozenset(draw(world.plan, SEVEN, next(iter(world.nodes.values())).chain.ledger.seed, 2)[0])
    twist = lies_about_first_slice(liars)

    def lie(one: Liar, effect: Effect) -> list[Effect]:
        lies = list[Effect]()
        for each in twist[one.member.node_id](one, effect):
            match each:
                case Say(to, ResultSaid(signed, slices)):
                    body = structs.replace(signed.body, basis="e" * 64)
                    lies.append(Say(to, ResultSaid(one.signed(body), slices)))
                case _:
                    lies.append(each)
        return lies

    world.twist = dict.fromkeys(liars, lie)
    world.start_all()
    honest = [name for name in SEVEN if name not in liars]
    assert world.settle(until=lambda: all(world.nodes[name].done for name in honest))
    world.check_safety(liars)
    for name in honest:
        assert value_at(world, name).aggregate == truth_of(world, value_at(world, name))


def test_a_liar_hides_nothing_by_the_revocation_of_its_node() -> None:
    """The revocation arrives before the others show each other what it has signed."""

    async def scenario(network: InMemoryNetwork) -> None:
        names = NAMES[:7]
        replicas = [SimulatedReplica(name, network, seed, seats=names, is_open=True) for seed, name in enumerate(names)]
        liars, shown = set[NodeId](), list[NodeId]()

        def lie(one: Liar, effect: Effect) -> list[Effect]:
            (machine,) = one.machines.values()
            match effect:
                case Say(to, StatementSaid() as said) if machine.setting.step.number == 0:
                    author = said.signed.member.node_id
                    if author == one.member.node_id and said.statistics and not shown:
                        liars.add(author)
                        deceived = frozenset({max(to - {*exchange_of(one)._slices[0].reducers})})  # pyright: ignore[reportPrivateUsage]
                        return [Say(to - deceived, said), Say(deceived, with_false_statistics(one, said))]
                    if author != one.member.node_id:
                        shown.append(author)
                        for each in replicas:
                            each.revoked = frozenset((IDENTITIES[name].wallet_id, name) for name in liars)
                case _:
                    pass
            return [effect]

        for each in replicas:
            each.lie = lie
        await for_seconds(2 * DUE_SECONDS, *replicas)
        assert len(liars) == 2  # of seven seats, two may lie
        assert liars <= set(shown)
        for each in replicas:
            book = cast("InMemoryVoteLog", each.book)
            proven = {one.node for one in book.proofs if "has signed two" in one.what and len(one.proof) == 2}
            assert proven == liars or each.name in liars

    play(scenario)
