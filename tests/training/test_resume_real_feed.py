from __future__ import annotations

from pathlib import Path
from random import Random

import anyio
import pytest
import trio

from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.shard_assignment import RotationRule
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.source import open_source
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import (
    ARCHITECTURE,
    IDENTITY,
    make_stage,
    make_trainer,
    paused_after,
    state_digest,
    tensors_dropped,
    windows,
)

WINDOWS = 40
EAGER = RotationRule(losses=3, memorised_variance=1e9, memorised_mean=1e9)  # leaves a shard after three steps


@pytest.fixture
def genesis_folder(tmp_path: Path) -> Path:
    """16 shards of the made-up language."""
    folder = tmp_path / "genesis"
    width = ARCHITECTURE.sequence_length + 1
    writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=WINDOWS * width)
    for shard in range(16):
        writer.add_shard(windows(shard, WINDOWS).flatten().numpy())
    writer.finish(None, tokenizer=b"{}", next_merge_id=266, now="2026-01-01T00:00:00Z", tokenizer_version="1")
    return folder


def train_on(
    genesis_folder: Path,
    folder: Path,
    compute: ComputeThread,
    last_step: int,
    rule: RotationRule,
    *,
    pauses: tuple[int, ...] = (),
) -> Trainer:
    """Start or resume with the real feed, as a node does, and train up to a step, with long pauses after some steps."""
    stage = make_stage(compute, folder / "checkpoints")

    async def main() -> Trainer:
        fetcher = Fetcher(open_source(str(genesis_folder)), rng=Random(1))
        genesis = await open_genesis(fetcher, folder / "store")
        cache = ShardCache(folder / "cache", limit_bytes=10**8)
        feed = DataFeed(
            genesis,
            cache,
            run_id=IDENTITY.run_id,
            node_id=IDENTITY.node_id,
            sequence_length=ARCHITECTURE.sequence_length,
            vocabulary_size=266,
            start=stage.record.progress.position,
            start_node=stage.record.node_id,
            rule=rule,
        )
        trainer = make_trainer(compute, stage, feed, seconds_before_drop=0.0)

        async def pause() -> None:
            for steps in pauses:
                await paused_after(trainer, steps)
                await tensors_dropped(trainer)
                trainer.resume()
                await trainer.wait_until_resumed()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.run)
            tasks.start_soon(pause)
            await trainer.run(last_step)
            tasks.cancel_scope.cancel()
        assert trainer.snapshot().data.shard is not None
        return trainer

    return trio.run(main)


@pytest.mark.parametrize("rule", [RotationRule(), EAGER], ids=["to the end", "early"])
def test_resuming_is_exact_across_shards_and_early_rotations(
    genesis_folder: Path, tmp_path: Path, compute: ComputeThread, rule: RotationRule
) -> None:
    whole = train_on(genesis_folder, tmp_path / "whole", compute, 14, rule)
    paused = train_on(genesis_folder, tmp_path / "paused", compute, 14, rule, pauses=(2, 3, 10))
    assert state_digest(paused) == state_digest(whole)
    assert paused.record.progress.position == whole.record.progress.position
    for stop_at in (2, 3, 10):
        train_on(genesis_folder, tmp_path / "parts", compute, stop_at, rule)
    resumed = train_on(genesis_folder, tmp_path / "parts", compute, 14, rule)
    assert state_digest(resumed) == state_digest(whole)
    position = resumed.record.progress.position
    assert position == whole.record.progress.position
    assert position is not None
    assert position.order == (4 if rule is EAGER else 1)
