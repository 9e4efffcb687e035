"""When a node goes to other stages."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from neuroshard.membership.stage_coverage import StageRange
from neuroshard.node.training_life import Relocating
from neuroshard.placement.relocation import MoveReason, RelocationTiming, further_moves, planned_moves
from tests.worlds.nodes import StageNode, StageWorld, living, play, until_held


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
                gone.append((await relocating.wanted()).stages)

            for relocating in going:
                world.tasks.start_soon(go, relocating)
            await anyio.sleep(120)
            assert gone == []
            paused = False
            await anyio.sleep(60)
            assert StageRange(2, 3) in gone

    play(tmp_path, scenario)


@pytest.mark.parametrize("leave_seconds", [0.0, 25.0])
def test_one_node_goes_to_a_lost_stage_however_long_it_takes_to_leave_its_own(
    tmp_path: Path, leave_seconds: float
) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1, 0, 1]) as nodes:
            await anyio.sleep(60)
            nodes[2].kill()
            await until_held(world, 2)
            await anyio.sleep(60)
            assert [len(world.holders(stage)) for stage in range(3)] in ([2, 3, 1], [3, 2, 1])

    play(tmp_path, scenario, leave_seconds=leave_seconds)


def test_two_nodes_that_notice_a_loss_at_different_times_do_not_both_go(tmp_path: Path) -> None:
    """The turn of one begins as it sees it when the one before has still the turn as that one sees it."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1], moves=False) as nodes:
            await anyio.sleep(60)
            nodes[2].kill()
            await anyio.sleep(20)
            coverage = nodes[0].swarm.coverage()
            first = {move.node_id for move in planned_moves(coverage)}
            second = {move.node_id for move in further_moves(MoveReason.EMPTY_STAGE, coverage, frozenset(first))}
            early, late = (next(node for node in nodes if node.name in names) for names in (second, first))
            gone = list[StageNode]()

            async def go(node: StageNode) -> None:
                await Relocating(node.swarm, node.windows).wanted()
                gone.append(node)

            for node in (early, late):
                node.news_seconds = 1.0
                world.tasks.start_soon(go, node)
                await anyio.sleep(RelocationTiming().turn_seconds)
            while not gone:  # both may have yielded to each other, and try again
                await anyio.sleep(1)
            await anyio.sleep(10)
            assert len(gone) == 1

    play(tmp_path, scenario)
