"""What happens to a stage when a step's gradients are accumulated: step, outer round, evaluation, checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from anyio.abc import TaskGroup

from neuroshard.optim.inner import stage_clip_norm
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.status.snapshot import LossPoint
from neuroshard.training.checkpoint.writer import WriteReport
from neuroshard.training.control import Control
from neuroshard.training.examination import Examiner
from neuroshard.training.executor import StepResult
from neuroshard.training.intake import Accumulated
from neuroshard.training.journal import Journal, OwnShare
from neuroshard.training.microbatch import StageError
from neuroshard.training.non_finite import STEPS_BEFORE_RESTORE, NonFinitePolicy
from neuroshard.training.pace import Pace
from neuroshard.training.parts import StageParts, TrainerParts
from neuroshard.training.progress import NotedLoss
from neuroshard.training.record import TrainingRecord

_LOG = logging.getLogger(__name__)


class StageTrainer:
    """Owns the record of one stage. Its intake is closed while a step is made and until everything after it is done."""

    def __init__(
        self,
        parts: TrainerParts,
        held: StageParts,
        record: TrainingRecord,
        *,
        control: Control,
        journal: Journal,
        pace: Pace,
        wall_clock: Callable[[], float],
    ) -> None:
        self.record = record
        self.examiner: Examiner | None = None  # of a node that drives, once it has the held-out sequences
        self.background: TaskGroup | None = None  # for what may go on beside the training
        self._parts = parts
        self._held = held
        self._control = control
        self._journal = journal
        self._pace = pace
        self._wall_clock = wall_clock
        self._last_round = pace.monotonic()

    @property
    def steps(self) -> int:
        """Applied inner steps so far."""
        return self.record.progress.steps

    def tell_feed_again(self) -> None:
        """A feed that goes on where the record stops must know the losses of the shard it is in."""
        driving, progress = self._parts.driving, self.record.progress
        if driving is None:
            return
        if progress.position != driving.feed.position:
            self.record.progress = replace(progress, noted=())
        for noted in self.record.progress.noted:
            driving.feed.note_evaluation(noted.train_loss, noted.held_out_loss, noted.step)

    async def step(self) -> None:
        """The optimizer step on what was accumulated, and everything that may follow it."""
        done = self._held.service.take("The stage makes its step.")
        own = self._journal.stepped(done.keys)
        parameters, executor = self._parts.in_force(self._held), self._held.executor
        learning_rate = learning_rate_at(self.steps, parameters.inner)
        max_norm = stage_clip_norm(self._held.index, parameters.stage_count, parameters.inner.max_grad_norm)
        result = await self._held.service.compute.run(lambda: executor.step(learning_rate, max_norm, done.tokens))
        loss = result.loss if result.loss is not None else own.mean_loss()
        self._advance(done, own, result, loss, learning_rate)
        if not result.finite:
            await self._after_skipped_step()
            return
        outer_step_done = await self._synchronise_if_due()
        await self._note_losses(loss)
        if self._held.saver is not None:
            await self._held.saver.offer(self.record, outer_step_done)

    async def recover(self) -> None:
        """What follows when the stage gives no numbers any more and so never comes to a step: as after bad steps."""
        await self._held.service.discard("The stage goes back to its last checkpoint.")
        progress = self.record.progress
        policy = NonFinitePolicy(progress.non_finite.skipped + 1, STEPS_BEFORE_RESTORE, self.steps + 1)
        self.record.progress = replace(progress, non_finite=policy)
        await self._after_skipped_step()

    async def evaluate(self, examiner: Examiner) -> float | None:
        """The mean held-out loss; None when it is not finite, or given up for a request or for want of a stage."""
        control = self._control
        try:
            evaluation = await examiner.evaluate(
                self.record, self._wall_clock(), lambda: control.is_stopping or control.is_paused
            )
        except StageError as error:
            _LOG.warning("The held-out loss could not be measured: %s", error)
            evaluation = None
        self._pace.restart()  # the pace of the steps is told without evaluations
        if evaluation is None:
            return None
        if not evaluation.is_finite:
            progress = self.record.progress
            policy = replace(progress.non_finite, last_step=progress.steps)
            self.record.progress = replace(progress, non_finite=policy)
            _LOG.warning("The held-out loss at step %d is not a number.", evaluation.step)
            if self.record.evaluations.is_empty:  # without a baseline no step is made: do not try for ever
                control.pause("Paused: the held-out loss is not a number. Resume to measure it again.")
            return None
        _LOG.info("Held-out loss at step %d: %.3f nats a token.", evaluation.step, evaluation.mean)
        return evaluation.mean

    async def save(self) -> WriteReport | None:
        """Save a checkpoint of the last step and wait until it is on disk; None when nothing is kept."""
        return None if self._held.saver is None else await self._held.saver.save(self.record)

    def _advance(
        self, done: Accumulated, own: OwnShare, result: StepResult, loss: float | None, learning_rate: float
    ) -> None:
        record, pace = self.record, self._pace
        pace.step_ended()
        if own.position is not None:
            record.progress = record.progress.at_position(own.position)
        record.progress = record.progress.after_step(result, loss, done.tokens, done.sequences)
        if not result.finite:
            return
        pace.count(done.tokens)
        progress = record.progress
        if loss is not None:
            record.history.add(LossPoint(progress.steps, self._wall_clock(), loss, learning_rate, progress.tokens))
        self._held.outer.after_step(done.sequences)

    async def _note_losses(self, loss: float | None) -> None:
        """Evaluate when due, then tell the feed how well training goes, so that it can leave a memorised shard."""
        held_out_loss = None
        if self.examiner is not None and self.examiner.is_due(self.record, self._pace.step_seconds):
            held_out_loss = await self.evaluate(self.examiner)
        if self._parts.driving is None or loss is None:
            return
        self._parts.driving.feed.note_evaluation(loss, held_out_loss, self.steps)
        self.record.progress = self.record.progress.with_noted(NotedLoss(self.steps, loss, held_out_loss))

    async def _synchronise_if_due(self) -> bool:
        """Run the outer round when it is due; whether it completed."""
        outer, monotonic = self._held.outer, self._pace.monotonic
        if not outer.is_due(self._parts.parameters.sequences_per_step, monotonic() - self._last_round):
            return False
        completed = await outer.run_round(self._wall_clock())
        self._last_round = monotonic()
        if not completed:
            _LOG.warning("Round abandoned, training goes on: %s", outer.progress.last_failure)
            return False
        if self.background is not None:
            self.background.start_soon(outer.update_root)
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
        restored = None if self._held.saver is None else await self._held.saver.restore()
        if restored is None:
            return "There is no checkpoint to go back to; the weights are those before these steps."
        record, state, progress = restored
        record.progress = replace(record.progress, position=self.record.progress.position, noted=())
        self.record = record
        self._held.outer.restore(state, progress)
        return f"The checkpoint of step {record.progress.steps} was restored."
