"""The trainer of a node: the stages that it holds, its driver when it drives, and what others may ask of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import anyio

from neuroshard.errors import NotReadyError, StorageError
from neuroshard.status.commands import CommandResult, Generate, GenerationSummary
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import NodeState
from neuroshard.training.composition import Shared, compose
from neuroshard.training.control import PAUSED_BY_USER, Control, PauseWish
from neuroshard.training.parts import TrainerParts
from neuroshard.training.record import TrainingRecord
from neuroshard.training.stage_loop import StageLoop
from neuroshard.training.view import TrainerSnapshot, TrainerState, trainer_snapshot

_LOG = logging.getLogger(__name__)

FINAL_CHECKPOINT = "Saving a final checkpoint."


class Trainer:
    """Trains the stages of a node until it is stopped, and drives microbatches when it has data.

    What it tells is about its primary loop: that of the first layers it holds, or of its driving when it holds none.
    Belongs to the event loop.
    """

    def __init__(
        self,
        parts: TrainerParts,
        records: Sequence[TrainingRecord] = (),
        *,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        wish: PauseWish | None = None,
    ) -> None:
        """`records` of earlier starts, one for each stage, or one for a trainer without stages; new ones by default.

        A `wish` for a pause that outlives this trainer holds from its beginning.
        """
        self.parts = parts
        self._control = Control(wish or PauseWish(monotonic, wall_clock))
        records = records or [TrainingRecord() for _ in parts.stages or (None,)]
        self._loops = compose(parts, records, Shared(self._control, wall_clock, monotonic, self._loop_changed))
        self._state = NodeState.STARTING
        self._stop_words = FINAL_CHECKPOINT
        self._state_changed = anyio.Event()
        self._is_running = False

    async def run(self, last_step: int | None = None) -> None:
        """Train until `stop` or until `last_step` is done, then save final checkpoints.

        Errors that training cannot repair rise from here. The stages behind the first one end with it.
        """
        if self._loops.drive is not None:
            self._loops.drive.watch.tell_feed_again(self.record)
        async with anyio.create_task_group() as background:
            for loop in self._loops.stages:
                loop.stage.background = background
            self._is_running = True
            try:
                await self._work(last_step)
            finally:
                self._is_running = False
                with anyio.CancelScope(shield=True):
                    await self._settle()
        self._set_state(NodeState.NOT_TRAINING)

    @property
    def record(self) -> TrainingRecord:
        """What the primary loop knows beside tensors."""
        return self._loops.primary.record

    @property
    def records(self) -> tuple[TrainingRecord, ...]:
        """What each stage knows beside tensors."""
        return tuple(loop.record for loop in self._loops.stages)

    @property
    def steps(self) -> int:
        """Applied inner steps of the primary loop so far."""
        return self._loops.primary.steps

    @property
    def is_pause_wanted(self) -> bool:
        """Whether it is paused, or will be as soon as it can."""
        return self._control.is_paused

    def pause(self, duration_seconds: float | None = None, reason: str = PAUSED_BY_USER) -> None:
        """Stop after the microbatches in work and free the accelerator; nothing is lost."""
        self._control.pause(reason, duration_seconds)
        self._wake_waiting()

    def resume(self) -> None:
        """Go on after a pause."""
        self._control.resume()
        self._wake_waiting()

    def look_at_wish(self) -> None:
        """Obey the wish for a pause, which somebody else has changed."""
        self._control.look_again()
        self._wake_waiting()

    def stop(self, words: str = FINAL_CHECKPOINT) -> None:
        """End after the microbatches in work; `run` returns when the final checkpoints are on disk. `words` say why."""
        self._stop_words = words
        self._control.stop()
        self._set_state(NodeState.STOPPING)

    async def save_now(self) -> CommandResult:
        """Save a checkpoint of every stage's last step and wait until all are on disk.

        Raises NotReadyError, and StorageError when one of them is not.
        """
        loops = self._loops.stages
        if not (self._is_running and loops and all(loop.is_kept for loop in loops)):
            raise NotReadyError("Checkpoints cannot be saved now.", "Try again when training runs.")
        number = self._control.save()
        for loop in loops:
            await loop.requests.saved(number)
        for loop in loops:
            report = loop.last_report
            if report is None or report.generation is None:
                raise StorageError((report.alarm if report else None) or "The checkpoint was not saved.")
        return CommandResult(self._present_state()[0], _saved(loops))

    @property
    def last_save_failed(self) -> bool:
        """Whether the newest checkpoint of a stage that was waited for did not reach the disk."""
        reports = [loop.last_report for loop in self._loops.stages]
        return any(report is not None and report.generation is None for report in reports)

    async def wait_until_paused(self) -> NodeState:
        """Wait until the pause holds, or until somebody takes it back or stops the trainer; the state then."""
        ends = (NodeState.PAUSED, NodeState.STOPPING, NodeState.NOT_TRAINING)
        while self._control.is_paused and self._state not in ends:
            await self._state_changed.wait()
        return self._present_state()[0]

    async def wait_until_resumed(self) -> NodeState:
        """Wait until the pause has ended, or until somebody asks for another one; the state then."""
        while self._state is NodeState.PAUSED and not self._control.is_paused:
            await self._state_changed.wait()
        return self._present_state()[0]

    async def until_state_changes(self) -> None:
        """Wait until it does something else, or is asked to."""
        await self._state_changed.wait()

    async def until_no_pause_is_wanted(self) -> None:
        """Wait until it trains, or is about to."""
        while self.is_pause_wanted:
            await self._state_changed.wait()

    async def generate(self, request: Generate) -> GenerationSummary:
        """Continue a prompt between microbatches. Raises NotReadyError when this node cannot."""
        if self.parts.generator is None:
            raise NotReadyError("This node cannot generate text.", "It has no tokenizer.")
        return await self.parts.generator.generate(request)

    def snapshot(self) -> TrainerSnapshot:
        """The trainer now, as values that any thread may read; costs well under a millisecond."""
        state, reason = self._present_state()
        until = self._control.paused_until
        return trainer_snapshot(self.parts, self._loops, TrainerState(state, reason, until), self._data_status())

    async def _work(self, last_step: int | None) -> None:
        """The loops with their companions, which end with them."""
        async with anyio.create_task_group() as companions:
            for stage in self.parts.stages:
                companions.start_soon(stage.service.run)
                if stage.group is not None:
                    companions.start_soon(stage.group.run)
                    companions.start_soon(stage.outer.update_root)  # others look for replicas with the same
            if self._loops.drive is not None:
                companions.start_soon(self._loops.drive.driver.run)
            async with anyio.create_task_group() as others:
                for loop in self._loops.stages[1:]:
                    others.start_soon(loop.run)
                await self._loops.primary.run(last_step)
                self._control.stop()  # the other stages end as well
            companions.cancel_scope.cancel()

    async def _settle(self) -> None:
        """Drop the steps in work and save what those before them reached: each stage, whatever comes of the others."""
        self._set_state(NodeState.STOPPING)
        if self._loops.drive is not None:
            self._loops.drive.journal.clear()
        async with AsyncExitStack() as settling:
            for loop in reversed(self._loops.stages):
                settling.push_async_callback(loop.settle)

    def _loop_changed(self) -> None:
        """A pause holds when every loop holds, and it lasts until all of them have gone on."""
        states = {loop.state for loop in self._loops.stages or (self._loops.primary,)}
        if self._state in (NodeState.STOPPING, NodeState.NOT_TRAINING) or self._control.is_stopping:
            return
        if states == {NodeState.PAUSED}:
            if self._state is not NodeState.PAUSED:
                _LOG.info("%s", self._control.pause_reason)
            self._set_state(NodeState.PAUSED)
        elif NodeState.PAUSED not in states:
            self._set_state(self._loops.primary.state)

    def _present_state(self) -> tuple[NodeState, str]:
        """State and reason in words."""
        match self._state:
            case NodeState.PAUSED:
                return NodeState.PAUSED, self._control.pause_reason
            case NodeState.STOPPING:
                return NodeState.STOPPING, self._stop_words
            case NodeState.NOT_TRAINING:
                return NodeState.NOT_TRAINING, "Training has ended."
            case _:
                return self._work_or_wait()

    def _work_or_wait(self) -> tuple[NodeState, str]:
        drive, driving = self._loops.drive, self.parts.driving
        if drive is not None and drive.waiting.is_noticeable:
            return NodeState.WAITING_FOR_DATA, f"Waiting for data. {self._data_status().explanation}"
        obstacle = None if driving is None else driving.routing.obstacle
        if obstacle is not None:
            return NodeState.WAITING_FOR_STAGES, obstacle
        if self._state is NodeState.STARTING:
            return NodeState.STARTING, "Fetching the first data."
        return NodeState.TRAINING, "Training."

    def _set_state(self, state: NodeState) -> None:
        self._state = state
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        changed, self._state_changed = self._state_changed, anyio.Event()
        changed.set()

    def _data_status(self) -> DataStatus:
        if self.parts.driving is None:
            return DataStatus("", verified=False, explanation="These layers need no data: others drive them.")
        return self.parts.driving.feed.status()


def _saved(loops: Sequence[StageLoop]) -> str:
    """What was saved, in words."""
    steps = [loop.last_report.step for loop in loops if loop.last_report is not None]
    if len(steps) == 1:
        return f"Checkpoint of step {steps[0]} saved."
    return f"Checkpoints of {len(steps)} stages saved, of steps {', '.join(map(str, steps))}."
