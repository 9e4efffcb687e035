"""Trains as long as the node lives: one set of stages after another, with nothing left of the previous set."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio

from neuroshard.errors import StorageError
from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.network.tasks import Companion, accompanied
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.joining import unobtainable
from neuroshard.node.process import StopRequest
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.stage_training import NodeContext, RunningNode, StageTraining
from neuroshard.placement.relocation import (
    Move,
    MoveReason,
    PendingRelocation,
    RelocationTiming,
    may_proceed,
    should_move,
)
from neuroshard.status.board import Publisher
from neuroshard.status.snapshot import NodeState
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@dataclass
class Relocating:
    """Decides when this node moves to stages that the swarm needs more."""

    swarm: StageSwarm
    windows: tuple[StageRange, ...]  # the longest sequences of stages that fit this computer
    times: RelocationTiming = field(default_factory=RelocationTiming)
    has_state: Callable[[int], bool] = lambda _: False  # whether this disk has a stage's state
    may_go: Callable[[], bool] = lambda: True

    async def wanted(self) -> Move:
        """Wait until it is this node's turn to move; return the move."""
        pending = PendingRelocation()
        while True:
            await sleep_to_tick(LOOK_SECONDS)
            coverage, now = self._coverage(), anyio.current_time()
            pending = pending.seen(coverage, now)
            move = should_move(self.swarm.node_id, pending, now, self.times)
            is_wanted = move is not None and self._fits(move.stages) and self.may_go()
            if move is not None and is_wanted and await self._can_begin(move) and await self._is_first(move, coverage):
                _LOG.info("Moving to %s: %s.", move.stages.words, move.reason.value.replace("_", " "))
                return move

    def _coverage(self) -> StageCoverage:
        """Coverage with the stages that this node really holds: its last report may list its destination instead."""
        swarm, held = self.swarm, self.swarm.held
        if held is None:
            return swarm.coverage()
        return swarm.coverage().with_holder(StageHolder(swarm.node_id, swarm.wallet_id, held, windows=swarm.windows))

    def _fits(self, stages: StageRange) -> bool:
        return any(window.covers(stages) for window in self.windows)

    async def _is_first(self, move: Move, before: StageCoverage) -> bool:
        """Announce the move and wait `claim_seconds`; return whether this node comes first.

        Another node may have noticed the loss at the same time, and both must not move to the same stages.
        """
        swarm, is_first = self.swarm, False
        mover = next(holder for holder in before.holders if holder.node_id == swarm.node_id)
        swarm.go_to(move.stages)
        try:
            await anyio.sleep(self.times.claim_seconds)
            is_first = self.may_go() and may_proceed(mover, move, before, swarm.coverage())
        finally:  # also when cancelled: otherwise the others would count on a node that does not come
            if not is_first:
                swarm.go_to(None)
        return is_first

    async def _can_begin(self, move: Move) -> bool:
        """Whether the stages' state can be obtained: the node must not leave its present stages in vain."""
        if move.reason is not MoveReason.EMPTY_STAGE:
            return True
        empty = set(self.swarm.coverage().empty)
        return not await unobtainable(self.swarm, empty.intersection(move.stages), self.has_state)


@dataclass(frozen=True)
class _Departure:
    """The stages to start next, and whether open microbatches are given up because nobody can use or finish them."""

    stages: StageRange
    abandons_work: bool


OTHER_LAYERS = "Saving its progress before it moves to the layers that the swarm needs now."


class PublishedState(Protocol):
    """Publishes the state of the running parts; in the product an Observer."""

    async def run(self) -> None:
        """Publish regularly until cancelled."""
        ...

    def publish(self) -> None:
        """Publish once, at once."""
        ...


@dataclass
class TrainingLife:
    """Trains one set of stages after another, once per start.

    No other object may keep a RunningNode after this one drops it, because its weights would stay in memory.
    """

    training: StageTraining
    loop: CommandLoop
    stop: StopRequest
    publisher: Publisher
    observer: Callable[[RunningNode], PublishedState]
    steps: int | None = None  # to train from now on; None: without a limit
    _node: RunningNode | None = field(default=None, init=False)

    async def run(
        self, begin: Callable[[], Awaitable[RunningNode]], companions: Callable[[NodeContext], Sequence[Companion]]
    ) -> None:
        """Start up and train until a stop; companions run next to the training. Raises NeuroShardError.

        A stop during a start-up cancels it.
        """
        if await self._began(begin, "nothing was trained since the start"):
            ground = self._present().ground
            await accompanied(partial(self._go_on, ground), *companions(ground))

    async def _began(self, begin: Callable[[], Awaitable[RunningNode]], nothing_lost: str) -> bool:
        """Build the parts; return False if a stop came first and cancelled this."""
        with anyio.CancelScope() as scope:

            def give_up() -> None:
                self.publisher.state(NodeState.STOPPING, f"Stopping; {nothing_lost}.")
                scope.cancel()

            self.stop.react(give_up)
            self._node = await begin()
            return True
        return False

    async def _go_on(self, ground: NodeContext) -> None:
        """Train these stages, then others whenever the swarm needs them more, until a stop."""
        while True:
            stages = await self._train()
            if stages is None or self.stop.reason is not None:
                ground.swarm.go_to(None)
                return
            # Both references go before the new stages are built, because old and new weights may not fit together.
            self._node = None
            self.loop.detach()
            if not await self._began(partial(self.training.begin, ground, stages), "everything trained is saved"):
                return

    async def _train(self) -> StageRange | None:
        """Train until a stop, the last step, or a reason to start stages again; return those stages, otherwise None.

        The reason is that the swarm needs other stages more, or that other replicas continue from another state.

        Raises NeuroShardError, even if only the final checkpoint was not saved: the user who stopped the node must not
        believe that everything is safe.
        """
        node = self._present()
        trainer, observer = node.trainer, self.observer(node)
        self.loop.attach(node)
        self.stop.react(trainer.stop)
        last_step = None if self.steps is None else trainer.record.progress.steps + self.steps
        elsewhere = list[StageRange]()

        async def leave_for(wanted: Callable[[], Awaitable[_Departure]]) -> None:
            departure = await wanted()
            elsewhere.append(departure.stages)
            node.ground.swarm.go_to(departure.stages)  # before the final save, so that others count on it there
            trainer.stop(OTHER_LAYERS, is_for_good=False, abandons_work=departure.abandons_work)

        companions: list[Companion] = [observer.run, node.samples.run]
        if node.stages is not None:
            companions += [
                partial(leave_for, partial(self._needed, node)),
                partial(leave_for, partial(_followed, node)),
            ]
        if node.is_driving:
            companions.append(node.feed.run)
        if node.keeper is not None:
            companions.append(node.keeper.run)
        try:
            await accompanied(partial(trainer.run, last_step), *companions)
        finally:
            observer.publish()
        if node.keeper is not None:
            await node.keeper.save()
        if trainer.last_save_failed:
            raise StorageError(
                "The final checkpoint could not be saved; the steps since the one before it are lost.",
                "The log shows the reason. Older checkpoints are still there: `neuroshard checkpoint list`.",
            )
        return elsewhere[0] if elsewhere else None

    async def _needed(self, node: RunningNode) -> _Departure:
        """Wait until the swarm needs other stages more and this node is not paused."""
        ground, trainer = node.ground, node.trainer
        has_state = partial(self.training.has_checkpoint, ground)
        relocating = Relocating(
            ground.swarm, ground.windows, has_state=has_state, may_go=lambda: not trainer.is_pause_wanted
        )
        move = await relocating.wanted()
        # no microbatch passes through an empty stage
        return _Departure(move.stages, abandons_work=move.reason is MoveReason.EMPTY_STAGE)

    def _present(self) -> RunningNode:
        if self._node is None:
            raise AssertionError("nothing has begun")
        return self._node


async def _followed(node: RunningNode) -> _Departure:
    """Wait until other replicas continue from another state and this node is not paused."""
    stages = await node.must_follow()
    await node.trainer.until_no_pause_is_wanted()
    return _Departure(stages, abandons_work=True)  # it belongs to a state that nobody continues
