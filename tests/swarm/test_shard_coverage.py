from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.shard_assignment import Assignment
from neuroshard.membership.swarm_status import ShardCoverage, covered_places
from neuroshard.membership.swarm_view import GlobalView
from neuroshard.types import NodeId
from tests.worlds.claims import EPOCH, RUN, said


@given(
    st.integers(1, 40).flatmap(
        lambda length: st.tuples(
            st.just(length), st.lists(st.tuples(st.integers(0, length - 1), st.integers(0, 100)), max_size=12)
        )
    )
)
def test_the_union_of_stretches_on_a_ring(case: tuple[int, list[tuple[int, int]]]) -> None:
    length, stretches = case
    places = {(first + i) % length for first, count in stretches for i in range(count)}
    assert covered_places(stretches, length) == len(places)


def test_coverage_follows_from_everybodys_assignment() -> None:
    total, counts = 200, {1: 5, 2: 60, 3: 0, 4: 1, 5: 150}
    view = GlobalView().with_reports(
        [(said(n, 1, shards_seen=count, leaving=n == 4), EPOCH) for n, count in counts.items()]
    )
    assignments = {n: Assignment(RUN, NodeId(f"node {n}"), total) for n in counts}
    expected = {assignments[n].shard_at(order) for n, count in counts.items() for order in range(count)}
    coverage = ShardCoverage(RUN, total)
    assert coverage.covered(view) == len(expected)
    assert coverage.covered(view.expired(EPOCH + 1e6)) == len(expected)  # who left has read what it read


def test_a_liar_covers_at_most_everything() -> None:
    view = GlobalView().with_reports([(said(1, shards_seen=10**8), EPOCH)])
    assert ShardCoverage(RUN, 640).covered(view) == 630
    assert ShardCoverage(RUN, 640).covered(GlobalView()) == 0
