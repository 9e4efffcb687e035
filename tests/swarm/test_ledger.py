from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.swarm.ledger import Ledger, LedgerCounts, LedgerFullError, Owed, Phase, Place
from neuroshard.types import NodeId

A, B, C = (NodeId(name) for name in "abc")


def place(stage: int, microbatch: int = 1, session: int = 1) -> Place:
    return Place(session, microbatch, stage)


def through(ledger: Ledger, where: Place, hop: NodeId, phase: Phase, root: str = "") -> None:
    """A hop is named and gets as far as this."""
    ledger.assign(where, hop)
    if phase >= Phase.FORWARD_DONE:
        assert ledger.forward_done(where, hop, root)
    if phase >= Phase.GRADIENT_SENT:
        assert ledger.gradient_sent(where, hop)
    if phase is Phase.COUNTED:
        assert ledger.done(where, hop)


def test_every_stage_of_a_microbatch_has_one_hop() -> None:
    ledger = Ledger(3)
    ledger.assign(place(0), A)
    ledger.assign(place(2), B)
    assert ledger.hop(place(0)) == A
    assert ledger.route(1, 1) == (A, None, B)
    assert ledger.route(1, 2) == (None, None, None)


@pytest.mark.parametrize("phase", [Phase.NOTHING, Phase.FORWARD_DONE, Phase.GRADIENT_SENT])
def test_a_dead_hop_owes_what_does_not_count_yet_with_its_phase(phase: Phase) -> None:
    ledger = Ledger(2)
    through(ledger, place(0, microbatch=3), A, phase)
    through(ledger, place(0, microbatch=1), A, Phase.COUNTED)
    through(ledger, place(0, microbatch=2), B, phase)
    assert ledger.owed(A) == (Owed(place(0, microbatch=3), phase),)
    assert ledger.phase(place(0, microbatch=3)) is phase


def test_a_replacement_takes_over_one_place_and_begins_with_nothing() -> None:
    ledger = Ledger(2)
    for microbatch in (1, 2):
        through(ledger, place(0, microbatch), A, Phase.GRADIENT_SENT)
    ledger.assign(place(0, 1), B)
    assert ledger.owed(B) == (Owed(place(0, 1), Phase.NOTHING),)
    assert ledger.owed(A) == (Owed(place(0, 2), Phase.GRADIENT_SENT),)
    assert ledger.counts == LedgerCounts(replacements=1)


def test_work_that_counts_is_never_done_again() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.COUNTED)
    with pytest.raises(ValueError, match="done by a"):
        ledger.assign(place(0), B)
    ledger.assign(place(0), A)
    assert ledger.counts == LedgerCounts(counted=1)


@pytest.mark.parametrize(
    ("before", "after", "is_exact"), [("r1", "r1", True), ("r1", "r2", False), ("r1", "", False), ("", "", False)]
)
def test_a_replacement_is_exact_when_both_are_known_to_have_the_same_weights(
    before: str, after: str, is_exact: bool
) -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.FORWARD_DONE, before)
    through(ledger, place(0), B, Phase.COUNTED, after)
    assert ledger.counts == LedgerCounts(counted=1, replacements=1, approximate=int(not is_exact))


def test_nothing_is_approximate_when_the_dead_hop_had_given_no_output() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.NOTHING)
    through(ledger, place(0), B, Phase.COUNTED, "r2")
    through(ledger, place(1), A, Phase.NOTHING)  # the last stage gives loss and gradient at once
    ledger.assign(place(1), B)
    assert ledger.done(place(1), B)
    assert ledger.counts == LedgerCounts(counted=2, replacements=2)


def test_replacements_are_compared_with_the_first_output_which_the_next_stages_used() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.FORWARD_DONE, "r1")
    through(ledger, place(0), B, Phase.NOTHING)  # dies at once
    through(ledger, place(0), C, Phase.GRADIENT_SENT, "r2")
    assert ledger.counts == LedgerCounts(replacements=2, approximate=1)
    through(ledger, place(0), B, Phase.COUNTED, "r1")
    assert ledger.counts == LedgerCounts(counted=1, replacements=3, approximate=1)


def test_answers_of_a_hop_that_was_replaced_count_for_nothing() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.GRADIENT_SENT)
    through(ledger, place(0), B, Phase.FORWARD_DONE)
    assert not ledger.forward_done(place(0), A)
    assert not ledger.gradient_sent(place(0), A)
    assert not ledger.done(place(0), A)
    assert ledger.phase(place(0)) is Phase.FORWARD_DONE
    assert ledger.counts.late == 3
    assert ledger.counts.counted == 0


def test_what_is_said_again_changes_nothing() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.COUNTED, "r1")
    counts = ledger.counts
    assert ledger.forward_done(place(0), A, "r2")
    assert ledger.gradient_sent(place(0), A)
    assert ledger.done(place(0), A)
    assert ledger.counts == counts
    assert ledger.phase(place(0)) is Phase.COUNTED


def test_a_stage_does_one_thing_after_the_other() -> None:
    ledger = Ledger(2)
    ledger.assign(place(0), A)
    with pytest.raises(ValueError, match="no forward pass"):
        ledger.gradient_sent(place(0), A)
    ledger.forward_done(place(0), A)
    with pytest.raises(ValueError, match="no gradient"):
        ledger.done(place(0), A)
    with pytest.raises(ValueError, match="stage 2 of 2"):
        ledger.assign(place(2), A)


def test_a_closed_session_is_forgotten_and_names_everybody_who_was_asked() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.FORWARD_DONE)
    through(ledger, place(0), B, Phase.COUNTED)
    ledger.assign(place(1), C)
    ledger.assign(place(0, session=2), A)
    assert ledger.close(1) == {(0, A), (0, B), (1, C)}
    assert ledger.close(1) == frozenset()
    assert ledger.route(1, 1) == (None, None)
    assert ledger.owed(C) == ()
    assert len(ledger) == 1
    assert not ledger.done(place(1), C)
    assert ledger.counts == LedgerCounts(counted=1, replacements=1, approximate=1, late=1)


def test_a_microbatch_that_is_given_up_is_owed_by_nobody() -> None:
    ledger = Ledger(2)
    through(ledger, place(0), A, Phase.FORWARD_DONE)
    ledger.give_up(1, 1)
    ledger.give_up(1, 1)
    assert ledger.owed(A) == ()
    assert not ledger.gradient_sent(place(0), A)
    assert ledger.counts == LedgerCounts(late=1, given_up=1)
    assert (len(ledger), ledger.close(1)) == (0, {(0, A)})


def test_the_ledger_is_bounded() -> None:
    ledger = Ledger(2, most_microbatches=2)
    for microbatch in (1, 2):
        for stage in (0, 1):
            ledger.assign(place(stage, microbatch), A)
    with pytest.raises(LedgerFullError, match="Close sessions"):
        ledger.assign(place(0, 1, session=2), A)
    assert ledger.hop(place(0, 1, session=2)) is None
    ledger.close(1)
    ledger.assign(place(0, 1, session=2), A)
    assert len(ledger) == 1


class Line:
    """A driver with several microbatches under way, and replicas that die at the worst moments."""

    def __init__(self, stages: int, microbatches: int, random: Random) -> None:
        self.stages = stages
        self.random = random
        self.ledger = Ledger(stages)
        self.waiting = dict.fromkeys(range(microbatches), 0)  # microbatch: steps that are behind it
        self.born = 0
        self.roots: dict[NodeId, str] = {}
        self.alive = [{self.spawn() for _ in range(2)} for _ in range(stages)]
        self.late: list[tuple[str, Place, NodeId]] = []  # answers that have not arrived
        self.counted: Counter[Place] = Counter()
        self.replaced = self.approximate = 0
        self.first_roots: dict[Place, str] = {}
        self.named: dict[Place, NodeId] = {}
        self.is_fresh: dict[Place, bool] = {}

    def spawn(self) -> NodeId:
        self.born += 1
        hop = NodeId(f"hop {self.born}")
        self.roots[hop] = self.random.choice(["r1", "r1", "r2", ""])
        return hop

    def step(self) -> None:
        """One microbatch goes one step on: forward through all stages but the last, loss, and back."""
        number = self.random.choice(list(self.waiting))
        done = self.waiting[number]
        last = self.stages - 1
        stage = done if done <= last else 2 * last - done
        where = Place(1, number, stage)
        hop = self.ledger.hop(where)
        if hop is None:
            hop = self.random.choice(sorted(self.alive[stage]))
            self.name(where, hop)
        is_forward = done < last
        if (is_forward or stage < last) and self.ledger.phase(where) is Phase.NOTHING and not self.forward(where, hop):
            return
        if is_forward or self.backward(where, hop):
            self.waiting[number] += 1
            if self.waiting[number] == 2 * last + 1:
                del self.waiting[number]

    def forward(self, where: Place, hop: NodeId) -> bool:
        if self.dies(where, hop, "forward"):
            return False
        assert self.ledger.forward_done(where, hop, self.roots[hop])
        if where not in self.first_roots:
            self.first_roots[where] = self.roots[hop]
        elif self.is_fresh[where]:
            self.approximate += not self.roots[hop] or self.roots[hop] != self.first_roots[where]
        self.is_fresh[where] = False
        return True

    def backward(self, where: Place, hop: NodeId) -> bool:
        if where.stage < self.stages - 1:
            assert self.ledger.gradient_sent(where, hop)
        if self.dies(where, hop, "done"):
            return False
        assert self.ledger.done(where, hop)
        self.counted[where] += 1
        return True

    def dies(self, where: Place, hop: NodeId, answer: str) -> bool:
        """A hop may die before it answers; the answer may come all the same, when another one has its place."""
        if self.random.random() > 0.15:
            return False
        if self.random.random() < 0.5:
            self.late.append((answer, where, hop))
        self.alive[where.stage].discard(hop)
        if not self.alive[where.stage]:
            self.alive[where.stage].add(self.spawn())
        owed = self.ledger.owed(hop)
        assert Owed(where, self.ledger.phase(where)) in owed
        for work in owed:
            assert self.counted[work.place] == 0
            self.name(work.place, self.random.choice(sorted(self.alive[work.place.stage])))
        assert self.ledger.owed(hop) == ()
        return True

    def name(self, where: Place, hop: NodeId) -> None:
        self.ledger.assign(where, hop)
        self.replaced += where in self.named and self.named[where] != hop
        self.named[where] = hop
        self.is_fresh[where] = True

    def arrive(self) -> None:
        """An answer that everybody had given up comes after all."""
        if self.late:
            answer, where, hop = self.late.pop(self.random.randrange(len(self.late)))
            before = self.ledger.phase(where)
            says = self.ledger.forward_done if answer == "forward" else self.ledger.done
            assert not says(where, hop)
            assert self.ledger.phase(where) is before


@settings(max_examples=80, deadline=None)
@given(stages=st.integers(1, 4), microbatches=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_every_stage_of_every_microbatch_ends_with_one_hop_that_counts(
    stages: int, microbatches: int, seed: int
) -> None:
    line = Line(stages, microbatches, Random(seed))
    arrived = 0
    while line.waiting:
        line.step()
        if line.late and line.random.random() < 0.3:
            line.arrive()
            arrived += 1
    assert line.counted == Counter(Place(1, m, s) for m in range(microbatches) for s in range(stages))
    assert line.ledger.counts == LedgerCounts(
        counted=stages * microbatches, replacements=line.replaced, approximate=line.approximate, late=arrived
    )
    assert all(
        line.ledger.route(1, m) == tuple(line.named[Place(1, m, s)] for s in range(stages)) for m in range(microbatches)
    )
    assert all(line.ledger.owed(hop) == () for hop in line.roots)
    line.ledger.close(1)
    assert len(line.ledger) == 0
