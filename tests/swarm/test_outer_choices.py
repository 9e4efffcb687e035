"""The seats' choice of the outer step: one for all members, whatever liars choose, and none without a measurement."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median_low

import pytest

from neuroshard.consensus.effects import Effect, Say
from neuroshard.consensus.round_messages import ChoicesSaid, OuterChoice, Value
from neuroshard.types import NodeId
from tests.worlds.rounds import LIARS, Participant, World, member_named, signed_as

NAMES = tuple(map(NodeId, "abcd"))
STRANGERS = tuple(map(NodeId, "abcdefg"))  # two of them may lie


def certified(one: Participant) -> Value:
    assert one.chain.tip is not None
    return one.chain.tip.value


def test_the_lower_median_of_a_quorums_choices_is_certified_for_all() -> None:
    for seed in range(20):
        world, random = World(NAMES, seed=seed, candidates=3), Random(seed)
        world.choices = {name: random.randrange(3) for name in NAMES}
        for _ in range(2):
            world.start_all()
            assert world.settle()
        world.check_safety()
        values = [certified(one) for one in world.nodes.values()]
        assert len({value.digest for value in values}) == 1
        chosen = dict(values[0].choices)
        assert world.nodes[NAMES[0]].chain.ledger.committee.is_quorum(
            [world.nodes[NodeId(name)].member for name in chosen]
        )
        assert chosen.items() <= world.choices.items()
        assert values[0].work.choice == median_low(chosen.values())


def test_without_a_measurement_nothing_is_sent_and_nothing_is_certified() -> None:
    world = World(NAMES)
    world.choices = dict.fromkeys(NAMES, 2)
    said = list[Effect]()
    world.twist = dict.fromkeys(NAMES, lambda _one, effect: [said.append(effect), effect][1:])
    world.start_all()
    assert world.settle()
    assert not [one for one in said if isinstance(one, Say) and isinstance(one.message, ChoicesSaid)]
    assert certified(world.nodes[NAMES[0]]).work.choice is None


@pytest.mark.parametrize("liars", [STRANGERS[:2], STRANGERS[-2:], (STRANGERS[0], STRANGERS[-1])])
@pytest.mark.parametrize(("lie", "honest"), [(2, (0, 0, 0, 0, 0)), (0, (2, 2, 2, 2, 2)), (2, (0, 1, 0, 1, 0))])
def test_liars_never_move_the_choice_beyond_those_of_the_honest(
    liars: tuple[NodeId, ...], lie: int, honest: tuple[int, ...]
) -> None:
    """Also when one of them is the proposer, which decides whose choices count."""
    for seed in range(6):
        world = World(STRANGERS, seed=seed, is_open=True, candidates=3)
        others = [name for name in STRANGERS if name not in liars]
        world.choices = dict.fromkeys(liars, lie) | dict(zip(others, honest, strict=True))
        world.start_all()
        assert world.settle()
        chosen = certified(world.nodes[others[0]]).work.choice
        assert chosen is not None
        assert min(honest) <= chosen <= max(honest)


def test_nobody_waits_for_a_seat_that_does_not_choose() -> None:
    world = World(NAMES, candidates=3)
    world.twist[NAMES[3]] = lambda _one, effect: [] if _is_choice(effect) else [effect]
    world.start_all()
    assert world.settle()
    assert NAMES[3] not in dict(certified(world.nodes[NAMES[0]]).choices)
    assert world.now < 5


def _is_choice(effect: Effect) -> bool:
    return isinstance(effect, Say) and isinstance(effect.message, ChoicesSaid)


def foreign(said: ChoicesSaid, _own: Participant) -> ChoicesSaid:
    """One is of a node without a seat."""
    stranger = signed_as(member_named("stranger"), OuterChoice(said.round_id, 0))
    return ChoicesSaid((stranger, *said.choices[1:]))


def out_of_list(said: ChoicesSaid, own: Participant) -> ChoicesSaid:
    others = [one for one in said.choices if one.member != own.member]
    return ChoicesSaid((signed_as(own.member, OuterChoice(said.round_id, 2)), *others))


def of_another_round(said: ChoicesSaid, _own: Participant) -> ChoicesSaid:
    return ChoicesSaid(tuple(signed_as(one.member, OuterChoice("e" * 64, one.body.choice)) for one in said.choices))


def too_few(said: ChoicesSaid, _own: Participant) -> ChoicesSaid:
    return ChoicesSaid(said.choices[:1])


@pytest.mark.parametrize("spoil", [foreign, out_of_list, of_another_round, too_few])
@pytest.mark.parametrize("liar", [0, 1])
def test_a_proposal_with_choices_that_are_not_valid_counts_for_nothing(
    spoil: Callable[[ChoicesSaid, Participant], ChoicesSaid], liar: int
) -> None:
    """The liar is the proposer of the first view, or a seat that sends the proposer such choices."""
    world = World(NAMES, seed=liar, is_open=True, candidates=2)

    def lies(one: Participant, effect: Effect) -> list[Effect]:
        match effect:
            case Say(to, ChoicesSaid() as said):
                return [Say(to, spoil(said, one))]
            case _:
                return [effect]

    name = world.proposer(liar)
    world.twist[name] = lies
    honest = [one for node, one in world.nodes.items() if node != name]
    world.start_all()
    assert world.settle(until=lambda: all(one.done for one in honest))
    world.check_safety(liars=[name])
    value, view = certified(honest[0]), honest[0].ended[certified(honest[0]).step_id][1].certificate.view
    assert (view > 0) == (liar == 0)
    assert len(value.choices) == 3
    assert all(choice < 2 and node in NAMES for node, choice in value.choices)


@pytest.mark.parametrize("victim", NAMES)
def test_a_member_that_dies_while_the_seats_choose_does_not_keep_the_others(victim: NodeId) -> None:
    for effects in range(16):
        world = World(NAMES, seed=effects, candidates=3)
        world.choices = {NAMES[1]: 1, NAMES[2]: 2}
        world.dies_after[victim] = effects
        world.start_all()
        assert world.settle(until=lambda: sum(len(one.done) for one in world.nodes.values() if one.is_alive) >= 3)  # noqa: B023
        world.check_safety()
        if not world.nodes[victim].is_alive:
            world.restart(victim)
            assert world.settle()
            world.check_safety()


def test_a_value_is_voted_on_again_with_its_choice() -> None:
    """The second vote of its own view is lost: the next proposer has another opinion and must repeat the value."""
    world = World(NAMES, candidates=3)
    world.choices = dict.fromkeys(NAMES, 2)
    world.start_all()
    while not any(record.lock for one in world.nodes.values() for record in one.records.values()):
        assert world.pending
        world.deliver(0)
    world.pending.clear()
    for name in NAMES:
        world.kill(name)
    world.choices = {}
    for name in NAMES:
        world.restart(name)
    assert world.settle()
    world.check_safety()
    assert {certified(one).work.choice for one in world.nodes.values()} == {2}


def test_no_lie_about_anything_else_makes_the_choice_differ() -> None:
    for seed, lie in enumerate(LIARS):
        world = World(NAMES, seed=seed, is_open=True, candidates=3)
        world.choices = {NAMES[1]: 1, NAMES[2]: 1, NAMES[3]: 1}
        world.twist[NAMES[seed % 4]] = LIARS[lie]
        honest = [one for name, one in world.nodes.items() if name not in world.twist]
        world.start_all()
        assert world.settle(until=lambda: all(one.done for one in honest))  # noqa: B023
        world.check_safety(world.twist)
        assert len({one.root for one in honest}) == 1
