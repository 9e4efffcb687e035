"""What happens to a stage when a step's gradients are accumulated: step, outer round, evaluation, checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio
from anyio.abc import TaskGroup

from neuroshard.config.run_parameters import RunParameters
from neuroshard.optim.inner import stage_clip_norm
from neuroshard.training.checkpoint.writer import WriteReport
from neuroshard.training.control import Control
from neuroshard.training.held_out_watch import HeldOutWatch
from neuroshard.training.intake import Accumulated
from neuroshard.training.journal import Journal, OwnShare
from neuroshard.training.non_finite import STEPS_BEFORE_RESTORE, NonFinitePolicy
from neuroshard.training.pace import Pace
from neuroshard.training.parts import StageParts
from neuroshard.training.record import TrainingRecord

_LOG = logging.getLogger(__name__)

AUTO_STEP_SECONDS = 3.0  # without a microbatch, until a lone node makes the round that is due (DESIGN 4.7)


class StageTrainer:
    """Owns the record of one stage. Its intake is closed while a step is made and until everything after it is done."""

    def __init__(
        self,
        parts: StageParts,
        in_force: Callable[[], RunParameters],
        record: TrainingRecord,
        *,
        control: Control,
        pace: Pace,
        wall_clock: Callable[[], float],
        journal: Journal | None = None,
        watch: HeldOutWatch | None = None,
    ) -> None:
        """`journal` and `watch` belong to the stage at which this node drives."""
        self.record = record
        self.parts = parts
        self.pace = pace
        self.watch = watch
        self.background: TaskGroup | None = None  # for what may go on beside the training
        self.is_overdue = False  # a round of this node alone, while nothing arrives after which it could be made
        self._in_force = in_force
        self._control = control
        self._journal = journal
        self._wall_clock = wall_clock
        self._last_round = pace.monotonic()
        if parts.group is not None:  # nobody waits for a node that has agreed and then is paused, ends or sends nothing
            replica = parts.group.gathering.replica
            parts.group.gathering.may_take_part = lambda: control.must_hold is None and replica.may_send_large()
        if parts.vote is not None and watch is not None:
            parts.vote.held_out = lambda: watch.held_out

    @property
    def parameters(self) -> RunParameters:
        """The version that holds at the stage's present outer step."""
        return self._in_force()

    @property
    def steps(self) -> int:
        """Applied inner steps so far."""
        return self.record.progress.steps

    async def step(self) -> None:
        """The optimizer step on what was accumulated, and everything that may follow it."""
        if not await self._has_applied_what_came():
            return
        outer_step_done = await self._synchronise_if_due()
        if self.watch is not None:
            held_out_loss = await self.watch.measure(self.record) if self.watch.is_due(self.record) else None
            self.watch.note(self.record, held_out_loss)
        if self.parts.saver is not None:
            await self.parts.saver.offer(self.record, outer_step_done)

    @property
    def is_called(self) -> bool:
        """Whether a round with other replicas waits for this stage."""
        return self.parts.group is not None and self.parts.group.is_called

    async def called(self) -> None:
        """Wait until `is_called`."""
        if self.parts.group is None:
            await anyio.sleep_forever()
        else:
            await self.parts.group.called()

    async def overdue(self) -> None:
        """Wait until `is_overdue`."""
        intake = self.parts.service.intake
        while not self.is_overdue:
            before = intake.accumulated
            await anyio.sleep(AUTO_STEP_SECONDS)
            self.is_overdue = intake.is_idle and intake.accumulated is before and self._is_due_alone

    def withdraw(self) -> None:
        """Let a round that waits go on without this stage."""
        if self.parts.group is not None:
            self.parts.group.withdraw()

    async def take_part(self) -> None:
        """The round that waits; nothing may be open. The step in work is kept, or its gradients go into the round."""
        self.is_overdue = False
        if not (self.is_called or self._is_due_alone):
            return
        outer, came = self.parts.outer, self.parts.service.intake.accumulated
        if outer.steps_with_the_group and came.sequences and not await self._has_applied_what_came():
            self.withdraw()
            return
        began = self.pace.monotonic()
        completed = await self._run_round()
        self.pace.skip(self.pace.monotonic() - began)
        if completed and self.parts.saver is not None:
            await self.parts.saver.offer(self.record, outer_step_done=True)

    async def recover(self) -> None:
        """What follows when the stage gives no numbers any more and so never comes to a step: as after bad steps."""
        await self.parts.service.discard("The stage goes back to its last checkpoint.")
        progress = self.record.progress
        policy = NonFinitePolicy(progress.non_finite.skipped + 1, STEPS_BEFORE_RESTORE, self.steps + 1)
        self.record.progress = replace(progress, non_finite=policy)
        await self._after_skipped_step()

    async def save(self) -> WriteReport | None:
        """Save a checkpoint of the last step and wait until it is on disk; None when nothing is kept."""
        return None if self.parts.saver is None else await self.parts.saver.save(self.record)

    async def _has_applied_what_came(self) -> bool:
        """Step on what was accumulated; whether it gave numbers."""
        with anyio.CancelScope(shield=True):  # weights and record change together or not at all
            await self._apply(self.parts.service.take("The stage makes its step."))
        if self.record.progress.non_finite.in_a_row:
            await self._after_skipped_step()
            return False
        return True

    async def _apply(self, done: Accumulated) -> None:
        """Step on what was accumulated and count it.

        The loss is what the stage has measured itself or, at the stage where this node drives, what it was told.
        """
        own = OwnShare() if self._journal is None else self._journal.stepped(done.keys)
        parameters, executor, index = self.parameters, self.parts.executor, self.parts.index
        learning_rate = self.parts.outer.learning_rate(parameters)
        max_norm = stage_clip_norm(index, parameters.stage_count, parameters.inner.max_grad_norm)
        result = await self.parts.outer.inner_step(executor, learning_rate, max_norm, done.tokens)
        loss = result.loss if result.loss is not None else own.mean_loss()
        record, pace = self.record, self.pace
        pace.step_ended()
        if own.position is not None:
            record.progress = record.progress.at_position(own.position)
        record.progress = record.progress.after_step(result, loss, done.tokens, done.sequences)
        if result.finite:
            pace.count(done.tokens)
            record.note_loss(loss, self._wall_clock(), learning_rate)
            self.parts.outer.after_step(done.sequences)

    async def _synchronise_if_due(self) -> bool:
        """Run the outer round when it is due and this node is alone; whether it completed. Others call theirs."""
        return self._is_due_alone and await self._run_round()

    @property
    def _is_due_alone(self) -> bool:
        group, elapsed = self.parts.group, self.pace.monotonic() - self._last_round
        is_alone = group is None or group.gathering.is_alone
        return is_alone and self.parts.outer.is_due(self.parameters.sequences_per_step, elapsed)

    async def _run_round(self) -> bool:
        outer, monotonic = self.parts.outer, self.pace.monotonic
        completed = await outer.run_round(self._wall_clock())
        self._last_round = monotonic()
        if completed and self.background is not None:
            self.background.start_soon(outer.update_root)
        return completed

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
        record = restored.record
        record.progress = replace(record.progress, position=self.record.progress.position, noted=())
        self.record = record
        self.parts.outer.restore(restored.outer_state, restored.residual, restored.outer_progress)
        if self.background is not None:
            self.background.start_soon(self.parts.outer.update_root)  # the others go by it
        return f"The checkpoint of step {record.progress.steps} was restored."
