from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.aggregation import CentredClipping, Krum, Mean, Median, MultiKrum, TrimmedMean
from neuroshard.swarm.group import Group, RoundDescriptor, aggregator_name, round_id
from neuroshard.swarm.schedule import may_download_averaged, may_serve_averaged, round_is_due
from neuroshard.types import NodeId, RunId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
DESCRIPTOR = RoundDescriptor(RunId("ab" * 32), 0, 3, "fp32", "trimmed_mean(0.1)", "cd" * 32)


def test_a_group_is_the_same_whoever_lists_it() -> None:
    assert Group((C, A, B), A).members == Group((B, C, A), C).members == (A, B, C)
    assert Group((C, A, B), B).others == (A, C)
    assert Group.alone(A).others == ()


def test_a_member_counts_once_and_a_group_holds_its_node() -> None:
    with pytest.raises(ValueError, match="twice"):
        Group((A, B, B), A)
    with pytest.raises(ValueError, match="has this node"):
        Group((A, B), C)


def test_every_field_of_the_descriptor_changes_its_hash() -> None:
    changes: list[dict[str, Any]] = [
        {"run": RunId("ee" * 32)},
        {"stage": 1},
        {"outer_step": 4},
        {"codec": "int8"},
        {"aggregator": "median"},
        {"schema_hash": "00" * 32},
        {"view": 1},
    ]
    hashes = {DESCRIPTOR.hash, *(replace(DESCRIPTOR, **change).hash for change in changes)}
    assert len(hashes) == 8
    assert all(len(value) == 32 for value in hashes)
    assert DESCRIPTOR.hash.hex() == replace(DESCRIPTOR).hash.hex()


def test_the_round_id_names_descriptor_and_members() -> None:
    whole, part = Group((A, B, C), A), Group((A, B), A)
    ids = {round_id(DESCRIPTOR, whole), round_id(DESCRIPTOR, part), round_id(replace(DESCRIPTOR, view=1), part)}
    assert len(ids) == 3
    assert round_id(DESCRIPTOR, part) == round_id(DESCRIPTOR, Group((B, A), B))


def test_aggregators_have_names_with_their_settings() -> None:
    configs = (TrimmedMean(0.25), Median(), Mean(), Krum(), MultiKrum(), CentredClipping())
    names = ["trimmed_mean(0.25)", "median", "mean", "krum", "multi_krum", "centred_clipping"]
    assert [aggregator_name(config) for config in configs] == names


def due(counted: int = 0, members: int = 1, elapsed: float = 0.0) -> bool:
    return round_is_due(
        counted_sequences=counted,
        enough_sequences=500 * 8 * members,
        elapsed_seconds=elapsed,
        max_round_seconds=3600,
    )


def test_a_round_is_due_by_work_or_by_time() -> None:
    assert not due(3999)
    assert due(4000)
    assert not due(11_999, members=3)
    assert due(12_000, members=3)
    assert not due(1, elapsed=3599)
    assert due(1, elapsed=3600)
    assert not due(0, elapsed=1e9)  # nothing to contribute


@given(counted=st.integers(0, 10**6), more=st.integers(0, 10**6), members=st.integers(1, 50))
def test_more_work_never_makes_a_round_less_due(counted: int, more: int, members: int) -> None:
    assert due(counted + more, members) >= due(counted, members)


def test_senseless_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        due(members=0)
    with pytest.raises(ValueError, match="not negative"):
        due(counted=-1)


def test_a_state_of_averaged_gradients_is_fetched_while_a_step_is_young() -> None:
    assert may_download_averaged(0, 1024, 0.0)
    assert may_download_averaged(102, 1024, 0.0)
    assert not may_download_averaged(103, 1024, 179.0)
    assert may_download_averaged(103, 1024, 180.0)  # its next step may be far away


def test_such_a_state_is_given_before_a_fifth_of_a_step_is_in() -> None:
    assert may_serve_averaged(204, 1024, 0.0)
    assert not may_serve_averaged(205, 1024, 0.0)
    assert not may_serve_averaged(4096, 1024, 59.0)
    assert may_serve_averaged(4096, 1024, 60.0)  # its next step may wait for who asks
