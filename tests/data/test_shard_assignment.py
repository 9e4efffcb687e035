"""Assignment: every peer computes the same shards, and nobody trains on held-out ones."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.data.shard_assignment import Assignment, held_out_count, held_out_shards, primary_shard
from neuroshard.data.windows import held_out_window_key, window_key, window_order
from neuroshard.errors import DataError
from neuroshard.types import NodeId, RunId, ShardId

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "assignment.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["assignments"])
def test_golden_assignments(vector: dict[str, object]) -> None:
    run, node, total = RunId(str(vector["run"])), NodeId(str(vector["node"])), int(str(vector["total_shards"]))
    assignment = Assignment(run, node, total)
    assert primary_shard(run, node, total) == vector["primary"]
    assert [assignment.shard_at(order) for order in range(8)] == vector["first_shards"]
    assert list(islice(held_out_shards(run, total), 4)) == vector["first_held_out"]


@pytest.mark.parametrize("vector", VECTORS["window_orders"])
def test_golden_window_orders(vector: dict[str, object]) -> None:
    run, node = RunId(str(vector["run"])), NodeId(str(vector["node"]))
    shard, count = ShardId(int(str(vector["shard"]))), int(str(vector["windows"]))
    assert window_order(window_key(run, node, shard), count)[:10].tolist() == vector["first"]
    assert window_order(held_out_window_key(run, shard), count)[:10].tolist() == vector["first_held_out"]


@settings(deadline=None, max_examples=25)
@given(total=st.integers(2, 300), run=st.text(max_size=5), node=st.text(max_size=5))
def test_one_pass_reads_every_trainable_shard_once_in_order(total: int, run: str, node: str) -> None:
    assignment = Assignment(RunId(run), NodeId(node), total)
    held_out = set(held_out_shards(RunId(run), total))
    one_pass = [assignment.shard_at(order) for order in range(assignment.length)]
    assert len(held_out) == held_out_count(total) == max(1, total // 64)
    assert sorted([*one_pass, *held_out]) == list(range(total))
    first = primary_shard(RunId(run), NodeId(node), total)
    wrapped = [ShardId((first + i) % total) for i in range(total)]
    assert one_pass == [shard for shard in wrapped if shard not in held_out]
    assert assignment.shard_at(assignment.length) == one_pass[0]


def test_held_out_shards_do_not_depend_on_the_node_and_spread_evenly() -> None:
    total = 64 * 100
    held_out = set(held_out_shards(RunId("run"), total))
    assert {shard // 64 for shard in held_out} == set(range(100))


def test_huge_data_set_costs_few_hashes() -> None:
    assignment = Assignment(RunId("run"), NodeId("node"), 10_000_000)
    assert 0 <= assignment.shard_at(123_456_789) < 10_000_000


def test_one_shard_is_not_enough() -> None:
    with pytest.raises(DataError, match="at least 2"):
        Assignment(RunId("run"), NodeId("node"), 1)
