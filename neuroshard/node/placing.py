"""Which stages of its run this node takes: what it had before, or what the swarm needs most and this computer holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.errors import TooLittleMemoryError
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import StagePlan, plan_of
from neuroshard.model.memory_limit import MEGABYTE, TIER_MB, least_limit_mb, planned_bytes
from neuroshard.node.networking import Networking
from neuroshard.node.proposal import Room
from neuroshard.node.stage_memory import best_load, least_load, need_of
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.placement.stage_choice import choose_stages, fitting_windows

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
QUIET_SECONDS = 1.5  # without news the swarm counts as known
PATIENCE_SECONDS = 5.0  # for the first word of anybody
LONGEST_SECONDS = 10.0


@dataclass(frozen=True)
class Placing:
    """Chooses once a start."""

    swarm: StageSwarm
    networking: Networking
    is_first: bool = False  # of a demo: it takes the first layers, so that the dashboard which opens shows all there is
    now: Callable[[], float] = time.time  # as the membership counts

    async def choose(self, windows: tuple[StageRange, ...], kept: StageRange | None) -> StageRange:
        """One of the windows; what is kept on disk comes first, because others may have nothing.

        Without it the swarm is listened to for a few seconds, those before this call included.
        """
        around_kept = [window for window in windows if kept is not None and window.covers(kept)]
        if around_kept:
            return around_kept[0]
        if kept is not None and any(window.covers(kept) for window in self.swarm.windows):
            return kept  # it had taken more than nodes begin with
        if len(self.swarm.plan) > 1 and self.networking.is_wanted:
            await self._listen()
        coverage = self.swarm.coverage()
        if self.is_first and not coverage.holders:
            windows = tuple(window for window in windows if 0 in window) or windows
        chosen = choose_stages(self.swarm.node_id, self.swarm.wallet_id, windows, coverage)
        if chosen is None:
            raise ValueError("a node without a window for its memory must not come so far")
        if len(self.swarm.plan) > 1:
            log.info("This node takes %s of %d.", chosen.words, len(self.swarm.plan))
        return chosen

    async def _listen(self) -> None:
        """Until nobody new was heard of for a while, which may have gone by before."""
        with anyio.move_on_after(PATIENCE_SECONDS):
            while self.swarm.membership.met_at is None:
                await anyio.sleep(LOOK_SECONDS)
        with anyio.move_on_after(LONGEST_SECONDS):
            while (met_at := self.swarm.membership.met_at) is not None and self.now() - met_at < QUIET_SECONDS:
                await anyio.sleep(LOOK_SECONDS)


def windows_of(parameters: RunParameters, room: Room, most: int | None) -> tuple[StageRange, ...]:
    """The longest runs of stages that this computer holds, at most `most` at once.

    Raises TooLittleMemoryError with numbers.
    """
    plan = plan_of(parameters)

    def fits(stages: StageRange) -> bool:
        if most is not None and len(stages) > most:
            return False
        need = need_of(parameters, stages, room, least_load(parameters, stages))
        return need.fits(room.tier_mb, room.device_tier_mb)

    windows = fitting_windows(len(plan), fits)
    if not windows:
        raise _too_little(parameters, plan, room)
    return windows


def megabytes_for(parameters: RunParameters, stages: StageRange, room: Room) -> int:
    """MB that this process takes when it trains these stages with as much in work as memory allows."""
    need = need_of(parameters, stages, room, best_load(parameters, stages, room))
    return -(-planned_bytes(need.host_bytes, room.tier_mb) // MEGABYTE)


def _too_little(parameters: RunParameters, plan: StagePlan, room: Room) -> TooLittleMemoryError:
    stages = [StageRange(stage, stage + 1) for stage in range(len(plan))]
    needs = [need_of(parameters, stage, room, least_load(parameters, stage)).host_bytes for stage in stages]
    least = least_limit_mb(min(needs))
    allow = f"Allow {-(-least // TIER_MB) * TIER_MB} MB with --memory, "
    help_on = "help without holding layers with `neuroshard trainer`, " if len(plan) > 1 else ""
    what = "This run needs" if len(plan) == 1 else f"The smallest of the {len(plan)} stages of this run needs"
    return TooLittleMemoryError(
        f"{what} {least:,} MB of memory here, but only {room.tier_mb:,} MB may be used, counted in steps of 500 MB.",
        f"{allow}{help_on}or start a new run with another --data-dir.",
    )
