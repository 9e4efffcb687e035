"""What a node tells of its shards: what each is for, whether it is here, where it came from, whether it was checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from neuroshard.data.shard_assignment import MOST_ROWS, UPCOMING, Assignment, shards_by_use
from neuroshard.status.data import ShardOrigin, ShardStatus, ShardUse
from neuroshard.types import ShardId, ShardRange
from tests.worlds.data_sets import ASSIGNED, NODE, RUN, make_feed, run, write_genesis


def test_uses_come_in_their_order_and_are_bounded() -> None:
    assigned = Assignment(RUN, NODE, 600_000)
    cached = [ShardId(number) for number in range(0, 4000, 2)]
    uses = shards_by_use(assigned, 7, [ShardId(599_999)], cached)
    assert len(uses) == MOST_ROWS
    assert list(uses.values())[: UPCOMING + 2] == [
        ShardUse.IN_USE,
        ShardUse.NEXT,
        *[ShardUse.ASSIGNED] * (UPCOMING - 1),
        ShardUse.HELD_OUT,
    ]
    assert list(uses)[: UPCOMING + 1] == [assigned.shard_at(7 + i) for i in range(UPCOMING + 1)]


def test_a_small_data_set_names_no_shard_twice() -> None:
    assigned = Assignment(RUN, NODE, 2)
    assert shards_by_use(assigned, 5, [], [ShardId(0), ShardId(1)]).keys() == {0, 1}


def test_the_table_follows_the_feed(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        assert feed.status().shards[0] == ShardStatus(ASSIGNED.shard_at(0), ShardUse.IN_USE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.run)
            await feed.next_batch(26)
            await feed.held_out()
            while not feed.status().next_shard_ready:
                await anyio.sleep(0.002)
            tasks.cancel_scope.cancel()
        rows = {row.shard: row for row in feed.status().shards}
        held_out = next(row for row in rows.values() if row.use is ShardUse.HELD_OUT)
        here = [rows[ASSIGNED.shard_at(order)] for order in (0, 1, 2)]
        assert [row.use for row in here] == [ShardUse.READ, ShardUse.IN_USE, ShardUse.NEXT]
        for row in (*here, held_out):
            assert (row.bytes, row.origin, row.verified) == (800, ShardOrigin.SOURCE, True)
        later = rows[ASSIGNED.shard_at(3)]
        assert (later.use, later.bytes, later.origin, later.verified) == (ShardUse.ASSIGNED, None, None, False)
        again = await make_feed(folder, tmp_path, start=feed.position, start_node=NODE)
        await again.next_batch(1)
        row = again.status().shards[0]
        assert (row.shard, row.origin, row.verified) == (ASSIGNED.shard_at(1), ShardOrigin.EARLIER, True)

    run(work)


def test_an_evicted_shard_is_told_as_gone(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        await feed.next_batch(76)
        feed.limit_storage(800)
        told = {row.shard: row.bytes for row in feed.status().shards}
        assert told[ASSIGNED.shard_at(3)] == 800
        assert ASSIGNED.shard_at(0) not in told

    run(work)


def test_shards_of_another_data_set_in_the_cache_are_not_told_as_ours(tmp_path: Path) -> None:
    """Two runs share a cache: what one left is neither this one's nor offered to its nodes."""
    write_genesis(tmp_path / "one", tokens=400)
    write_genesis(tmp_path / "other", tokens=401)

    async def work() -> None:
        first = await make_feed(tmp_path / "one", tmp_path)
        await first.next_batch(100)
        shutil.rmtree(tmp_path / "one")
        feed = await make_feed(tmp_path / "other", tmp_path)
        await feed.next_batch(1)
        in_use = ASSIGNED.shard_at(0)
        assert feed.status().cached_shards >= 5
        assert feed.status().shared == (ShardRange(in_use, in_use + 1),)
        assert [row.shard for row in feed.status().shards if row.bytes is not None] == [in_use]

    run(work)


def test_unverified_data_are_never_told_as_verified(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g")

    async def work() -> None:
        feed = await make_feed(tmp_path / "g", tmp_path)
        await feed.next_batch(1)
        row = feed.status().shards[0]
        assert row.bytes is not None
        assert not row.verified

    run(work)
