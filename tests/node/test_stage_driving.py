"""The node with the first stage drives: what it has sent to others it never sends again."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio

from neuroshard.node.stage_training import RunningNode
from tests.worlds.clock import until
from tests.worlds.real_nodes import RealNode, RealWorld, play


def begun_by(node: RealNode) -> RunningNode:
    assert node.node is not None
    return node.node


def counted(node: RealNode) -> int:
    """Sequences that a stage has accumulated."""
    trainer = begun_by(node).trainer
    (held,), (record,) = trainer.parts.stages, trainer.records
    return record.progress.sequences + held.service.intake.accumulated.sequences


def test_no_sequence_is_counted_twice_when_the_driving_node_is_killed(small_genesis: Path, tmp_path: Path) -> None:
    async def scenario(world: RealWorld) -> None:
        first, last = await world.node(0), await world.node(1)
        async with anyio.create_task_group() as tasks:
            for node in (first, last):
                tasks.start_soon(node.live)
                await node.networking.up()
            tasks.start_soon(world.keep_reporting)
            for stage, node in enumerate((first, last)):
                begun = await node.begin(stage)
                tasks.start_soon(begun.trainer.run)
            trainer = begun_by(first).trainer
            await until(lambda: trainer.steps >= 1)
            await trainer.save_now()
            saved = trainer.steps
            await until(lambda: trainer.steps > saved + 1)
            trainer.pause()
            await trainer.wait_until_paused()
            on_disk = shutil.copytree(first.data_dir, tmp_path / "killed")  # all that a kill would leave now
            sent = counted(last)
            again = await (await world.node(0, on_disk)).begin(0)
            assert again.trainer.steps == saved  # its own stage goes back
            assert (again.feed.position.order, again.feed.position.window) >= (0, sent)
            tasks.cancel_scope.cancel()

    play(small_genesis, tmp_path, scenario)
