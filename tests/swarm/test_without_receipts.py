"""Who can keep honest work out of an aggregate, or delay it, although nobody signs receipts for parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.consensus.all_reduce import ANSWER_SECONDS
from neuroshard.consensus.chain import Step
from neuroshard.consensus.effects import Effect, RoundConfig, Say
from neuroshard.consensus.round_messages import (
    ContributionSent,
    NewView,
    NewViewSaid,
    ResultSaid,
    StatementSaid,
)
from neuroshard.consensus.slices import SlicePlan
from neuroshard.types import NodeId
from tests.swarm.test_round_audits import value_at
from tests.worlds.rounds import LIARS, TIMING, Liar, Participant, Twist, World

SEVEN = [NodeId(name) for name in "abcdefg"]  # F = 2, q = 5
VICTIM = NodeId("c")


def world_of(seed: int) -> World:
    return World(SEVEN, seed=seed, is_open=True, plan=SlicePlan(16 * 4096))


def finish(world: World, liars: set[NodeId]) -> None:
    world.start_all()
    assert world.settle(until=lambda: all(one.done for name, one in world.nodes.items() if name not in liars))
    world.check_safety(liars)


def finish_step(world: World) -> None:
    done = world.nodes[VICTIM].done
    number = len(done) + 1
    world.start_all()
    assert world.settle(until=lambda: world.all_done(number))
    world.check_safety()


def says_that_the_victim_sent_nothing(one: Liar, effect: Effect) -> list[Effect]:
    """It also computes nothing, so that the others need the parts, and gives up its view at once."""
    match effect:
        case Say(to, StatementSaid(signed)):
            step_id = next(machine.setting.step.id for machine in one.machines.values())
            views = [NewView(step_id, view, (VICTIM,)) for view in (1, 2)]
            return [Say(to, NewViewSaid(one.signed(view))) for view in views]
        case Say(message=ResultSaid()):
            return []
        case Say(to, NewViewSaid(signed, lock)):
            body = NewView(signed.body.step_id, signed.body.view, (VICTIM,))
            return [Say(to, NewViewSaid(one.signed(body), lock))]
        case _:
            return [effect]


@pytest.mark.parametrize("seed", range(3))
def test_reducers_that_deny_a_part_keep_nobody_out(seed: int) -> None:
    """The word of more seats than may lie is needed. A missing receipt would need one reducer of any slice."""
    liars = {NodeId("f"), NodeId("g")}
    world = world_of(seed)
    world.twist = dict.fromkeys(liars, says_that_the_victim_sent_nothing)
    finish(world, liars)
    assert VICTIM in value_at(world, "a").accepted
    assert world.now <= TIMING.redo_seconds + 2 * ANSWER_SECONDS


@pytest.mark.parametrize(("proposed", "members", "views"), [(5, 5, 0), (4, 7, 1)])
def test_a_proposer_leaves_out_fewer_seats_than_a_quorum_needs(proposed: int, members: int, views: int) -> None:
    """This is the bound: in its turn, a liar can leave out two seats of seven. A proposal with fewer is refused."""
    world = world_of(1)
    liar = world.proposer(0)
    world.start(liar)
    (machine,) = world.nodes[liar].machines.values()
    chosen = machine.views.chosen_intents
    machine.views.chosen_intents = lambda: chosen()[:proposed]  # type: ignore[method-assign]
    machine.views.are_fit = lambda intents, view: len(intents) > 1  # type: ignore[method-assign]
    for name in SEVEN:
        if name != liar:
            world.start(name)
    assert world.settle(until=lambda: world.all_done(1))
    world.check_safety({liar})
    assert len(value_at(world, "g").accepted) == members
    assert views * TIMING.view_seconds <= world.now < (views + 1) * TIMING.view_seconds


def test_the_seats_of_strangers_begin_in_turns() -> None:
    """So a liar among the seats decides whose work counts in one step of seven, and a sleeping one costs one view."""
    world = world_of(4)
    first = list[NodeId]()
    for _ in SEVEN:
        first.append(world.proposer(0))
        finish_step(world)
    assert sorted(first) == SEVEN


def test_the_owner_of_a_run_of_friends_begins_each_step() -> None:
    world = World(SEVEN, seed=4, plan=SlicePlan(4096))
    first = set[NodeId]()
    for _ in range(3):
        first.add(world.proposer(0))
        finish_step(world)
    assert len(first) == 1


def sends_parts_to_all_but(reducers: set[NodeId]) -> Twist:
    def lie(_one: Liar, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ContributionSent()) if to & reducers:
                return []
            case _:
                return [effect]

    return lie


@pytest.mark.parametrize(
    ("deprived", "seconds", "takes_part"),
    [
        ("a", TIMING.redo_seconds + 2 * ANSWER_SECONDS, True),  # the others compute the slices of that reducer
        ("ab", TIMING.redo_seconds + 2 * ANSWER_SECONDS, True),
        ("abcefg", TIMING.view_seconds + TIMING.gather_seconds, False),
    ],
)
def test_a_member_that_keeps_its_parts_back_costs_half_a_view_or_its_own_work(
    deprived: str, seconds: float, takes_part: bool
) -> None:
    liar, world = NodeId("d"), world_of(2)
    world.twist[liar] = sends_parts_to_all_but({NodeId(name) for name in deprived})
    finish(world, {liar})
    assert world.now <= seconds
    value = value_at(world, "c")
    assert (liar in value.accepted) == takes_part
    assert set(value.accepted) >= {*SEVEN} - {liar}


@pytest.mark.parametrize("seed", range(6))
def test_the_next_proposer_waits_for_a_seat_rather_than_for_parts_that_are_kept_back(seed: int) -> None:
    """It did not expect one honest seat when the step began, and without that one only the liar makes a quorum."""
    names = [NodeId(name) for name in "abcd"]  # F = 1, q = 3
    world = World(names, seed=seed, is_open=True)
    next_proposer, late = world.proposer(1), world.proposer(3)
    world.twist = {world.proposer(2): LIARS["withheld_contribution"]}
    setting_of = world._setting  # pyright: ignore[reportPrivateUsage]

    def unexpected(one: Participant, step: Step) -> RoundConfig:
        setting, hides = setting_of(one, step), one.member.node_id == next_proposer
        return replace(setting, expected=setting.expected - {late}) if hides else setting

    world._setting = unexpected  # type: ignore[method-assign] # pyright: ignore[reportPrivateUsage]
    finish(world, {world.proposer(2)})
    assert world.now < TIMING.view_seconds + TIMING.redo_seconds
