"""The trainer of a node: its stage's service, its steps and its driver, with what others may ask of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio

from neuroshard.errors import NotReadyError, StorageError
from neuroshard.status.commands import CommandResult, Generate, GenerationSummary
from neuroshard.status.snapshot import CheckpointStatus, DataStatus, NodeState
from neuroshard.training.checkpoint.writer import WriteReport
from neuroshard.training.control import Control
from neuroshard.training.driver import Driver, DriverOptions
from neuroshard.training.examination import Examiner
from neuroshard.training.journal import Journal
from neuroshard.training.pace import DataWait, Pace
from neuroshard.training.parts import Driving, TrainerParts
from neuroshard.training.record import TrainingRecord
from neuroshard.training.stage_trainer import StageTrainer
from neuroshard.training.view import TrainerSnapshot, training_status, verification_status

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # after a stage that could not be measured


class Trainer:
    """Trains one stage until it is stopped, and drives microbatches when it has data. Belongs to the event loop."""

    def __init__(
        self,
        parts: TrainerParts,
        record: TrainingRecord | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parts = parts
        self._held = parts.stages[0]
        self._wall_clock = wall_clock
        self._control = Control(monotonic)
        self._journal = Journal()
        self._pace = Pace(monotonic)
        self._waiting = DataWait(self._pace)
        self._stage = StageTrainer(
            parts,
            parts.stages[0],
            record or TrainingRecord(),
            control=self._control,
            journal=self._journal,
            pace=self._pace,
            wall_clock=wall_clock,
        )
        self._state = NodeState.STARTING
        self._state_changed = anyio.Event()
        self._saved = anyio.Event()
        self._last_report: WriteReport | None = None
        self._last_step: int | None = None

    async def run(self, last_step: int | None = None) -> None:
        """Train until `stop` or until `last_step` is done, then save a final checkpoint.

        Errors that training cannot repair rise from here.
        """
        self._last_step = last_step
        self._stage.tell_feed_again()
        async with anyio.create_task_group() as background:
            self._stage.background = background
            try:
                await self._work()
            finally:
                self._stage.background = None
                with anyio.CancelScope(shield=True):
                    await self._settle()
        self._set_state(NodeState.NOT_TRAINING)

    @property
    def record(self) -> TrainingRecord:
        """What the stage knows beside tensors."""
        return self._stage.record

    @property
    def steps(self) -> int:
        """Applied inner steps so far."""
        return self._stage.steps

    def pause(self, duration_seconds: float | None = None, reason: str = "Paused by the user.") -> None:
        """Stop after the microbatches in work and free the accelerator; nothing is lost."""
        self._control.pause(reason, duration_seconds)
        self._wake_waiting()

    def resume(self) -> None:
        """Go on after a pause."""
        self._control.resume()
        self._wake_waiting()

    def stop(self) -> None:
        """End after the microbatches in work; `run` returns when the final checkpoint is on disk."""
        self._control.stop()
        self._set_state(NodeState.STOPPING)

    async def save_now(self) -> CommandResult:
        """Save a checkpoint of the last step and wait until it is on disk. Raises NotReadyError, StorageError."""
        if self._held.saver is None or self._stage.background is None:
            raise NotReadyError("Checkpoints cannot be saved now.", "Try again when training runs.")
        saved = self._saved
        self._control.save()
        await saved.wait()
        report = self._last_report
        if report is None or report.generation is None:
            raise StorageError((report.alarm if report else None) or "The checkpoint was not saved.")
        return CommandResult(self._present_state()[0], f"Checkpoint of step {report.step} saved.")

    @property
    def last_save_failed(self) -> bool:
        """Whether the newest checkpoint that was waited for did not reach the disk."""
        return self._last_report is not None and self._last_report.generation is None

    async def wait_for_state(self, *states: NodeState) -> NodeState:
        """Wait until the trainer is in one of these states."""
        while self._state not in states:
            await self._state_changed.wait()
        return self._state

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

    async def generate(self, request: Generate) -> GenerationSummary:
        """Continue a prompt between microbatches. Raises NotReadyError when this node cannot."""
        if self.parts.generator is None:
            raise NotReadyError("This node cannot generate text.", "It holds no whole model or no tokenizer.")
        return await self.parts.generator.generate(request)

    def snapshot(self) -> TrainerSnapshot:
        """The trainer now, as values that any thread may read; costs well under a millisecond."""
        record, in_force = self.record, self.parts.in_force(self._held)
        state, reason = self._present_state()
        remaining = self._control.seconds_until_resume
        held_out = self._stage.examiner.held_out if self._stage.examiner else None
        return TrainerSnapshot(
            state=state,
            reason=reason,
            paused_until=None if remaining is None else self._wall_clock() + remaining,
            training=training_status(
                record,
                in_force,
                speed=self._pace.speed,
                precision=self._held.executor.precision,
                held_out_sequences=len(held_out.sequences) if held_out else 0,
                unigram_entropy=held_out.unigram_entropy if held_out else None,
            ),
            verification=verification_status(record, in_force, state, reason),
            diloco=self._held.outer.status(),
            data=self._data_status(),
            checkpoints=self._checkpoint_status(),
            history=record.history.snapshot(),
        )

    async def _work(self) -> None:
        """The loop with its companions, which end with it."""
        async with anyio.create_task_group() as companions:
            companions.start_soon(self._held.service.run)
            if self.parts.driving is not None:
                companions.start_soon(self._driver(self.parts.driving).run)
            await self._loop(self.parts.driving)
            companions.cancel_scope.cancel()

    def _driver(self, driving: Driving) -> Driver:
        return Driver(
            driving.node_id,
            DriverOptions(self.parts.parameters.batch_size, driving.in_flight, driving.first_session),
            routing=driving.routing,
            feed=driving.feed,
            room=self._held.service.intake,
            journal=self._journal,
            waiting=self._waiting,
            next_step=lambda: self.steps + 1,
        )

    async def _loop(self, driving: Driving | None) -> None:
        """One thing at a time; while none is asked for, the intake is open and microbatches come."""
        stage, control, service = self._stage, self._control, self._held.service
        while True:
            if service.intake.is_full:
                await stage.step()
            elif service.is_spoilt:
                await stage.recover()
            elif service.intake.is_admitting and (control.is_stopping or control.is_paused):
                reason = "The node stops." if control.is_stopping else "The node is paused."
                await service.drain(reason, for_good=control.is_stopping)
            elif control.is_stopping or self._is_finished:
                return
            elif control.is_paused:
                await self._pause()
            elif control.save_wanted:
                await self._save()
            elif driving is None:
                await self._collect()
            elif stage.examiner is None:
                await self._pin_held_out(driving)
            elif self.record.evaluations.is_empty:
                await self._measure_first(stage.examiner)
            else:
                await self._collect()

    @property
    def _is_finished(self) -> bool:
        return self._last_step is not None and self.steps >= self._last_step

    async def _collect(self) -> None:
        """Let microbatches in until they are enough for a step, or a request comes; what is done stays."""
        if self._state is NodeState.STARTING:
            self._set_state(NodeState.TRAINING)
        self._held.service.intake.open()
        await self._control.unless_requested(self._held.service.filled)

    async def _pin_held_out(self, driving: Driving) -> None:
        held_out = await self._waiting.timed(lambda: self._control.unless_requested(driving.feed.held_out))
        if held_out is None:
            return
        if self._state is NodeState.STARTING:
            self._set_state(NodeState.TRAINING)
        self._stage.examiner = Examiner(driving.routing, held_out, self.parts.parameters.batch_size)
        self._stage.examiner.prepare(self.record)

    async def _measure_first(self, examiner: Examiner) -> None:
        """The evaluation that all others are compared with: without it no step is made."""
        if await self._stage.evaluate(examiner) is None:
            await self._control.unless_requested(lambda: anyio.sleep(RETRY_SECONDS))

    async def _pause(self) -> None:
        """Hold until asked to go on; save when asked meanwhile."""
        service, control = self._held.service, self._control
        _LOG.info("%s", control.pause_reason)
        await service.suspend()
        self._set_state(NodeState.PAUSED)
        while control.is_paused and not control.is_stopping:
            if control.save_wanted:
                await self._save()
            else:
                await control.changed()
        await service.resume()
        self._pace.restart()
        self._set_state(NodeState.STOPPING if control.is_stopping else NodeState.TRAINING)

    async def _save(self) -> None:
        self._control.save_wanted = False
        self._last_report = await self._stage.save() or self._last_report
        saved, self._saved = self._saved, anyio.Event()
        saved.set()

    async def _settle(self) -> None:
        """Drop the step in work and save what the steps before it reached."""
        self._set_state(NodeState.STOPPING)
        self._journal.clear()
        await self._held.service.leave()
        await self._save()
        if self._held.saver is not None:
            await self._held.saver.close()

    def _present_state(self) -> tuple[NodeState, str]:
        """State and reason in words."""
        match self._state:
            case NodeState.PAUSED:
                return NodeState.PAUSED, self._control.pause_reason
            case NodeState.STOPPING:
                return NodeState.STOPPING, "Saving a final checkpoint."
            case NodeState.NOT_TRAINING:
                return NodeState.NOT_TRAINING, "Training has ended."
            case _ if self._waiting.is_noticeable:
                return NodeState.WAITING_FOR_DATA, f"Waiting for data. {self._data_status().explanation}"
            case NodeState.STARTING:
                return NodeState.STARTING, "Fetching the first data."
            case _:
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

    def _checkpoint_status(self) -> CheckpointStatus:
        if self._held.saver is None:
            return CheckpointStatus(could_lose="everything: checkpoints are off")
        return self._held.saver.status(self.record.progress.steps, self._pace.speed.step_seconds)
