from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.placement.stage_choice import choose_stages, equal_windows, fitting_windows
from neuroshard.types import NodeId, RunId, WalletId

RUN = RunId("ab" * 32)
ME, MY_WALLET, STRANGER = NodeId("me"), WalletId("mine"), WalletId("another")


def covered(stage_count: int, *held: tuple[int, int], wallet: WalletId = STRANGER) -> StageCoverage:
    holders = [StageHolder(NodeId(f"node {n}"), wallet, StageRange(*ends)) for n, ends in enumerate(held)]
    return StageCoverage.of(RUN, stage_count, holders)


def chosen(coverage: StageCoverage, length: int = 1, node_id: NodeId = ME) -> tuple[int, int] | None:
    window = choose_stages(node_id, MY_WALLET, equal_windows(coverage.stage_count, length), coverage)
    return None if window is None else (window.start, window.stop)


def test_a_node_takes_the_least_covered_window() -> None:
    assert chosen(covered(3, (0, 1), (2, 3))) == (1, 2)
    assert chosen(covered(3, (0, 1), (0, 1), (1, 2), (2, 3), (2, 3))) == (1, 2)
    assert chosen(covered(4, (0, 1), (1, 2), (1, 2), (3, 4)), length=2) == (2, 4)


def test_windows_compare_by_their_least_covered_stages() -> None:
    # one empty stage beside a crowded one is needed more than two stages with one replica each
    assert chosen(covered(4, (0, 1), (1, 2), (2, 3), (2, 3), (2, 3)), length=2) == (2, 4)
    # two empty stages are needed more than one
    assert chosen(covered(5, (2, 3)), length=2) != (2, 4)


def test_a_node_that_holds_everything_is_alone_with_all_roles() -> None:
    assert chosen(covered(4), length=4) == (0, 4)
    assert chosen(covered(4), length=9) == (0, 4)


def test_a_node_that_holds_nothing_is_told_so() -> None:
    assert chosen(covered(4), length=0) is None


def test_what_was_said_of_the_node_itself_does_not_count() -> None:
    before = covered(2, (0, 1)).with_holder(StageHolder(ME, MY_WALLET, StageRange(1, 2)))
    assert chosen(before) == (1, 2)


def test_nodes_of_one_wallet_part_although_others_are_needed_less() -> None:
    mine = StageHolder(NodeId("sibling"), MY_WALLET, StageRange(0, 1))
    coverage = covered(2, (1, 2), (1, 2), (1, 2)).with_holder(mine)
    assert chosen(coverage) == (1, 2)
    # but an empty stage comes first
    assert chosen(covered(4, (2, 3), (3, 4)).with_holder(replace(mine, stages=StageRange(1, 2))), length=2) == (0, 2)


def test_of_windows_that_are_needed_alike_the_longer_one_is_taken() -> None:
    windows = (StageRange(0, 1), StageRange(1, 3))
    coverage = covered(3, (0, 1), (1, 3))
    assert all(choose_stages(NodeId(f"n{n}"), MY_WALLET, windows, coverage) == windows[1] for n in range(9))


def test_nodes_that_know_nothing_of_each_other_spread_over_tiles_of_the_plan() -> None:
    nodes = [NodeId(f"newcomer {n}") for n in range(300)]
    counts = Counter(chosen(covered(6), 2, node) for node in nodes)
    assert set(counts) == {(0, 2), (2, 4), (4, 6)}
    assert all(70 <= count <= 130 for count in counts.values())
    assert [chosen(covered(6), 2, node) for node in nodes] == [chosen(covered(6), 2, node) for node in nodes]


def test_another_run_draws_other_places() -> None:
    here, there = StageCoverage(RUN, 8), StageCoverage(RunId("cd" * 32), 8)
    nodes = [NodeId(f"newcomer {n}") for n in range(50)]
    assert any(chosen(here, 1, node) != chosen(there, 1, node) for node in nodes)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    room=st.integers(0, 30),
)
def test_fitting_windows_are_all_that_fit_and_cannot_grow(sizes: list[int], room: int) -> None:
    def fits(window: StageRange) -> bool:
        return sum(sizes[window.start : window.stop]) <= room

    every = [StageRange(a, b) for a in range(len(sizes)) for b in range(a + 1, len(sizes) + 1)]
    fitting = [window for window in every if fits(window)]
    longest = [window for window in fitting if not any(o.covers(window) and o != window for o in fitting)]
    assert list(fitting_windows(len(sizes), fits)) == longest


def join(coverage: StageCoverage, number: int, wallets: int, capacity: int) -> StageCoverage:
    node_id, wallet_id = NodeId(f"node {number}"), WalletId(f"wallet {number % wallets}")
    window = choose_stages(node_id, wallet_id, equal_windows(coverage.stage_count, capacity), coverage)
    assert window is not None
    return coverage.with_holder(StageHolder(node_id, wallet_id, window))


@settings(deadline=None)
@given(stage_count=st.integers(1, 6), capacities=st.lists(st.integers(1, 3), max_size=12), wallets=st.integers(1, 12))
def test_every_newcomer_fills_as_many_empty_stages_as_it_can(
    stage_count: int, capacities: list[int], wallets: int
) -> None:
    coverage = StageCoverage(RUN, stage_count)
    for number, capacity in enumerate(capacities):
        empty = set(coverage.empty)
        coverage = join(coverage, number, wallets, capacity)
        possible = max(len(empty & set(window)) for window in equal_windows(stage_count, capacity))
        assert len(empty) - len(coverage.empty) == possible


@settings(deadline=None)
@given(stage_count=st.integers(1, 6), nodes=st.integers(1, 20))
def test_newcomers_that_see_everybody_cover_the_stages_evenly(stage_count: int, nodes: int) -> None:
    coverage = StageCoverage(RUN, stage_count)
    for number in range(nodes):
        coverage = join(coverage, number, nodes, 1)
        assert max(coverage.replicas) - min(coverage.replicas) <= 1


@settings(deadline=None)
@given(stage_count=st.integers(1, 6), nodes=st.integers(1, 20), wallets=st.integers(1, 5))
def test_nodes_of_one_wallet_meet_only_when_there_are_more_of_them_than_stages(
    stage_count: int, nodes: int, wallets: int
) -> None:
    coverage = StageCoverage(RUN, stage_count)
    for number in range(nodes):
        coverage = join(coverage, number, wallets, 1)
    crowds = Counter((holder.wallet_id, holder.stages) for holder in coverage.holders)
    most_of_a_wallet = -(-nodes // wallets)
    assert max(crowds.values()) == -(-most_of_a_wallet // stage_count)
