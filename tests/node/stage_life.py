"""Nodes of a StageWorld for as long as a block lasts, and what is asked of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
from stage_world import StageNode, StageWorld

from neuroshard.state.backup_copy import BackupCopy


@asynccontextmanager
async def living(
    world: StageWorld, stages: Sequence[int | None], *, moves: bool = True
) -> AsyncGenerator[list[StageNode]]:
    """Nodes that begin with these stages, while the world trains."""
    nodes = [world.add() for _ in stages]
    async with anyio.create_task_group() as tasks:
        world.tasks = tasks
        tasks.start_soon(world.train)
        for node, stage in zip(nodes, stages, strict=True):
            tasks.start_soon(lambda node=node, stage=stage: node.live(stage, moves=moves))
        yield nodes
        tasks.cancel_scope.cancel()


def copies_of(nodes: Sequence[StageNode], stage: int) -> list[BackupCopy]:
    return [node.copies.kept(stage) for node in nodes if node.copies.kept(stage).meta is not None]


def steps_of(node: StageNode) -> int:
    assert node.stage is not None
    return node.stage.steps


async def until_held(world: StageWorld, stage: int) -> float:
    """Seconds until somebody trains the stage."""
    began = anyio.current_time()
    while not world.holders(stage):
        await anyio.sleep(0.5)
    return anyio.current_time() - began
