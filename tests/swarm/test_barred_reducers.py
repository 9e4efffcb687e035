"""Reducers that fail reduce nothing for some steps, by the word of a quorum: what liars can make of this rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from msgspec import structs

from neuroshard.consensus.chain import ChainLedger
from neuroshard.consensus.committee import SILENT_STEPS, WRONG_STEPS, Barred
from neuroshard.consensus.effects import Effect, FailedReducers, Say
from neuroshard.consensus.round_messages import (
    ContributionSent,
    Phase,
    ResultSaid,
    StatementSaid,
    Vote,
    VoteSaid,
)
from neuroshard.consensus.slices import SlicePlan, draw
from neuroshard.types import NodeId
from tests.swarm.test_round_audits import lies_about_first_slice, silent, truth_of
from tests.worlds.rounds import TIMING, Envelope, Liar, Twist, World, anything, wrong_results, wrong_statistics

B = NodeId("b")
COMMITTEES = [("abcd", False), ("abcd", True), ("abcdefg", True)]  # F is 0, 1 and 2
SLICES = 16


def world_of(names: Iterable[str], *, is_open: bool, seed: int = 1, slices: int = SLICES) -> World:
    return World(names, seed=seed, is_open=is_open, plan=SlicePlan(slices * 4096))


def make_step(world: World, slow: Iterable[NodeId] = ()) -> float:
    """Let all nodes but the slow ones complete their next step, and the slow ones hear of it. Returns its seconds."""
    awaited = [node for node in world.nodes.values() if node.is_alive and node.member.node_id not in set(slow)]
    number, began = max(len(node.done) for node in awaited) + 1, world.now
    world.start_all()
    assert world.settle(until=lambda: all(len(node.done) >= number for node in awaited))
    while world.pending:
        world.deliver(0)
    return world.now - began


def barred_at(world: World, node: str) -> dict[str, int]:
    return {one.node_id: one.until for one in world.nodes[NodeId(node)].chain.ledger.barred}


def reducing_in(world: World, number: int) -> set[str]:
    """Who reduces in a step: all members deal the slices to the same nodes."""
    (nodes,) = world.deals[number]
    return {*nodes}


def restart(world: World, node: NodeId) -> None:
    """Its disk survives; it enters the next step with the others."""
    world.kill(node)
    world.nodes[node].is_alive = True


@pytest.mark.parametrize(("names", "is_open"), [("ab", False), ("abc", False), *COMMITTEES])
def test_a_silent_reducer_costs_two_steps_and_is_then_dealt_no_slices(names: str, is_open: bool) -> None:
    world = world_of(names, is_open=is_open)
    world.twist = {B: silent}
    received = list[int]()
    for number in range(6):  # what the seats have seen in a step is signed in the next one
        world.received.clear()
        seconds = make_step(world, {B})
        received.append(world.received[B])
        assert (seconds >= TIMING.redo_seconds) == (number < 2)
        assert reducing_in(world, number) == {*names} - ({"b"} if number >= 2 else set())
    assert max(received[2:]) < min(received[:2]) or len(names) == 2
    assert len(world.nodes[NodeId("a")].chain.tip.value.accepted) == len(names)  # type: ignore[union-attr]
    world.check_safety()


@pytest.mark.parametrize(("names", "is_open"), COMMITTEES)
def test_a_reducer_that_works_again_reduces_again_after_its_penalty(names: str, is_open: bool) -> None:
    world = world_of(names, is_open=is_open)
    world.twist = {B: silent}
    for _ in range(2):
        make_step(world, {B})
    world.twist = {}
    assert barred_at(world, "a") == {"b": 2 + SILENT_STEPS}
    until = 3 + SILENT_STEPS  # the seats sign next that it was silent in the second step, too
    for number in range(2, until + 2):
        assert make_step(world) == 0
        assert reducing_in(world, number) == {*names} - ({"b"} if number < until else set())
    assert all(barred_at(world, name) == {} for name in names)


@pytest.mark.parametrize(("names", "is_open"), COMMITTEES)
def test_a_newcomer_and_a_node_after_a_restart_have_the_same_list(names: str, is_open: bool) -> None:
    world = world_of(names, is_open=is_open)
    founded = world.nodes[NodeId("a")].chain
    world.twist = {B: silent}
    for _ in range(2):
        make_step(world, {B})
    chain = world.nodes[NodeId("c")].chain
    data = msgspec.msgpack.encode(chain.ledger)
    assert msgspec.msgpack.decode(data, type=ChainLedger) == founded.proven(chain.proof()).ledger == chain.ledger
    assert chain.ledger.barred == (Barred(B, 2 + SILENT_STEPS),)
    restart(world, NodeId("c"))
    assert make_step(world, {B}) == 0


def test_what_a_seat_has_seen_before_its_restart_is_lost_and_the_next_steps_show_it_again() -> None:
    world = world_of("abcd", is_open=True)
    world.twist = {B: silent}
    make_step(world, {B})
    restart(world, NodeId("a"))
    make_step(world, {B})
    assert barred_at(world, "c") == {}  # the other two are no quorum
    make_step(world, {B})
    assert set(barred_at(world, "c")) == {"b"}


# Framing


def without(node: NodeId, kind: type[ContributionSent] | type[StatementSaid] | type[ResultSaid]) -> Twist:
    """Messages of a kind go to all but one node."""

    def lie(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, message) if isinstance(message, kind):
                return [Say(to - {node}, message)]
            case _:
                return [effect]

    return lie


@pytest.mark.parametrize("kind", [ContributionSent, StatementSaid])
@pytest.mark.parametrize(("names", "is_open"), COMMITTEES)
def test_a_member_that_sends_one_reducer_nothing_does_not_get_it_barred(
    names: str, is_open: bool, kind: type[ContributionSent] | type[StatementSaid]
) -> None:
    """The victim cannot deliver in time. The seats know, because it has said that it waits for others."""
    world = world_of(names, is_open=is_open)
    world.twist = {NodeId("d"): without(B, kind)}
    is_late = 0
    for _ in range(4):
        is_late += make_step(world, {B}) >= TIMING.redo_seconds
        assert all(barred_at(world, name) == {} for name in names)
    assert is_late == 4  # the lie works: without its own word, the victim would be taken for silent
    world.check_safety([NodeId("d")])


@pytest.mark.parametrize(
    ("names", "is_open", "liars"), [("abcd", True, "d"), ("abcdefg", True, "fg"), ("abc", False, "c")]
)
def test_seats_that_invent_failures_bar_nobody(names: str, is_open: bool, liars: str) -> None:
    world = world_of(names, is_open=is_open)
    others = tuple(NodeId(name) for name in names if name not in liars)
    world.framed = {NodeId(name): FailedReducers("", others, others) for name in liars}
    for _ in range(4):
        assert make_step(world) == 0
        assert all(barred_at(world, name) == {} for name in names)


def test_no_number_of_free_names_bars_a_reducer() -> None:
    world = world_of("abcd", is_open=True)
    for number in range(40):
        world.add(f"free{number:02}", NodeId("a"))
    seats = tuple(NodeId(name) for name in "abcd")
    world.framed = {name: FailedReducers("", seats, seats) for name in world.nodes if name not in seats}
    for _ in range(3):
        make_step(world)
        assert all(one.chain.ledger.barred == () for one in world.nodes.values())


@pytest.mark.parametrize("kind", [ContributionSent, StatementSaid])
def test_a_free_name_that_sends_one_reducer_nothing_does_not_get_it_barred(
    kind: type[ContributionSent] | type[StatementSaid],
) -> None:
    world = world_of("abcd", is_open=True)
    world.add("z", NodeId("a"))
    world.twist = {NodeId("z"): without(B, kind)}
    for _ in range(3):
        make_step(world)
        assert all(one.chain.ledger.barred == () for one in world.nodes.values())


def test_a_reducer_that_gives_up_a_view_because_of_a_free_name_is_not_silent_in_it() -> None:
    """It leaves the view before a member would have to say that it waits. The others do not follow it alone."""
    world = world_of("abcd", is_open=True)
    world.newcomer_seconds = 1.0
    world.add("z", NodeId("a"))
    world.twist = {NodeId("z"): without(B, ContributionSent)}
    assert make_step(world, {B}) >= TIMING.redo_seconds
    make_step(world)
    assert all(one.chain.ledger.barred == () for one in world.nodes.values())


def test_a_reducer_whose_results_are_late_in_a_round_with_a_dispute_is_not_barred() -> None:
    """A liar contradicts others, and the checks that follow take everybody's time: the liar alone pays for it."""

    def late(_one: Liar, effect: Effect) -> list[Effect]:
        return [] if isinstance(effect, Say) and isinstance(effect.message, ResultSaid) else [effect]

    world = world_of("abcdefg", is_open=True)
    world.twist = {B: late, NodeId("d"): wrong_results}
    make_step(world, {B, NodeId("d")})
    world.twist = {}
    make_step(world)
    assert set(barred_at(world, "a")) == {"d"}


@pytest.mark.parametrize(("names", "is_open"), COMMITTEES)
@pytest.mark.parametrize("heard", ["a", "ac"])
def test_a_reducer_that_is_silent_to_some_never_divides_the_others(names: str, is_open: bool, heard: str) -> None:
    """It is barred or not. Either way all have one list, and the step ends with one aggregate."""

    def lie(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, StatementSaid() | ResultSaid() as message):
                return [Say(to & {NodeId(name) for name in heard}, message)]
            case _:
                return [effect]

    world = world_of(names, is_open=is_open)
    world.twist = {B: lie}
    for _ in range(4):
        make_step(world, {B})
        lists = {one.chain.ledger.barred for one in world.nodes.values() if one.member.node_id != B}
        assert len(lists) == 1
        assert {one.node_id for one in lists.pop()} <= {"b"}
    world.check_safety([B])


# False results


@pytest.mark.parametrize("lie", [wrong_results, wrong_statistics])
@pytest.mark.parametrize("names", ["abcd", "abcdefg"])
def test_a_stranger_with_false_results_reduces_nothing_for_a_hundred_steps(names: str, lie: Twist) -> None:
    world = world_of(names, is_open=True)
    world.twist = {B: lie}
    make_step(world, {B})
    world.twist = {}
    make_step(world)
    assert barred_at(world, "a") == {"b": 2 + WRONG_STEPS}
    make_step(world)
    assert reducing_in(world, 2) == {*names} - {"b"}


@pytest.mark.parametrize("lie", [wrong_results, wrong_statistics])
def test_false_results_of_a_friend_are_shown_and_bar_nobody(lie: Twist) -> None:
    world = world_of("abcd", is_open=False)
    world.twist = {B: lie}
    for _ in range(3):
        make_step(world, {B})
        assert all(barred_at(world, name) == {} for name in "acd")


@pytest.mark.parametrize(("names", "liars"), [("abcd", "b"), ("abcdefg", "bc")])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_liars_do_only_liars_are_barred(names: str, liars: str, seed: int) -> None:
    world = world_of(names, is_open=True, seed=seed, slices=3)
    bad = {NodeId(name) for name in liars}
    world.twist = {name: anything(100 * seed + number) for number, name in enumerate(sorted(bad))}
    honest = tuple(NodeId(name) for name in names if name not in liars)
    world.framed = {name: FailedReducers("", honest, honest) for name in bad}
    for _ in range(4):
        make_step(world, bad)
        lists = {world.nodes[name].chain.ledger.barred for name in honest}
        assert len(lists) == 1
        assert {one.node_id for one in lists.pop()} <= bad
    world.check_safety(bad)


@pytest.mark.parametrize("seed", [20, 30, 34])
def test_a_seat_that_finds_a_lie_too_late_is_not_taken_for_the_liar(seed: int) -> None:
    """Two reducers lie together about a slice, and vote for the lie. One seat has checked the slice. When its word
    arrives, the others are locked, so the lie is certified.
    """
    world = world_of("abcdefg", is_open=True, seed=seed, slices=4)
    liars = frozenset(draw(world.plan, list(world.nodes), world.nodes[B].chain.ledger.seed, 2)[0])
    honest = [one for name, one in world.nodes.items() if name not in liars]

    def votes_for_nothing_else(one: Liar, effect: Effect) -> list[Effect]:
        is_vote = isinstance(effect, Say) and isinstance(effect.message, VoteSaid)
        return [] if is_vote else lies_about_first_slice(liars)[one.member.node_id](one, effect)

    world.twist = dict.fromkeys(liars, votes_for_nothing_else)
    world.start_all()
    held = list[Envelope]()
    while world.pending:
        message = world.pending[0].message
        is_late = isinstance(message, ResultSaid) and message.signed.member.node_id not in liars
        if is_late and isinstance(message, ResultSaid) and 0 in dict(message.signed.body.digests):
            held.append(world.pending.pop(0))
        else:
            world.deliver(0)
    (witness,) = {envelope.sender for envelope in held}
    deceived = [one for one in honest if one.member.node_id != witness]
    (record,) = deceived[0].records.values()
    votes = [Vote(record.step_id, 0, phase, record.prepared) for phase in Phase]
    for liar, vote, one in product(sorted(liars), votes, deceived):
        said = VoteSaid(world.nodes[liar].signed(vote))
        world.pending.append(Envelope(liar, one.member.node_id, said))
    while not all(one.records[record.step_id].lock for one in deceived):
        world.deliver(0)
    world.pending[:0] = held
    while world.pending:
        world.deliver(0)
    tip = deceived[0].chain.tip
    assert tip is not None
    assert tip.value.aggregate != truth_of(world, tip.value)
    assert {name for one in honest if one.failed is not None for name in one.failed.wrong} <= liars


# Who reduces when too many are barred


def bar(world: World, nodes: str) -> None:
    """All members have a ledger in which these nodes are barred."""
    for one in world.nodes.values():
        barred = tuple(Barred(NodeId(name), 1 + SILENT_STEPS) for name in nodes)
        one.chain = replace(one.chain, ledger=structs.replace(one.chain.ledger, barred=barred))


@pytest.mark.parametrize(
    ("is_open", "barred", "reducing"),
    [(True, "abc", "abcd"), (True, "ab", "cd"), (False, "abc", "d"), (False, "abcd", "abcd")],
)
def test_if_too_few_members_are_left_all_of_them_reduce(is_open: bool, barred: str, reducing: str) -> None:
    world = world_of("abcd", is_open=is_open, slices=64)
    bar(world, barred)
    assert make_step(world) == 0
    assert reducing_in(world, 0) == {*reducing}


def test_among_strangers_no_quorum_bars_more_than_the_liars_that_are_tolerated() -> None:
    """Two liars that reduce one slice can deceive others about the verdict. The rest must stay in spite of that."""
    world = world_of("abcdefg", is_open=True)
    others = tuple(NodeId(name) for name in "abcdefg")
    world.framed = {name: FailedReducers("", (), others) for name in others}
    make_step(world)
    assert len(barred_at(world, "a")) == 2
    make_step(world)
    assert len(barred_at(world, "a")) == 2
    world.check_safety()
