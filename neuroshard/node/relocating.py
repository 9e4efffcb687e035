"""Watches whether this node should hold other stages than it does, because the swarm lacks some."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.node.stage_safety import unobtainable
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.placement.relocation import (
    Move,
    MoveReason,
    PendingRelocation,
    RelocationTiming,
    may_proceed,
    should_move,
)

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@dataclass
class Relocating:
    """One node's part in keeping all stages held."""

    swarm: StageSwarm
    windows: tuple[StageRange, ...]  # the longest runs that this computer holds
    times: RelocationTiming = field(default_factory=RelocationTiming)
    has_state: Callable[[int], bool] = lambda _: False  # of a stage, on this disk
    may_go: Callable[[], bool] = lambda: True

    async def wanted(self) -> StageRange:
        """Wait until it is this node's turn to go; the stages to go to."""
        unrest = PendingRelocation()
        while True:
            await anyio.sleep(LOOK_SECONDS)
            coverage, now = self._coverage(), anyio.current_time()
            unrest = unrest.seen(coverage, now)
            move = should_move(self.swarm.node_id, unrest, now, self.times)
            is_wanted = move is not None and self._fits(move.stages) and self.may_go()
            if move is not None and is_wanted and await self._can_begin(move) and await self._is_first(move, coverage):
                log.info("Going to %s: %s.", move.stages.words, move.reason.value.replace("_", " "))
                return move.stages

    def _coverage(self) -> StageCoverage:
        """With this node where it truly is, whatever its last report said of where it goes."""
        swarm, held = self.swarm, self.swarm.held
        if held is None:
            return swarm.coverage()
        return swarm.coverage().with_holder(StageHolder(swarm.node_id, swarm.wallet_id, held, windows=swarm.windows))

    def _fits(self, stages: StageRange) -> bool:
        return any(window.covers(stages) for window in self.windows)

    async def _is_first(self, move: Move, before: StageCoverage) -> bool:
        """Say that this node goes, and wait whether somebody else does, who has seen the loss at another moment."""
        swarm, is_first = self.swarm, False
        mover = next(holder for holder in before.holders if holder.node_id == swarm.node_id)
        swarm.go_to(move.stages)
        try:
            await anyio.sleep(self.times.claim_seconds)
            is_first = self.may_go() and may_proceed(mover, move, before, swarm.coverage())
        finally:
            if not is_first:
                swarm.go_to(None)
        return is_first

    async def _can_begin(self, move: Move) -> bool:
        """Whether the state of the stages can be had: what this node trains now is not left for nothing."""
        if move.reason is not MoveReason.EMPTY_STAGE:
            return True
        empty = set(self.swarm.coverage().empty)
        return not await unobtainable(self.swarm, empty.intersection(move.stages), self.has_state)
