"""The trainer of a node: it runs the node's stages and its driver, accepts commands, and reports its status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import anyio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.errors import NotReadyError, StorageError
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.control import PAUSED_BY_USER, Control, RequestedPause
from neuroshard.pipeline.driver import Speed
from neuroshard.pipeline.executor import Precision
from neuroshard.status.board import CommandResult, Generate, GenerationSummary
from neuroshard.status.data import DataStatus
from neuroshard.status.pipeline import PipelineFlow
from neuroshard.status.snapshot import (
    CheckpointStatus,
    DilocoStatus,
    LossPoint,
    NodeState,
    StageStatus,
    TrainingStatus,
    VerificationStatus,
)
from neuroshard.training.composition import Composition, LoopContext, compose
from neuroshard.training.learning_verdict import TREND_POINTS, Evidence, verify
from neuroshard.training.parts import TrainerParts
from neuroshard.training.record import TrainingRecord
from neuroshard.training.stage_loop import StageLoop
from neuroshard.training.stage_replica import StageReplica
from neuroshard.waiting import Signal, first_of

AT_WORK = frozenset({NodeState.TRAINING, NodeState.WAITING_FOR_DATA, NodeState.WAITING_FOR_STAGES, NodeState.STARTING})
NOTHING_HELD = DilocoStatus(members=0, explanation="This node holds no layers: it has nothing to synchronise.")


@dataclass(frozen=True)
class TrainerSnapshot:
    """Everything that a NodeStatus reports about training."""

    state: NodeState
    reason: str
    paused_until: float | None  # seconds since the epoch
    training: TrainingStatus
    verification: VerificationStatus
    diloco: DilocoStatus
    data: DataStatus
    checkpoints: CheckpointStatus  # of the first layers; alarm and possible loss of any stage
    history: tuple[LossPoint, ...]
    stages: tuple[StageStatus, ...] = ()
    flow: PipelineFlow | None = None  # microbatches that this node drives
    warnings: tuple[str, ...] = ()  # of checkpoints that were loaded since the start


@dataclass(frozen=True)
class TrainerState:
    """State of a trainer and its reason."""

    state: NodeState
    reason: str
    paused_until: float | None  # seconds since the epoch


def trainer_snapshot(parts: TrainerParts, loops: Composition, state: TrainerState, data: DataStatus) -> TrainerSnapshot:
    """Combine the status of all parts: that of the primary loop, with a row for each stage."""
    record, pace = loops.primary.record, loops.primary.pace
    held = parts.stages[0] if parts.stages else None
    parameters = parts.parameters if held is None else held.outer.parameters
    held_out = None if loops.drive is None else loops.drive.evaluator.held_out
    checkpoints = [_checkpoints_of(loop) for loop in loops.stages]
    rows = zip(parts.stages, loops.stages, checkpoints, strict=True)
    return TrainerSnapshot(
        state=state.state,
        reason=state.reason,
        paused_until=state.paused_until,
        training=training_status(
            record,
            parameters,
            learning_rate=_learning_rate(record, parameters, held),
            speed=pace.speed,
            precision=Precision.FP32 if held is None else held.executor.precision,
            held_out_sequences=len(held_out.sequences) if held_out else 0,
            unigram_entropy=held_out.unigram_entropy if held_out else None,
        ),
        verification=verification_status(record, parameters, state, is_measured_here=loops.drive is not None),
        diloco=diloco_status(parts.stages),
        data=data,
        checkpoints=checkpoint_status(checkpoints),
        history=record.history.snapshot(),
        stages=tuple(stage_status(stage, loop.record, loop.pace.speed, saved) for stage, loop, saved in rows),
        flow=None if loops.drive is None else loops.drive.driver.flow.flow(),
        warnings=tuple(words for held in parts.stages for words in held.saver.warnings),
    )


def training_status(
    record: TrainingRecord,
    parameters: RunParameters,
    *,
    learning_rate: float,
    speed: Speed,
    precision: Precision,
    held_out_sequences: int,
    unigram_entropy: float | None,
) -> TrainingStatus:
    """Describe the progress of the inner steps."""
    progress = record.progress
    return TrainingStatus(
        steps=progress.steps,
        tokens=progress.tokens,
        inherited_steps=record.inherited.steps,
        inherited_tokens=record.inherited.tokens,
        loss=progress.loss,
        loss_ema=progress.loss_ema,
        initial_loss=progress.initial_loss,
        lr=learning_rate,
        tokens_per_second=speed.tokens_per_second,
        step_seconds=speed.step_seconds,
        batch_size=parameters.batch_size,
        sequences_per_step=parameters.sequences_per_step,
        skipped_steps=progress.non_finite.skipped,
        precision=precision.value,
        held_out=record.evaluations.points,
        held_out_sequences=held_out_sequences,
        unigram_entropy=unigram_entropy,
    )


def _learning_rate(record: TrainingRecord, parameters: RunParameters, held: StageReplica | None) -> float:
    """Learning rate of the next step. A driver without layers uses its own step count."""
    return learning_rate_at(record.progress.steps, parameters.inner) if held is None else held.outer.learning_rate()


def verification_status(
    record: TrainingRecord, parameters: RunParameters, state: TrainerState, *, is_measured_here: bool
) -> VerificationStatus:
    """Verdict on the training of a trainer in this state. Waiting for data counts as training."""
    progress = record.progress
    return verify(
        Evidence(
            evaluations=record.evaluations.evaluations,
            recent=record.history.recent(TREND_POINTS),
            initial_loss=progress.initial_loss,
            is_training=state.state in AT_WORK,
            state_reason=state.reason,
            learning_rate=parameters.inner.learning_rate,
            last_non_finite_step=progress.non_finite.last_step,
            is_measured_here=is_measured_here,
        )
    )


def diloco_status(stages: Sequence[StageReplica]) -> DilocoStatus:
    """Outer steps of the stage with the first layers, with the rounds of all stages."""
    if not stages:
        return NOTHING_HELD
    outer, group = stages[0].outer, stages[0].group
    status = outer.status()
    certified = "" if group is None else group.certified_root(status.outer_steps)
    rounds = tuple(stage.group.status for stage in stages if stage.group is not None)
    obstacle, advice = ("", "") if group is None else (group.obstacle, group.seats.advice)
    explanation = obstacle or f"{status.explanation} {advice}".strip()
    return replace(status, certified_root=certified or status.certified_root, rounds=rounds, explanation=explanation)


def stage_status(
    replica: StageReplica, record: TrainingRecord, speed: Speed, checkpoints: CheckpointStatus
) -> StageStatus:
    """Status row of one stage."""
    intake, progress = replica.service.intake, record.progress
    return StageStatus(
        index=replica.index,
        layers=replica.layers,
        steps=progress.steps,
        outer_step=replica.outer.state.outer_step,
        loss=progress.loss,
        grad_norm=progress.grad_norm,
        sequences_accumulated=intake.accumulated.sequences,
        sequences_wanted=intake.wanted,
        open_microbatches=intake.open_microbatches,
        sessions=replica.service.session_count,
        state_root=replica.outer.progress.state_root,
        last_saved_step=checkpoints.last_saved_step,
        tokens_per_second=speed.tokens_per_second,
    )


def checkpoint_status(stages: Sequence[CheckpointStatus]) -> CheckpointStatus:
    """Status of the first stage, with the largest possible loss and the first alarm of any stage."""
    if not stages:
        return CheckpointStatus(could_lose="nothing: this node holds no layers")
    worst = max(stages, key=lambda stage: stage.could_lose_seconds)
    return replace(
        stages[0],
        could_lose=worst.could_lose,
        could_lose_steps=worst.could_lose_steps,
        could_lose_seconds=worst.could_lose_seconds,
        alarm=next((stage.alarm for stage in stages if stage.alarm is not None), None),
    )


def _checkpoints_of(loop: StageLoop) -> CheckpointStatus:
    return loop.replica.saver.status(loop.record.progress.steps, loop.pace.speed.step_seconds)


_LOG = logging.getLogger(__name__)

SECONDS_BEFORE_DROP = 10.0  # of a pause; a shorter pause does not justify a write to the disk
FINAL_CHECKPOINT = "Saving a final checkpoint."


class Trainer:
    """Trains the stages of a node until it is stopped, and drives microbatches when it has data.

    Its status describes the primary loop: the loop of the first layers that the node holds, or the drive loop if it
    holds none. Belongs to the event loop's thread.
    """

    def __init__(
        self,
        parts: TrainerParts,
        record: TrainingRecord | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        control: Control | None = None,
        seconds_before_drop: float = SECONDS_BEFORE_DROP,
    ) -> None:
        """`record` is that of earlier starts of a trainer without stages; a new one by default.

        `control` may already request a pause, which applies from the start. `seconds_before_drop` is the time of a
        pause after which the tensors leave the memory.
        """
        self.parts = parts
        self._seconds_before_drop = seconds_before_drop
        self._control = control or Control(RequestedPause(monotonic, wall_clock))
        shared = LoopContext(self._control, wall_clock, monotonic, self._loop_changed)
        self._loops = compose(parts, record or TrainingRecord(), shared)
        self._state = NodeState.STARTING
        self._stop_words, self._is_for_good = FINAL_CHECKPOINT, True
        self._state_changed = Signal()
        self._is_running = False

    async def run(self, last_step: int | None = None) -> None:
        """Train until `stop` or until `last_step` is done, then save final checkpoints.

        Raises errors that training cannot repair. The stages after the first one end with it.
        """
        if self._loops.drive is not None:
            self._loops.drive.evaluator.replay_losses_to_feed(self.record)
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
        """Training record of the primary loop."""
        return self._loops.primary.record

    @property
    def records(self) -> tuple[TrainingRecord, ...]:
        """Training record of each stage."""
        return tuple(loop.record for loop in self._loops.stages)

    @property
    def steps(self) -> int:
        """Number of inner steps that the primary loop has applied."""
        return self.record.progress.steps

    @property
    def is_pause_wanted(self) -> bool:
        """Whether training is paused or will be as soon as possible."""
        return self._control.requested_pause.holds

    def pause(self, duration_seconds: float | None = None, reason: str = PAUSED_BY_USER) -> None:
        """Stop after the running microbatches and free the accelerator. No finished step is lost."""
        self._control.pause(reason, duration_seconds)
        self._wake_waiting()

    def resume(self) -> None:
        """Continue after a pause."""
        self._control.resume()
        self._wake_waiting()

    def recheck_pause(self) -> None:
        """Apply a change that another object has made to the requested pause."""
        self._control.look_again()
        self._wake_waiting()

    def stop(self, words: str = FINAL_CHECKPOINT, *, is_for_good: bool = True, abandons_work: bool = False) -> None:
        """End after the running microbatches. `run` returns after the final checkpoints. `words` give the reason.

        A node that stops for good gives up its seats in the committees of its stages. With `abandons_work`, nobody
        waits for open microbatches, because they cannot end.
        """
        self._stop_words, self._is_for_good = words, is_for_good
        self._control.stop(abandons_work=abandons_work)
        self._set_state(NodeState.STOPPING)

    async def save_now(self) -> CommandResult:
        """Save a checkpoint of every stage's last step and wait until all are on disk.

        Raises NotReadyError when training does not run, and StorageError when a checkpoint was not saved.
        """
        loops = self._loops.stages
        if not (self._is_running and loops):
            raise NotReadyError("Checkpoints cannot be saved now.", "Try again when the node trains.")
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
        """Whether the newest awaited checkpoint of any stage was not written."""
        reports = [loop.last_report for loop in self._loops.stages]
        return any(report is not None and report.generation is None for report in reports)

    async def wait_until_paused(self) -> NodeState:
        """Wait until training is paused, or until the pause is withdrawn or the trainer stops. Returns the state."""
        ends = (NodeState.PAUSED, NodeState.STOPPING, NodeState.NOT_TRAINING)
        await self._state_changed.until(lambda: not self._control.requested_pause.holds or self._state in ends)
        return self._present_state()[0]

    async def wait_until_resumed(self) -> NodeState:
        """Wait until the pause has ended, or until another one is requested. Returns the state."""
        await self._state_changed.until(
            lambda: self._state is not NodeState.PAUSED or self._control.requested_pause.holds
        )
        return self._present_state()[0]

    async def until_state_changes(self) -> None:
        """Wait for the next change of the state or of the requests."""
        await self._state_changed.wait()

    async def until_no_pause_is_wanted(self) -> None:
        """Wait until no pause is requested or required."""
        await self._state_changed.until(lambda: not self.is_pause_wanted)

    async def generate(self, request: Generate) -> GenerationSummary:
        """Continue a prompt between microbatches. Raises NotReadyError if this node cannot."""
        if self.parts.generator is None:
            raise NotReadyError("This node cannot generate text.", "It has no tokenizer.")
        try:
            async with AsyncExitStack() as used:
                for loop in self._loops.stages:
                    await used.enter_async_context(loop.in_memory())
                return await self.parts.generator.generate(request)
        finally:
            self._wake_waiting()  # the tensors may be dropped again

    def snapshot(self) -> TrainerSnapshot:
        """Return the present status as values that any thread may read. Takes well under a millisecond."""
        state, reason = self._present_state()
        until = self._control.requested_pause.until
        return trainer_snapshot(self.parts, self._loops, TrainerState(state, reason, until), self._data_status())

    async def _work(self, last_step: int | None) -> None:
        """Run the loops together with their background tasks, which are cancelled at the end of the loops."""
        async with anyio.create_task_group() as companions:
            for stage in self.parts.stages:
                companions.start_soon(stage.run)
            if self._loops.drive is not None:
                companions.start_soon(self._loops.drive.driver.run)
            if self._loops.stages:
                companions.start_soon(self._rest_in_pauses)
            async with anyio.create_task_group() as others:
                for loop in self._loops.stages[1:]:
                    others.start_soon(loop.run)
                await self._loops.primary.run(last_step)
                self._control.stop()  # the other stages end as well
            if self._is_for_good:
                await self._leave_committees()
            # The background tasks end last: a stage that is still draining needs its server and its driver.
            companions.cancel_scope.cancel()

    async def _leave_committees(self) -> None:
        async with anyio.create_task_group() as leaving:
            for stage in self.parts.stages:
                if stage.group is not None:
                    leaving.start_soon(stage.group.leave)

    async def _rest_in_pauses(self) -> None:
        while True:
            await self._state_changed.until(lambda: self._is_at_rest)
            await first_of(self._free_memory, partial(self._state_changed.until, lambda: not self._is_at_rest))

    @property
    def _is_at_rest(self) -> bool:
        return self._state is NodeState.PAUSED and self._control.requested_pause.holds and not self._control.is_stopping

    async def _free_memory(self) -> None:
        """Drop the tensors of a paused node when the pause has lasted: after a save, as at the end of a node.

        They are loaded when the pause ends, as at a start, or for a text, after which they are dropped again.
        """
        loops = self._loops.stages
        while True:
            waits = [await loop.seconds_until_save() for loop in loops]
            await anyio.sleep(max(self._seconds_before_drop, *waits))
            try:
                await self.save_now()
            except StorageError as error:
                _LOG.info("The paused model stays in memory: %s", error)
                await anyio.sleep_forever()
            if await _have_dropped_tensors(loops):
                _LOG.info("The paused model was moved to disk. It is loaded when training resumes.")
            await self._state_changed.until(lambda: not all(loop.is_dropped for loop in loops))

    async def _settle(self) -> None:
        """Drop the present steps and save the result of the steps before. A failing stage does not stop the others."""
        self._set_state(NodeState.STOPPING)
        if self._loops.drive is not None:
            self._loops.drive.ledger.clear()
        # The exit stack runs the callbacks in reverse order, so that the first stage ends first, and runs all of them
        # even if one raises.
        async with AsyncExitStack() as settling:
            for loop in reversed(self._loops.stages):
                settling.push_async_callback(loop.settle)

    def _loop_changed(self) -> None:
        """Update the node's state: paused once every loop is paused, and until every loop has resumed."""
        states = {loop.state for loop in self._loops.stages or (self._loops.primary,)}
        if self._state in (NodeState.STOPPING, NodeState.NOT_TRAINING) or self._control.is_stopping:
            return
        if states == {NodeState.PAUSED}:
            if self._state is not NodeState.PAUSED:
                _LOG.info("%s", self._control.requested_pause.reason)
            self._set_state(NodeState.PAUSED)
        elif NodeState.PAUSED not in states:
            self._set_state(self._loops.primary.state)

    def _present_state(self) -> tuple[NodeState, str]:
        """State and its reason as a sentence."""
        match self._state:
            case NodeState.PAUSED:
                return NodeState.PAUSED, self._control.requested_pause.reason
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
            return NodeState.STARTING, "Downloading the first data."
        return NodeState.TRAINING, "Training."

    def _set_state(self, state: NodeState) -> None:
        self._state = state
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._state_changed.notify()

    def _data_status(self) -> DataStatus:
        if self.parts.driving is None:
            return DataStatus("", verified=False, explanation="These layers need no data: others drive them.")
        return self.parts.driving.feed.status()


async def _have_dropped_tensors(loops: Sequence[StageLoop]) -> bool:
    """Drop the tensors of all stages and return True, or of none if one of them is in use or no longer paused.

    If only some stages dropped their part of the unfinished step, the stages would step on different microbatches ever
    after. So no stage may resume in between.
    """
    async with AsyncExitStack() as held:
        for loop in loops:
            await held.enter_async_context(loop.moving)
        if not all(loop.may_drop_tensors for loop in loops):
            return False
        with anyio.CancelScope(shield=True):
            for loop in reversed(loops):  # the driving stage last: then no other stage has kept the data of its step
                await loop.drop_tensors()
    return True


def _saved(loops: Sequence[StageLoop]) -> str:
    """Describe the saved checkpoints as a sentence."""
    steps = [loop.last_report.step for loop in loops if loop.last_report is not None]
    if len(steps) == 1:
        return f"Checkpoint of step {steps[0]} saved."
    return f"Checkpoints of {len(steps)} stages saved, of steps {', '.join(map(str, steps))}."
