from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

import neuroshard.membership.swarm_view as module
from neuroshard.membership.reports import (
    LEAST_SILENCE_SECONDS,
    LONGEST_REPORT_SECONDS,
    REPORT_SECONDS,
    is_worth_an_early_report,
    next_report_at,
    report_interval,
    silence_limit,
)
from neuroshard.membership.swarm_view import GlobalView
from neuroshard.status.snapshot import NodeState
from neuroshard.types import LayerRange, NodeId, Role
from tests.worlds.claims import EPOCH, REPORT, identity_of, said

ME = identity_of(1)


def view_of(*reports: object, now: float = EPOCH) -> GlobalView:
    return GlobalView().with_reports([(report, now) for report in reports])  # type: ignore[misc]


def test_the_fold_keeps_what_each_node_said_last() -> None:
    view = GlobalView()
    view = view.with_reports([(said(1, 1, steps=10, tokens=100, loss_ema=4.0), EPOCH)])
    view = view.with_reports([(said(2, 1, steps=5, tokens=300, loss_ema=2.0), EPOCH + 1)])
    view = view.with_reports([(said(1, 2, steps=20, tokens=200, loss_ema=3.0), EPOCH + 10)])
    member = view.members[NodeId("node 1")]
    assert (member.report.steps, member.first_seen, member.last_seen) == (20, EPOCH, EPOCH + 10)
    assert (view.total_steps, view.total_tokens) == (25, 500)
    assert view.global_loss == pytest.approx((3.0 * 200 + 2.0 * 300) / 500)
    assert view.min_loss == 2.0
    assert view.training_nodes == 2
    assert view.tokens_per_second == 2 * REPORT.tokens_per_second


@given(speeds=st.lists(st.floats(0, 1e6), min_size=1, max_size=3), stages=st.integers(1, 4))
def test_the_stages_of_one_pipeline_are_not_added_up(speeds: list[float], stages: int) -> None:
    """Every stage of a pipeline sees all its tokens: the run's speed is the sum over the pipelines, not the nodes."""
    reports = [
        said(10 * row + stage, layers=LayerRange(4 * stage, 4 * stage + 4), tokens_per_second=speed)
        for row, speed in enumerate(speeds)
        for stage in range(stages)
    ]
    assert view_of(*reports).tokens_per_second == pytest.approx(sum(speeds))


def test_a_node_without_layers_adds_no_tokens_per_second() -> None:
    assert view_of(said(1), said(2, layers=None)).tokens_per_second == REPORT.tokens_per_second


def test_an_empty_view_and_one_without_losses_have_no_loss() -> None:
    assert GlobalView().global_loss is None
    assert GlobalView().min_loss is None
    view = view_of(said(1, loss_ema=None, tokens=5), said(2, loss_ema=None))
    assert view.global_loss is None
    fresh = view_of(said(1, loss_ema=7.0, tokens=0), said(2, loss_ema=9.0, tokens=0), said(3, loss_ema=None))
    assert fresh.global_loss == 8.0


def test_paused_nodes_are_members_that_do_not_train() -> None:
    view = view_of(said(1), said(2, state=NodeState.PAUSED, state_hash=""))
    assert len(view.members) == 2
    assert view.training_nodes == 1
    assert view.tokens_per_second == REPORT.tokens_per_second
    assert view.model_hashes == {NodeId("node 1"): REPORT.state_hash}


def test_replays_change_nothing_not_even_after_the_node_left() -> None:
    first, second = said(1, 1, steps=10), said(1, 2, steps=20)
    view = view_of(first, second)
    assert view.with_reports([(first, EPOCH + 50)]) == view
    assert view.with_reports([(second, EPOCH + 50)]) == view
    gone = view.with_reports([(said(1, 3, leaving=True, steps=20), EPOCH)])
    assert gone.members == {}
    assert gone.with_reports([(second, EPOCH)]) == gone
    assert gone.expired(EPOCH + 1e6).with_reports([(second, EPOCH)]) == gone


def test_a_node_that_goes_back_to_a_checkpoint_is_not_counted_twice() -> None:
    view = view_of(said(1, 1, steps=100, tokens=1000))
    view = view.with_reports([(said(1, 2, steps=90, tokens=900), EPOCH)])  # killed, and restarted from a checkpoint
    assert (view.total_steps, view.total_tokens) == (100, 1000)
    view = view.with_reports([(said(1, 3, steps=130, tokens=1300), EPOCH)])
    assert (view.total_steps, view.total_tokens) == (130, 1300)
    assert view.members[NodeId("node 1")].report.steps == 130


def test_a_microbatch_counts_once_whoever_drove_it_through_however_many_stages() -> None:
    done = {"steps": 100, "tokens": 1000}
    view = view_of(
        said(1, layers=LayerRange(0, 4), **done),
        said(2, layers=LayerRange(4, 8), **done),
        said(3, layers=LayerRange(8, 12), **done),
        said(4, layers=None, roles=(Role.DRIVER,), steps=40, tokens=400),  # drives others' stages
    )
    assert (view.total_steps, view.total_tokens) == (100, 1000)
    moved = view.with_reports([(said(1, 2, layers=LayerRange(4, 8), steps=900, tokens=9000), EPOCH)])
    assert (moved.total_steps, moved.total_tokens) == (100, 1000)


def test_what_a_node_took_over_from_others_is_not_its_own_work() -> None:
    view = view_of(said(1, steps=500, tokens=5000))
    heir = said(2, steps=510, tokens=5100, inherited_steps=500, inherited_tokens=5000)
    view = view.with_reports([(heir, EPOCH)])
    assert (view.total_steps, view.total_tokens) == (510, 5100)
    gone = view.with_reports([(said(1, 2, steps=500, tokens=5000, leaving=True), EPOCH)])
    assert (gone.total_steps, gone.total_tokens) == (510, 5100)
    liar = said(3, steps=1, tokens=1, inherited_steps=10**9, inherited_tokens=10**9)
    assert gone.with_reports([(liar, EPOCH)]).total_steps == 510


def test_a_node_that_leaves_and_returns_is_counted_once() -> None:
    view = view_of(said(1, 1, steps=100), said(2, 1, steps=7))
    for sequence, leave in ((2, True), (3, False)):
        view = view.with_reports([(said(1, sequence, steps=100 + sequence, leaving=leave), EPOCH)])
        assert view.total_steps == 107 + sequence
    view = view.expired(EPOCH + 1000)
    assert view.members == {}
    assert view.total_steps == 110
    view = view.with_reports([(said(1, 4, steps=50), EPOCH + 1000)])
    assert view.total_steps == 110
    assert set(view.departed) == {NodeId("node 2")}


def test_silent_nodes_are_forgotten_and_this_one_is_not() -> None:
    view = GlobalView().with_local(ME.node_id, ME.wallet_id, replace(REPORT, steps=1), EPOCH)
    view = view.with_reports([(said(1), EPOCH)]).with_reports([(said(2), EPOCH + 30)])
    assert view.expired(EPOCH + LEAST_SILENCE_SECONDS) is view
    later = view.expired(EPOCH + LEAST_SILENCE_SECONDS + 1)
    assert set(later.members) == {ME.node_id, NodeId("node 2")}
    assert set(later.expired(EPOCH + 1e6).members) == {ME.node_id}
    assert later.expired(EPOCH + 1e6).total_steps == 1 + 2 * REPORT.steps


def test_a_node_that_reports_seldom_is_given_more_time() -> None:
    view = view_of(said(1, interval_seconds=50.0), said(2))
    assert set(view.expired(EPOCH + 299).members) == {NodeId("node 1")}
    assert view.expired(EPOCH + 301).members == {}


def test_in_a_large_swarm_everybody_is_given_more_time() -> None:
    view = view_of(*(said(number) for number in range(500)))
    assert len(view.expired(EPOCH + 299).members) == 500
    assert len(view.expired(EPOCH + 301).members) == 0


def test_tables_are_bounded_and_totals_keep_what_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MEMBERS", 5)
    monkeypatch.setattr(module, "MAX_DEPARTED", 3)
    view = GlobalView()
    for number in range(20):
        view = view.with_reports([(said(number, 1, steps=1, leaving=number < 10), EPOCH)])
        assert len(view.departed) <= 3
        assert len(view.members) <= 5
    assert view.total_steps == 20
    assert list(view.departed) == [NodeId(f"node {n}") for n in (12, 13, 14)]
    assert len(view.expired(EPOCH + 1000).departed) == 3
    view = view.with_reports([(said(14, 2, steps=3), EPOCH)])  # a node that comes back is not counted twice
    assert view.total_steps == 22
    assert NodeId("node 14") in view.members
    assert len(view.members) == 5


def test_ten_thousand_free_names_keep_no_newcomer_out_and_replace_no_node_that_reports() -> None:
    honest, free = range(5), iter(range(1000, 100_000))
    me = identity_of(1)
    view = GlobalView().with_local(me.node_id, me.wallet_id, REPORT, EPOCH)
    for minute in range(4):
        now = EPOCH + 60 * minute
        view = view.with_reports([(said(number, 1 + minute), now) for number in honest])
        view = view.with_reports([(said(number, 1), now) for number in islice(free, module.MAX_MEMBERS - 10)])
    view = view.with_reports([(said(500, 1), EPOCH + 240)])
    assert NodeId("node 500") in view.members
    assert {NodeId(f"node {number}") for number in honest} <= set(view.members)
    assert view.members[me.node_id].is_local
    assert len(view.members) == module.MAX_MEMBERS


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000), st.integers(0, 10**6), st.floats(0, 100)), max_size=40)
)
def test_several_reports_at_once_are_the_same_as_one_by_one(events: list[tuple[int, int, int, float]]) -> None:
    heard = [
        (said(node, 1 + place, steps=steps, tokens=tokens, leaving=steps % 5 == 0), EPOCH + wait)
        for place, (node, steps, tokens, wait) in enumerate(events)
    ]
    one_by_one = GlobalView()
    for report, now in heard:
        one_by_one = one_by_one.with_reports([(report, now)])
    assert GlobalView().with_reports(heard) == one_by_one


class Lives(RuleBasedStateMachine):
    """Nodes come, work, fall back, leave, return and fall silent; the totals are what a perfect observer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = EPOCH
        self.view = GlobalView()
        self.sequence = 0
        self.most: dict[int, tuple[int, int]] = {}
        self.seen_totals = [(0, 0)]
        self.delivered: list[object] = []

    @rule(node=st.integers(0, 6), steps=st.integers(0, 500), wait=st.floats(0, 40), leaving=st.booleans())
    def report(self, node: int, steps: int, wait: float, leaving: bool) -> None:
        self.now += wait
        self.sequence += 1
        report = said(node, self.sequence, steps=steps, tokens=steps * 7, leaving=leaving)
        self.view = self.view.with_reports([(report, self.now)])
        most = self.most.get(node, (0, 0))
        self.most[node] = (max(most[0], steps), max(most[1], steps * 7))
        self.delivered.append(report)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        report = data.draw(st.sampled_from(self.delivered))
        assert self.view.with_reports([(report, self.now)]) == self.view  # type: ignore[arg-type]

    @rule(wait=st.floats(0, 200))
    def silence(self, wait: float) -> None:
        self.now += wait
        self.view = self.view.expired(self.now)

    @invariant()
    def totals_are_exact_and_never_fall(self) -> None:
        totals = (self.view.total_steps, self.view.total_tokens)
        assert totals == (sum(s for s, _ in self.most.values()), sum(t for _, t in self.most.values()))
        self.seen_totals.append(totals)
        assert all(a <= b for a, b in pairwise(steps for steps, _ in self.seen_totals))
        assert not set(self.view.members) & set(self.view.departed)


TestLives = Lives.TestCase


def test_reports_become_rarer_as_the_swarm_grows_so_that_gossip_stays_flat() -> None:
    assert [report_interval(n) for n in (1, 50, 100, 200, 1000)] == [10, 10, 10, 20, 100]
    assert report_interval(10**9) == LONGEST_REPORT_SECONDS
    rates = [members / report_interval(members) for members in (100, 1000, 10_000)]
    assert rates == [10, 10, 10]
    assert silence_limit(REPORT_SECONDS, 5) == 60
    assert silence_limit(1, 5) == 60
    assert silence_limit(REPORT_SECONDS, 1000) == 600
    assert silence_limit(50, 5) == 300


def test_newcomers_are_answered_early_only_in_small_swarms() -> None:
    assert next_report_at(100, 0.5, 1) == 105
    assert next_report_at(100, 1, 1000) == 200
    assert is_worth_an_early_report(members=16, members_at_last_report=15)
    assert not is_worth_an_early_report(members=17, members_at_last_report=16)
    assert is_worth_an_early_report(members=20, members_at_last_report=1)
    assert not is_worth_an_early_report(members=1000, members_at_last_report=1)
