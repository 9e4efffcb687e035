"""`checkpoint restore --at` in a swarm: what others keep of the newer states does not come back."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from neuroshard.cli.checkpoint import restore_checkpoint
from tests.worlds.nodes import EPOCH, StageWorld, copies_of, living, play, steps_of


def test_stages_that_were_taken_back_stay_there_although_there_were_second_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            await anyio.sleep(130)
            assert all(len(copies_of(nodes, stage)) == 1 for stage in range(3))
            assert min(map(steps_of, nodes)) > 115
            for node in nodes:
                node.kill()
                restore_checkpoint(at=EPOCH + 115, data_dir=node.data_dir)
                assert "stop them all" in capsys.readouterr().out
            again = [world.add_again(node) for node in nodes]
            for stage, node in enumerate(again):
                world.tasks.start_soon(lambda stage=stage, node=node: node.live(stage, moves=False))
            await anyio.sleep(20)
            assert [100 <= node.began_steps[0] <= 115 for node in again] == [True] * 3

    play(tmp_path, scenario)
