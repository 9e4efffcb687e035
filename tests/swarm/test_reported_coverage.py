"""What a node tells of the data beside its own feed: the coverage that reports add up to."""

from __future__ import annotations

from msgspec.structs import replace

from neuroshard.membership.swarm_view import GlobalView
from neuroshard.node.data_sharing import coverage_of
from neuroshard.types import NodeId, ShardRange, WalletId
from tests.worlds.claims import REPORT

ME = NodeId("node 0")


def view_of(*held: tuple[ShardRange, ...]) -> GlobalView:
    view = GlobalView()
    for number, ranges in enumerate(held):
        report = replace(REPORT, cached=ranges)
        view = view.with_local(NodeId(f"node {number}"), WalletId("ab" * 8), report, 0.0)
    return view


def test_who_holds_what_is_added_up() -> None:
    coverage = coverage_of(view_of((), (ShardRange(0, 4),), (ShardRange(2, 6), ShardRange(9, 10)), ()), ME, (), 10)
    assert coverage.nodes == 2
    assert coverage.shards == 7
    assert coverage.copies == (1, 1, 2, 2, 1, 1, 0, 0, 0, 1)


def test_ranges_beyond_the_data_count_for_nothing() -> None:
    coverage = coverage_of(view_of((), (ShardRange(8, 10**9),)), ME, (), 10)
    assert (coverage.shards, sum(coverage.copies)) == (2, 2)


def test_what_this_node_holds_counts_at_once() -> None:
    """Before its first report, and instead of what an older one says."""
    held = (ShardRange(0, 2),)
    assert coverage_of(GlobalView(), ME, held, 10).shards == 2
    coverage = coverage_of(view_of((ShardRange(5, 6),), (ShardRange(1, 3),)), ME, held, 10)
    assert coverage.nodes == 2
    assert coverage.copies == (1, 2, 1, 0, 0, 0, 0, 0, 0, 0)
