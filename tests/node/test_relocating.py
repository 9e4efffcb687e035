"""When a node goes to other stages."""

from __future__ import annotations

from pathlib import Path

import anyio
from stage_life import living
from stage_world import StageWorld, play

from neuroshard.node.relocating import Relocating
from neuroshard.swarm.stage_coverage import StageRange


def test_a_paused_node_stays_and_goes_when_it_is_resumed(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0], moves=False) as nodes:
            await anyio.sleep(60)
            nodes[2].kill()
            windows = tuple(StageRange(index, index + 1) for index in range(3))
            paused = True
            going = [Relocating(nodes[one].swarm, windows, may_go=lambda: not paused) for one in (0, 3)]
            gone = list[StageRange]()

            async def go(relocating: Relocating) -> None:
                gone.append(await relocating.wanted())

            for relocating in going:
                world.tasks.start_soon(go, relocating)
            await anyio.sleep(120)
            assert gone == []
            paused = False
            await anyio.sleep(60)
            assert StageRange(2, 3) in gone

    play(tmp_path, scenario)
