"""Certified rounds: one step ends with the same bytes for everybody, whoever dies, lies, sleeps or is cut off."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import Effect, Say
from neuroshard.consensus.round_messages import AggregateWanted, Message, ResultSaid
from neuroshard.consensus.slices import BLOCK, SlicePlan
from neuroshard.types import NodeId
from tests.worlds.rounds import LIARS, TIMING, Envelope, Liar, World, anything

NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_members_complete_one_step_after_another(count: int) -> None:
    world = World([f"n{number}" for number in range(count)], seed=count)
    for number in range(3):
        world.start_all()
        assert world.settle(until=lambda done=number + 1: world.all_done(done))
        assert world.now < 5 * (number + 1)
    world.check_safety()
    assert len({one.root for one in world.nodes.values()}) == 1


@pytest.mark.parametrize("count", [2, 5])
def test_contributions_and_results_may_come_slice_by_slice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuroshard.consensus.slices.MESSAGE_BYTES", 1)
    test_members_complete_one_step_after_another(count)


@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
@pytest.mark.parametrize("effects", range(14))
def test_a_member_that_dies_at_any_point_does_not_keep_the_others(victim: str, effects: int) -> None:
    world = World(NAMES, seed=effects)
    world.dies_after[NodeId(victim)] = effects
    world.start_all()
    assert world.settle(until=lambda: sum(len(one.done) for one in world.nodes.values() if one.is_alive) >= 3)
    world.check_safety()
    if not world.nodes[NodeId(victim)].is_alive:
        world.restart(NodeId(victim))
        assert world.settle()
        world.check_safety()


@pytest.mark.parametrize("lie", LIARS)
@pytest.mark.parametrize("liar", NAMES)
def test_a_liar_neither_splits_the_others_nor_stops_them(lie: str, liar: str) -> None:
    world = World(NAMES, seed=3, is_open=True)
    world.twist[NodeId(liar)] = LIARS[lie]
    honest = [one for name, one in world.nodes.items() if name != liar]
    for number in range(2):
        for one in honest:
            world.start(one.member.node_id)
        world.start(NodeId(liar))
        assert world.settle(until=lambda done=number + 1: all(len(one.done) >= done for one in honest))
    world.check_safety(liars=[NodeId(liar)])


def deliver_except(world: World, is_late: Callable[[Envelope], bool]) -> None:
    """Let everything arrive that is not late, in the order in which it was sent."""
    while places := [place for place, envelope in enumerate(world.pending) if not is_late(envelope)]:
        world.deliver(places[0])


def results_of_b_for_d(envelope: Envelope) -> bool:
    return envelope.to == "d" and envelope.sender == "b" and isinstance(envelope.message, ResultSaid)


def test_a_member_does_not_ask_for_results_that_are_under_way_when_it_hears_of_the_end() -> None:
    """An aggregate is large, and its sender may have a slow line."""
    world = World(NAMES, plan=SlicePlan(8 * BLOCK))
    asked = watch_for(world, NodeId("d"), AggregateWanted)
    world.start_all()
    deliver_except(world, results_of_b_for_d)
    assert [bool(world.nodes[NodeId(name)].done) for name in NAMES] == [True, True, True, False]
    assert not asked
    deliver_except(world, lambda _envelope: False)
    assert world.all_done(1)
    assert world.now == 0
    assert not asked


def test_a_member_asks_only_for_the_results_that_did_not_come() -> None:
    world = World(NAMES, plan=SlicePlan(8 * BLOCK))
    asked = watch_for(world, NodeId("d"), AggregateWanted)
    world.start_all()
    deliver_except(world, results_of_b_for_d)
    while world.pending:
        world.drop(0)
    assert world.settle()
    assert TIMING.gather_seconds <= world.now <= TIMING.gather_seconds + 1
    wanted = {index for message in asked if isinstance(message, AggregateWanted) for index in message.slices}
    assert 0 < len(wanted) <= 8 // 4 + 1


def watch_for(world: World, node: NodeId, kind: type[Message]) -> list[Message]:
    """The messages of a kind that a node will send."""
    found = list[Message]()

    def watch(_one: Liar, effect: Effect) -> list[Effect]:
        if isinstance(effect, Say) and isinstance(effect.message, kind):
            found.append(effect.message)
        return [effect]

    world.twist[node] = watch
    return found


def random_schedule(seed: int, *, is_lying: bool) -> World:
    """Losses, delays, deaths, restarts, cuts and lies at random."""
    random = Random(seed)
    count = random.choice([2, 3, 4, 5, 7]) if not is_lying else random.choice([4, 5, 7])
    names = [NodeId(f"n{number}") for number in range(count)]
    world = World(names, seed=seed, is_open=is_lying, candidates=seed % 4)
    world.choices = {name: Random(name).randrange(3) for name in names if world.candidates == 3}
    if is_lying:
        world.twist[names[0]] = anything(seed)
    world.start_all()
    for _ in range(random.randrange(20, 300)):
        what = random.random()
        if what < 0.8 and world.pending:
            world.deliver(random.randrange(len(world.pending)))
        elif what < 0.88 and world.pending:
            world.drop(random.randrange(len(world.pending)))
        elif what < 0.94:
            world.advance(random.choice([1, 5, 15, 30]))
        elif what < 0.96:
            world.side = {name: random.randrange(2) for name in names} if random.random() < 0.5 else {}
        else:
            one = random.choice(names)
            if world.nodes[one].is_alive:
                world.dies_after[one] = random.randrange(6)
            else:
                world.restart(one)
        world.check_safety(world.twist)
    return world


def check_peace(world: World) -> None:
    """All are alive and hear each other: everybody ends the step."""
    world.side, world.dies_after = {}, {}
    for name, one in world.nodes.items():
        if not one.is_alive:
            world.restart(name)
    honest = [one for name, one in world.nodes.items() if name not in world.twist]
    assert world.settle(until=lambda: all(one.done for one in honest))
    world.check_safety(world.twist)


BATCHES = pytest.mark.parametrize(
    "batch", [*range(4), *(pytest.param(batch, marks=pytest.mark.long) for batch in range(4, 8))]
)


@BATCHES
def test_no_schedule_splits_or_stops_members_among_friends(batch: int) -> None:
    for seed in range(60 * batch, 60 * (batch + 1)):
        check_peace(random_schedule(seed, is_lying=False))


@BATCHES
def test_no_schedule_and_no_liar_splits_or_stops_members_among_strangers(batch: int) -> None:
    for seed in range(40 * batch, 40 * (batch + 1)):
        check_peace(random_schedule(seed, is_lying=True))


class AnySchedule(RuleBasedStateMachine):
    """The same among friends, with schedules that are made smaller when one fails."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World([*NAMES, "e"])
        self.world.start_all()

    @rule(index=st.integers(0, 1000))
    def deliver(self, index: int) -> None:
        for _ in range(5):
            if self.world.pending:
                self.world.deliver(index)

    @rule(index=st.integers(0, 1000))
    def drop(self, index: int) -> None:
        if self.world.pending:
            self.world.drop(index)

    @rule(seconds=st.sampled_from([1, 12, 25]))
    def advance(self, seconds: int) -> None:
        self.world.advance(seconds)

    @rule(name=st.sampled_from(NAMES), effects=st.integers(0, 5))
    def kill_or_restart(self, name: str, effects: int) -> None:
        if self.world.nodes[NodeId(name)].is_alive:
            self.world.dies_after[NodeId(name)] = effects
        else:
            self.world.restart(NodeId(name))

    @rule(cut=st.sets(st.sampled_from(NAMES)))
    def cut(self, cut: set[str]) -> None:
        self.world.side = {NodeId(name): 1 for name in cut}

    @invariant()
    def is_safe(self) -> None:
        self.world.check_safety()

    def teardown(self) -> None:
        check_peace(self.world)


AnySchedule.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnySchedule = AnySchedule.TestCase


def test_a_step_that_some_members_did_not_see_end_ends_for_them_with_the_same_bytes() -> None:
    world = World(NAMES)
    world.side = {NodeId("d"): 1}
    world.start_all()
    assert world.settle(until=lambda: all(world.nodes[NodeId(name)].done for name in "abc"))
    assert not world.nodes[NodeId("d")].done
    world.side = {}
    assert world.settle()
    world.check_safety()


def test_a_side_without_a_quorum_completes_nothing() -> None:
    """Half of the seats decide on the side of the first one only."""
    world = World(NAMES)
    world.side = {NodeId("c"): 1, NodeId("d"): 1}
    world.start_all()
    assert not world.settle(1000)
    assert [name for name, one in world.nodes.items() if one.done] == ["a", "b"]


def test_a_restart_of_all_members_after_they_have_prepared_ends_the_step_with_that_value() -> None:
    world = World(NAMES)
    world.start_all()

    def locks() -> list[str]:
        return [r.lock.value.digest for one in world.nodes.values() for r in one.records.values() if r.lock is not None]

    while len(locks()) < 2:
        world.deliver(world.random.randrange(len(world.pending)))
    (locked,) = set(locks())
    for name in world.nodes:
        world.kill(name)
    world.pending.clear()
    for name in world.nodes:
        world.restart(name)
    assert world.settle()
    ended = {completed.certificate.value.digest for one in world.nodes.values() for _, completed in one.ended.values()}
    assert ended == {locked}


def test_a_certificate_names_the_median_work_of_its_members_whatever_a_few_say() -> None:
    world = World(NAMES)
    world.sequences = {NodeId("a"): 80, NodeId("b"): 10**15, NodeId("c"): 120, NodeId("d"): 90}
    world.start_all()
    assert world.settle(until=lambda: world.all_done(1))
    values = [complete.certificate.value for one in world.nodes.values() for _, complete in one.ended.values()]
    assert [value.sequences for value in values] == [90] * len(NAMES)


def test_newcomers_contribute_and_do_not_vote() -> None:
    """Twelve wallets that join change neither the committee nor its quorum."""
    world = World(NAMES)
    seats = world.nodes[NodeId("a")].chain.ledger.committee
    for number in range(12):
        world.add(f"new {number}", like=NodeId("a"))
    for done in range(1, 4):
        world.start_all()
        assert world.settle(until=lambda done=done: world.all_done(done))
    world.check_safety()
    for one in world.nodes.values():
        assert one.chain.ledger.committee == seats
        certificate = one.chain.tip
        assert certificate is not None
        assert len(certificate.value.members) == 16
        assert {member.node_id for member in certificate.signers} <= set(NAMES)


@pytest.mark.parametrize(("is_open", "members"), [(True, 5), (False, 12)])
def test_strangers_join_slowly_and_friends_at_once(is_open: bool, members: int) -> None:
    """A round of four seats has one place for a newcomer in an open run, where wallets are free to create."""
    world = World(NAMES, is_open=is_open)
    for number in range(8):
        world.add(f"new{number}", NodeId("a"))
    world.start_all()
    assert world.settle(until=lambda: world.all_done(1))
    _, complete = next(iter(world.nodes[NodeId("a")].ended.values()))
    contributors = {member.node_id for member in complete.certificate.value.members}
    assert len(contributors) == members
    assert {NodeId(name) for name in NAMES} <= contributors


def test_absent_seats_do_not_make_the_quorum_smaller() -> None:
    """Two of five sleep: the others continue. A third one leaves too few, however long they wait."""
    world = World([*NAMES, "e"])
    for name in "de":
        world.kill(NodeId(name))
    world.start_all()
    assert world.settle()
    assert world.nodes[NodeId("a")].chain.ledger.committee.seats[3].node_id == "d"
    world.kill(NodeId("c"))
    world.start_all()
    assert not world.settle(5000, until=lambda: world.all_done(2))


def test_half_of_the_seats_with_the_first_one_are_enough_among_friends() -> None:
    for dead, completes in (("b", True), ("a", False)):
        world = World("ab")
        world.kill(NodeId(dead))
        world.start_all()
        assert world.settle(1000) is completes


@pytest.mark.parametrize("turn", range(len(NAMES)))
def test_nobody_waits_for_a_voter_that_was_not_called(turn: int) -> None:
    """Neither for its proposal nor for its contribution."""
    world = World(NAMES)
    world.calls_the_living = True
    world.kill(world.proposer(turn))
    world.start_all()
    assert world.settle()
    assert world.now < TIMING.gather_seconds


def test_after_a_view_in_vain_nobody_waits_for_whom_it_was_in_vain() -> None:
    """It promised a contribution that did not come: the next proposal is made without it at once."""
    world = World(NAMES)
    world.dies_after[world.proposer(2)] = 1  # its promise
    world.start_all()
    assert world.settle()
    assert TIMING.view_seconds <= world.now < TIMING.view_seconds + TIMING.gather_seconds
    world.check_safety()


def test_what_most_voters_find_worse_is_not_completed() -> None:
    world = World(NAMES)
    for name in "abc":
        world.nodes[NodeId(name)].objects = True
    world.start_all()
    assert not world.settle(1000)
    world.nodes[NodeId("a")].objects = world.nodes[NodeId("b")].objects = False
    assert world.settle()


def test_whoever_votes_twice_or_reduces_wrongly_is_accused_with_proof() -> None:
    for lie, what, claims in (("both_votes", "voted for two values", 2), ("wrong_results", "not follow from", 1)):
        world = World(NAMES, seed=6, is_open=True)
        world.twist[NodeId("a")] = LIARS[lie]
        world.start_all()
        assert world.settle(until=lambda world=world: all(world.nodes[NodeId(name)].done for name in "bcd"))
        accusations = [one for name in "bcd" for one in world.nodes[NodeId(name)].accused]
        assert {one.node for one in accusations} == {"a"}
        assert any(what in one.what and len(one.proof) == claims for one in accusations)


def test_who_slept_through_three_steps_catches_up_by_their_certificates() -> None:
    world = World([*NAMES, "e"])
    sleeper = NodeId("e")
    world.start(sleeper)
    world.kill(sleeper)
    for number in range(3):
        world.start_all()
        assert world.settle(until=lambda done=number + 1: world.all_done(done))
    world.pending.clear()
    world.nodes[sleeper].is_alive = True
    while len(world.nodes[sleeper].done) < 3:
        world.ask_for_the_end(sleeper)
        assert world.settle(20, until=lambda: False) is False
    world.check_safety()
    assert world.nodes[sleeper].root == world.nodes[NodeId("a")].root


def test_a_wallet_has_one_node_in_a_round_of_strangers_and_several_among_friends() -> None:
    for is_open, members in ((True, 4), (False, 5)):
        world = World(NAMES, is_open=is_open)
        world.add("e", like=NodeId("a"))
        twin = world.nodes[NodeId("e")]
        twin.member = GroupMember(twin.member.node_id, world.nodes[NodeId("a")].member.wallet_id)
        world.start_all()
        assert world.settle()
        tip = world.nodes[NodeId("b")].chain.tip
        assert tip is not None
        assert len(tip.value.members) == members


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
def test_a_member_sends_and_receives_less_than_four_contributions(count: int) -> None:
    """Slices are counted; what else travels does not grow with the model."""
    plan = SlicePlan(64 * BLOCK)
    world = World([f"n{number}" for number in range(count)], plan=plan)
    world.start_all()
    assert world.settle()
    for name in world.nodes:
        assert world.sent[name] < 4 * plan.count
        assert world.received[name] < 4 * plan.count
