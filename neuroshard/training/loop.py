"""The trainer of one stage: batches, inner steps, outer rounds, evaluations and checkpoints in one order."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup
from torch import Tensor

from neuroshard.errors import NotReadyError, StorageError
from neuroshard.optim.inner import stage_clip_norm
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.status.commands import CommandResult, Generate, GenerationSummary
from neuroshard.status.snapshot import CheckpointStatus, LossPoint, NodeState
from neuroshard.training.checkpoint.writer import WriteReport
from neuroshard.training.compute import Priority
from neuroshard.training.control import Control
from neuroshard.training.examination import Examiner
from neuroshard.training.executor import SessionId, StepResult
from neuroshard.training.parts import TrainerParts
from neuroshard.training.pipeline import run_microbatch
from neuroshard.training.progress import NotedLoss, Speed
from neuroshard.training.record import TrainingRecord
from neuroshard.training.view import TrainerSnapshot, training_status, verification_status
from neuroshard.types import DataPosition

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

NOTICEABLE_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class _Accumulated:
    """What the gradients of the step in work hold so far."""

    sequences: int = 0
    tokens: int = 0
    loss_sums: tuple[Tensor, ...] = ()
    position: DataPosition | None = None  # first window behind them


class Trainer:
    """Drives one stage until it is stopped. All methods belong to the event loop's thread."""

    def __init__(
        self,
        parts: TrainerParts,
        record: TrainingRecord | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parts = parts
        self.record = record or TrainingRecord()
        self._wall_clock = wall_clock
        self._monotonic = monotonic
        self._control = Control(monotonic)
        self._accumulated = _Accumulated()
        self._session = 0
        self._speed = Speed()
        self._step_seconds = 0.0
        self._examiner: Examiner | None = None
        self._mark = self._last_round = monotonic()
        self._waiting_since: float | None = None
        self._state = NodeState.STARTING
        self._state_changed = anyio.Event()
        self._saved = anyio.Event()
        self._last_report: WriteReport | None = None
        self._last_step: int | None = None
        self._background: TaskGroup | None = None

    async def run(self, last_step: int | None = None) -> None:
        """Train until `stop` or until `last_step` is done, then save a final checkpoint.

        Errors that training cannot repair rise from here.
        """
        self._last_step = last_step
        self._tell_feed_again()
        async with anyio.create_task_group() as background:
            self._background = background
            try:
                await self._loop()
            finally:
                self._background = None
                with anyio.CancelScope(shield=True):
                    await self._settle()
        self._set_state(NodeState.NOT_TRAINING)

    @property
    def steps(self) -> int:
        """Applied inner steps so far."""
        return self.record.progress.steps

    def pause(self, duration_seconds: float | None = None, reason: str = "Paused by the user.") -> None:
        """Stop after the microbatch in work and free the accelerator; nothing is lost."""
        self._control.pause(reason, duration_seconds)
        self._wake_waiting()

    def resume(self) -> None:
        """Go on after a pause."""
        self._control.resume()
        self._wake_waiting()

    def stop(self) -> None:
        """End after the microbatch in work; `run` returns when the final checkpoint is on disk."""
        self._control.stop()
        self._set_state(NodeState.STOPPING)

    async def save_now(self) -> CommandResult:
        """Save a checkpoint of the last step and wait until it is on disk. Raises NotReadyError, StorageError."""
        if self.parts.saver is None or self._background is None:
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
        parts, record = self.parts, self.record
        state, reason = self._present_state()
        remaining = self._control.seconds_until_resume
        held_out = self._examiner.held_out if self._examiner else None
        return TrainerSnapshot(
            state=state,
            reason=reason,
            paused_until=None if remaining is None else self._wall_clock() + remaining,
            training=training_status(
                record,
                parts.parameters,
                speed=self._speed,
                precision=parts.executor.precision,
                held_out_sequences=len(held_out.sequences) if held_out else 0,
                unigram_entropy=held_out.unigram_entropy if held_out else None,
            ),
            verification=verification_status(record, parts.parameters, state, reason),
            diloco=parts.outer.status(),
            data=parts.feed.status(),
            checkpoints=self._checkpoint_status(),
            history=record.history.snapshot(),
        )

    def _tell_feed_again(self) -> None:
        """A feed that goes on where the record stops must know the losses of the shard it is in."""
        progress, feed = self.record.progress, self.parts.feed
        if progress.position != feed.position:
            self.record.progress = replace(progress, noted=())
        for noted in self.record.progress.noted:
            feed.note_evaluation(noted.train_loss, noted.held_out_loss, noted.step)

    async def _loop(self) -> None:
        while not (self._control.is_stopping or self._is_finished):
            if self._control.is_paused:
                await self._pause()
            elif self._control.save_wanted:
                await self._save()
            elif self._examiner is None:
                await self._pin_held_out()
            elif self.record.evaluations.is_empty:
                await self._evaluate(self._examiner)
            else:
                await self._train()

    @property
    def _is_finished(self) -> bool:
        return self._last_step is not None and self.record.progress.steps >= self._last_step

    async def _pin_held_out(self) -> None:
        held_out = await self._patiently(self.parts.feed.held_out)
        if held_out is not None:
            self._examiner = Examiner(self.parts.route, held_out, self.parts.parameters.batch_size)
            self._examiner.prepare(self.record)

    async def _train(self) -> None:
        """Microbatches up to the next optimizer step; a request comes between two of them and what is done stays."""
        parameters, done = self.parts.parameters, self._accumulated
        missing = parameters.sequences_per_step - done.sequences
        batch = await self._patiently(
            lambda: self.parts.feed.next_batch(min(missing, parameters.batch_size), step=self.record.progress.steps + 1)
        )
        if batch is None:
            return
        self._session += 1
        result = await run_microbatch(self.parts.route, SessionId(self._session), batch.input_ids, batch.labels)
        self._accumulated = _Accumulated(
            done.sequences + len(batch.input_ids),
            done.tokens + result.token_count,
            (*done.loss_sums, result.loss_sum),
            batch.position,
        )
        if self._accumulated.sequences >= parameters.sequences_per_step:
            await self._step()

    async def _step(self) -> None:
        """The optimizer step, and everything that may follow it."""
        done, self._accumulated = self._accumulated, _Accumulated()
        parameters, executor = self.parts.parameters, self.parts.executor
        learning_rate = learning_rate_at(self.record.progress.steps, parameters.inner)
        max_norm = stage_clip_norm(self.parts.stage, parameters.stage_count, parameters.inner.max_grad_norm)
        result = await self.parts.compute.run(lambda: executor.step(learning_rate, max_norm, done.tokens))
        loss = result.loss if result.loss is not None else sum(part.item() for part in done.loss_sums) / done.tokens
        self._advance(done, result, loss, learning_rate)
        if not result.finite:
            await self._after_skipped_step()
            return
        outer_step_done = await self._synchronise_if_due()
        await self._note_losses(loss)
        if self.parts.saver is not None:
            await self.parts.saver.offer(self.record, outer_step_done)

    def _advance(self, done: _Accumulated, result: StepResult, loss: float, learning_rate: float) -> None:
        record, now = self.record, self._monotonic()
        self._step_seconds, self._mark = now - self._mark, now
        if done.position is not None:
            record.progress = record.progress.at_position(done.position)
        record.progress = record.progress.after_step(result, loss, done.tokens, done.sequences)
        if result.finite:
            progress = record.progress
            self._speed = self._speed.after_step(self._step_seconds, done.tokens)
            record.history.add(LossPoint(progress.steps, self._wall_clock(), loss, learning_rate, progress.tokens))
            self.parts.outer.after_step(done.sequences)

    async def _note_losses(self, loss: float) -> None:
        """Evaluate when due, then tell the feed how well training goes, so that it can leave a memorised shard."""
        held_out_loss = None
        if self._examiner is not None and self._examiner.is_due(self.record, self._step_seconds):
            held_out_loss = await self._evaluate(self._examiner)
        step = self.record.progress.steps
        self.parts.feed.note_evaluation(loss, held_out_loss, step)
        self.record.progress = self.record.progress.with_noted(NotedLoss(step, loss, held_out_loss))

    async def _evaluate(self, examiner: Examiner) -> float | None:
        """The mean held-out loss; None when it was given up for a request or is not finite."""
        control = self._control
        evaluation = await examiner.evaluate(
            self.record, self._wall_clock(), lambda: control.is_stopping or control.is_paused
        )
        self._mark = self._monotonic()  # the pace of the steps is told without evaluations
        if evaluation is None:
            return None
        if not evaluation.is_finite:
            progress = self.record.progress
            policy = replace(progress.non_finite, last_step=progress.steps)
            self.record.progress = replace(progress, non_finite=policy)
            _LOG.warning("The held-out loss at step %d is not a number.", evaluation.step)
            if self.record.evaluations.is_empty:  # without a baseline no step is made: do not try for ever
                self._control.pause("Paused: the held-out loss is not a number. Resume to measure it again.")
            return None
        _LOG.info("Held-out loss at step %d: %.3f nats a token.", evaluation.step, evaluation.mean)
        return evaluation.mean

    async def _synchronise_if_due(self) -> bool:
        """Run the outer round when it is due; whether it completed."""
        outer = self.parts.outer
        if not outer.is_due(self.parts.parameters.sequences_per_step, self._monotonic() - self._last_round):
            return False
        completed = await outer.run_round(self._wall_clock())
        self._last_round = self._monotonic()
        if not completed:
            _LOG.warning("Round abandoned, training goes on: %s", outer.progress.last_failure)
            return False
        if self._background is not None:
            self._background.start_soon(outer.update_root)
        return True

    async def _after_skipped_step(self) -> None:
        policy = self.record.progress.non_finite
        _LOG.warning("Step skipped: loss or gradient is not a number (%d in a row).", policy.in_a_row)
        if not policy.must_restore:
            return
        restored = await self._restore_last_good()
        self.record.progress = replace(self.record.progress, non_finite=policy.restored())
        self._control.pause(
            f"Paused: {policy.in_a_row} steps in a row gave values that are not numbers. {restored} "
            "Resume to try again; if it returns, lower the learning rate."
        )

    async def _restore_last_good(self) -> str:
        """Back to the newest checkpoint, but not to its data: whatever spoilt the steps is behind us."""
        restored = None if self.parts.saver is None else await self.parts.saver.restore()
        if restored is None:
            return "There is no checkpoint to go back to; the weights are those before these steps."
        record, state, progress = restored
        record.progress = replace(record.progress, position=self.record.progress.position, noted=())
        self.record = record
        self.parts.outer.restore(state, progress)
        return f"The checkpoint of step {record.progress.steps} was restored."

    async def _pause(self) -> None:
        """Hold until asked to go on; save when asked meanwhile."""
        self._set_state(NodeState.PAUSED)
        _LOG.info("%s", self._control.pause_reason)
        executor, compute = self.parts.executor, self.parts.compute
        await compute.run(executor.suspend, Priority.SMALL)
        while self._control.is_paused and not self._control.is_stopping:
            if self._control.save_wanted:
                await self._save()
            else:
                await self._control.changed()
        await compute.run(executor.resume, Priority.SMALL)
        self._mark = self._monotonic()
        self._set_state(NodeState.STOPPING if self._control.is_stopping else NodeState.TRAINING)

    async def _save(self) -> None:
        self._control.save_wanted = False
        if self.parts.saver is not None:
            self._last_report = await self.parts.saver.save(self.record)
        saved, self._saved = self._saved, anyio.Event()
        saved.set()

    async def _settle(self) -> None:
        """Drop the step in work and save what the steps before it reached."""
        self._set_state(NodeState.STOPPING)
        self._accumulated = _Accumulated()
        await self.parts.compute.run(self.parts.executor.discard, Priority.SMALL)
        await self._save()
        if self.parts.saver is not None:
            await self.parts.saver.close()

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The value of `work`, which waits for data; None when a request came first."""
        self._waiting_since = self._monotonic()
        value = await self._control.unless_requested(work)
        waited = self._monotonic() - self._waiting_since
        self._waiting_since = None
        if waited > NOTICEABLE_WAIT_SECONDS:
            self._mark += waited  # the pace is told without it
        if value is not None and self._state is NodeState.STARTING:
            self._set_state(NodeState.TRAINING)
        return value

    def _present_state(self) -> tuple[NodeState, str]:
        """State and reason in words."""
        since = self._waiting_since
        is_waiting = since is not None and self._monotonic() - since > NOTICEABLE_WAIT_SECONDS
        match self._state:
            case NodeState.PAUSED:
                return NodeState.PAUSED, self._control.pause_reason
            case NodeState.STOPPING:
                return NodeState.STOPPING, "Saving a final checkpoint."
            case NodeState.NOT_TRAINING:
                return NodeState.NOT_TRAINING, "Training has ended."
            case _ if is_waiting:
                return NodeState.WAITING_FOR_DATA, f"Waiting for data. {self.parts.feed.status().explanation}"
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

    def _checkpoint_status(self) -> CheckpointStatus:
        if self.parts.saver is None:
            return CheckpointStatus(could_lose="everything: checkpoints are off")
        return self.parts.saver.status(self.record.progress.steps, self._speed.step_seconds)
