"""When a node that is not connected any more counts as gone at the stages it used."""

from __future__ import annotations

from pathlib import Path

import anyio

from neuroshard.types import NodeId
from tests.worlds.nodes import StageWorld, play

DRIVER = NodeId("driver")


def test_a_lost_connection_counts_after_some_seconds_and_a_short_gap_does_not(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        holder = world.add()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: holder.live(0, moves=False))
            world.network.join(DRIVER)
            await anyio.sleep(10)
            world.network.kill(DRIVER)
            await anyio.sleep(2)
            world.network.join(DRIVER)
            await anyio.sleep(20)
            began = anyio.current_time()
            world.network.kill(DRIVER)
            await anyio.sleep(10)
            kept = holder.service.kept
            assert all(DRIVER in nodes and holder.name in nodes for at, nodes in kept if at < began)
            gone = next(at for at, nodes in kept if DRIVER not in nodes)
            assert 2.0 < gone - began < 5.0
            tasks.cancel_scope.cancel()

    play(tmp_path, scenario)
