"""How safe the state of every stage is: how old the copy of one with a single holder is, and which nobody can give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio

from neuroshard.node.joining import is_obtainable
from neuroshard.node.stage_swarm import StageSwarm, ToldCopy
from neuroshard.state.replica_status import query_statuses
from neuroshard.types import NodeId

LOOK_SECONDS = 10.0


@dataclass
class StageSafety:
    """One for a node: asks the others for what only they know, and keeps it in the swarm for whoever tells people."""

    swarm: StageSwarm
    has_state: Callable[[int], bool] = lambda _: False  # of a stage, on this disk

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await anyio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask about all stages."""
        coverage = self.swarm.coverage()
        told = dict[int, ToldCopy]()

        async def ask(stage: int, holder: NodeId) -> None:
            answers = await query_statuses(self.swarm.asking, self.swarm.name_of(stage), [holder])
            if holder in answers:
                told[stage] = ToldCopy(holder, answers[holder].copied_seconds, anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._find_unobtainable, coverage.missing)
            for stage in range(coverage.stage_count):
                holder = self.swarm.sole_holder(stage)
                if holder is not None and holder != self.swarm.node_id:
                    tasks.start_soon(ask, stage, holder)
        self.swarm.told_copies = told

    async def _find_unobtainable(self, missing: Iterable[int]) -> None:
        self.swarm.unobtainable = await unobtainable(self.swarm, missing, self.has_state)


async def unobtainable(swarm: StageSwarm, stages: Iterable[int], has_state: Callable[[int], bool]) -> frozenset[int]:
    """Those of the stages of which neither this disk nor anybody who answers has the state."""
    return frozenset([stage for stage in stages if not (has_state(stage) or await is_obtainable(swarm, stage))])
