"""The feed: exact order, exact resume, rotation and prefetch."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuroshard.data.shard_assignment import Assignment, RotationReason, held_out_shards
from neuroshard.types import DataPosition, NodeId, ShardId
from tests.worlds.data_sets import (
    ASSIGNED,
    LENGTH,
    NODE,
    RUN,
    TOKENS,
    expected_window,
    folder_files,
    make_feed,
    rows_of,
    run,
    shard_tokens,
)
from tests.worlds.file_servers import HostileServer


def test_batches_are_the_windows_a_peer_computes_across_shards_and_passes(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        number = 0
        for size in [7, 25, 1, 60, 8, 200, 100]:
            batch = await feed.next_batch(size)
            assert batch.input_ids.shape == batch.labels.shape == (size, LENGTH)
            assert batch.token_count == size * LENGTH
            assert rows_of(batch) == [expected_window(number + i) for i in range(size)]
            number += size
            order, window = divmod(number, 25)
            assert batch.position == feed.position == DataPosition(order, ASSIGNED.shard_at(order), window)
        assert feed.status().passes == 1
        assert feed.status().shards_seen == 15
        assert feed.status().rotations == 16

    run(work)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(st.integers(1, 40), max_size=5), after=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_resuming_anywhere_gives_the_same_batches(
    folder: Path, tmp_path: Path, before: list[int], after: list[int]
) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        position = None
        for size in before:
            position = (await feed.next_batch(size)).position
        resumed = await make_feed(folder, tmp_path, start=position, start_node=NODE)
        assert "starts again" not in resumed.status().explanation
        for size in after:
            wanted, got = await feed.next_batch(size), await resumed.next_batch(size)
            assert torch.equal(wanted.input_ids, got.input_ids)
            assert torch.equal(wanted.labels, got.labels)
            assert wanted.position == got.position

    run(work)


def test_under_another_node_the_assignment_starts_anew_and_says_so(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        position = DataPosition(3, ASSIGNED.shard_at(3), 4)
        other = await make_feed(folder, tmp_path, start=position, start_node=NODE, node=NodeId("other"))
        assert other.position == DataPosition(0, Assignment(RUN, NodeId("other"), 16).shard_at(0), 0)
        assert "starts again" in other.status().explanation
        odd = await make_feed(folder, tmp_path, start=DataPosition(3, ShardId(ASSIGNED.shard_at(3) + 1), 4))
        assert "starts again" in odd.status().explanation
        assert odd.position.order == odd.position.window == 0

    run(work)


def test_held_out_sequences_are_pinned_and_never_trained_on(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        a = await make_feed(folder, tmp_path / "a")
        b = await make_feed(folder, tmp_path / "b", node=NodeId("other"))
        held = await a.held_out()
        assert held.sequences.shape == (25, LENGTH + 1)  # the shard has no more
        assert torch.equal(held.sequences, await b.held_out_sequences())
        assert torch.equal(held.sequences[:10], await a.held_out_sequences(10))
        assert len({tuple(row) for row in held.sequences.tolist()}) == 25
        (shard,) = held_out_shards(RUN, 16)
        counts = np.bincount(shard_tokens(shard, TOKENS))
        share = counts[counts > 0] / TOKENS
        assert held.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())
        shards = {(await a.next_batch(25)).position.shard for _ in range(15)}
        assert shards.isdisjoint(held_out_shards(RUN, 16))

    run(work)


def test_plateau_rotates_at_the_next_batch_only_and_is_recorded(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        await feed.next_batch(5, step=1)
        for step in range(20):
            feed.note_evaluation(0.01, None, step)
        assert feed.position.order == 0
        batch = await feed.next_batch(2, step=21)
        assert rows_of(batch) == [expected_window(25), expected_window(26)]
        assert [(r.shard, r.first_step, r.reason) for r in feed.rotations] == [
            (ASSIGNED.shard_at(1), 21, RotationReason.MEMORISED)
        ]
        assert "memorised" in feed.status().last_rotation_reason
        for step in range(30):
            feed.note_evaluation(2.0, 3.5 if step == 25 else None, step)
        assert (await feed.next_batch(1)).position.order == 2
        assert feed.rotations[-1].reason is RotationReason.OVERFITTED
        assert (await feed.next_batch(1)).position.order == 2

    run(work)


def test_the_next_shard_is_fetched_ahead(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed.run)
                for order in range(3):
                    while not feed.status().next_shard_ready:
                        await anyio.sleep(0.002)
                    fetched = [name for name, _ in server.requests if name.startswith("shard_")]
                    assert fetched == [f"shard_{ASSIGNED.shard_at(i)}.bin" for i in range(order + 2)]
                    await feed.next_batch(25)
                tasks.cancel_scope.cancel()

    run(work)


def test_next_batch_and_prefetch_fetch_a_shard_once(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed.run)
                tasks.start_soon(feed.held_out)
                await feed.next_batch(60)
                tasks.cancel_scope.cancel()
            assert len(server.requests) == len(set(server.requests))

    run(work)
