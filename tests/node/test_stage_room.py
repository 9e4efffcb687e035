"""Nodes with room for more layers than they hold, or for some layers only: an empty stage is filled by who can."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from neuroshard.membership.stage_coverage import StageRange
from neuroshard.node.own_stages import StageChooser
from tests.worlds.nodes import StageNode, StageWorld, living, now, play, steps_of

PAIRS = (StageRange(0, 2), StageRange(1, 3))
HEAVY_END = (StageRange(0, 2), StageRange(2, 3))  # the last stage fits alone, or the others do
NOT_THE_END = (StageRange(0, 2),)


def with_room(nodes: list[StageNode], *windows: tuple[StageRange, ...]) -> None:
    for node, fits in zip(nodes, windows, strict=True):
        node.windows = fits


async def until_whole(world: StageWorld, seconds: float) -> None:
    with anyio.fail_after(seconds):
        while not all(world.holders(stage) for stage in range(3)):
            await anyio.sleep(0.5)


@pytest.mark.parametrize("lost", range(3))
def test_without_a_spare_node_one_with_room_holds_the_empty_stage_beside_its_own(tmp_path: Path, lost: int) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2]) as nodes:
            with_room(nodes, PAIRS, PAIRS, PAIRS)
            await anyio.sleep(100)
            steps = {stage: steps_of(node) for stage, node in enumerate(nodes)}
            nodes[lost].kill()
            await anyio.sleep(5)
            await until_whole(world, 80)
            (wide,) = [node for node in world.alive() if len(node.held) == 2]
            assert lost in wide.held
            for stage, began in zip(wide.held, wide.began_steps[-2:], strict=True):
                copy_age = 45 if stage == lost else 0  # of its own nothing is lost
                assert steps[stage] - copy_age <= began <= steps[stage] + 10
            before = min(stage.steps for node in world.alive() for stage in node.stages)
            await anyio.sleep(60)
            assert min(stage.steps for node in world.alive() for stage in node.stages) > before + 40
            assert sum(len(node.began_steps) for node in nodes) == 5  # and nobody else has moved

    play(tmp_path, scenario)


def test_a_spare_node_goes_before_another_one_takes_more_on(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0]) as nodes:
            with_room(nodes, PAIRS, PAIRS, PAIRS, PAIRS)
            await anyio.sleep(60)
            nodes[2].kill()
            await anyio.sleep(5)
            await until_whole(world, 40)
            assert sorted(node.held for node in world.alive()) == [(0,), (1,), (2,)]

    play(tmp_path, scenario)


def test_nodes_whose_memory_fits_runs_of_unequal_length_fill_an_empty_stage(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [None, None, None], moves=True) as nodes:
            with_room(nodes, HEAVY_END, HEAVY_END, HEAVY_END)
            for node, stages in zip(nodes, (StageRange(0, 2), StageRange(0, 2), StageRange(2, 3)), strict=True):
                await anyio.sleep(0.5)
                world.tasks.start_soon(node.take, stages)
            await anyio.sleep(60)
            nodes[2].kill()
            await anyio.sleep(5)
            await until_whole(world, 40)
            assert sorted(node.held for node in world.alive()) == [(0, 1), (2,)]

    play(tmp_path, scenario)


def test_a_stage_too_large_for_every_newcomer_is_named_until_one_comes_that_holds_it(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1], moves=True) as nodes:
            with_room(nodes, NOT_THE_END, NOT_THE_END)

            async def newcomer(*windows: StageRange) -> StageNode:
                node = world.add()
                node.windows = windows
                placing = StageChooser(node.swarm, node.networking, now=now)
                world.tasks.start_soon(lambda: node.live(None))
                await anyio.sleep(10)  # it hears of the others
                world.tasks.start_soon(node.take, await placing.choose(windows, None))
                return node

            small = [await newcomer(*NOT_THE_END) for _ in range(3)]
            await anyio.sleep(300)
            assert all(node.held and 2 not in node.held for node in small)
            assert {node.swarm.missing() for node in world.alive()} == {"Layer 3 is missing."}
            assert [stage.steps for node in world.alive() for stage in node.stages if stage.steps] == []
            large = await newcomer(StageRange(0, 3))
            await until_whole(world, 30)
            assert 2 in large.held
            await anyio.sleep(20)
            assert [stage.steps for node in world.alive() for stage in node.stages if not stage.steps] == []
            assert {node.swarm.missing() for node in world.alive()} == {""}

    play(tmp_path, scenario)
