"""Training loop of one stage: collect microbatches, make a step, synchronise, evaluate, save, pause, end."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from neuroshard.consensus.lone_steps import lone_exchange
from neuroshard.errors import SiteRestartError, StorageError
from neuroshard.optim.schedule import stage_clip_norm
from neuroshard.pipeline.control import Control, Requests
from neuroshard.pipeline.driver import InFlightLedger, Pace
from neuroshard.pipeline.microbatch import AcceleratorFullError, AcceleratorLostError, SiteFailedError
from neuroshard.pipeline.stage_server import DrainReason
from neuroshard.state.checkpoint_saver import WriteReport
from neuroshard.status.snapshot import CheckpointGeneration, NodeState
from neuroshard.training.evaluator import Evaluator
from neuroshard.training.record import STEPS_BEFORE_RESTORE, SkippedSteps
from neuroshard.training.stage_checkpoint import Restored
from neuroshard.training.stage_replica import StageReplica
from neuroshard.types import DataPosition
from neuroshard.waiting import first_of

_LOG = logging.getLogger(__name__)

AUTO_STEP_SECONDS = 3.0  # without a microbatch, before a lone node makes a round that is due
SECONDS_BEFORE_MEMORY_RETRY = 60.0  # before a full accelerator is tried again
FULL = "Paused for a minute: the accelerator has no memory left. Another program may have it."


class StageLoop:
    """Training loop of one stage. It does one thing at a time and admits microbatches in between.

    The intake stays closed from the start of a step until everything after the step is done. A stage closes only after
    the stages before it on this node have closed, so that the microbatches they have begun can end in this stage.
    """

    def __init__(
        self,
        replica: StageReplica,
        *,
        control: Control,
        pace: Pace,
        wall_clock: Callable[[], float],
        ledger: InFlightLedger | None = None,
        evaluator: Evaluator | None = None,
        before: StageLoop | None = None,
        changed: Callable[[], None],
    ) -> None:
        """`ledger` and `evaluator` belong to the stage at which this node drives; `before` is the one
        before this stage.

        `changed` is called after every change of `state`.
        """
        self.replica = replica
        self.record = replica.record
        self.pace = pace
        self.evaluator = evaluator
        self.state = NodeState.STARTING  # or TRAINING, or PAUSED once the accelerator is free
        self.last_report: WriteReport | None = None
        self.requests = Requests(control)
        self._control = control
        self._service = replica.service
        self._ledger = ledger or InFlightLedger()  # empty at a stage at which this node does not drive
        self._wall_clock = wall_clock
        self._before = before
        self._changed = changed
        self._must_save = replica.executor.is_sharded and not replica.is_restored  # before a rank can end
        self._ledger.begin_step(self.record.progress.steps + 1)
        self._last_round = pace.monotonic()
        self._is_overdue = False  # a lone round is due, but no microbatch arrives whose step would trigger it
        self._held_since: float | None = None  # when this loop first saw a request to hold
        self.moving = anyio.Lock()  # held while tensors are saved, dropped or loaded
        self._readers = 0  # users of the tensors in a pause
        control.feed(replica.service.changed)  # the loop waits for this one signal
        if before is not None:
            before.replica.service.changed.feed(replica.service.changed)
        if replica.group is not None:
            replica.group.feed(replica.service.changed)

    @property
    def is_quiet(self) -> bool:
        """Whether this stage and the stages before it have no work that the next stage on this node must also do."""
        intake = self._service.intake
        return (self._before is None or self._before.is_quiet) and not intake.is_admitting and intake.is_idle

    async def run(self, last_step: int | None = None) -> None:
        """Run until the control stops the loop or `last_step` is done. A failed accelerator pauses it for good."""
        control, intake = self._control, self._service.intake
        # The order of the cases matters. Lost memory comes first: the gradients may be incomplete, so no step may use
        # them. A full step precedes a pause or an end, so that its work is kept. A hold waits for the earlier stages on
        # this node, then drains this one; a stage pauses only after that.
        while (lost := self._service.compute.lost) is None:
            hold = self._hold()
            try:
                if self._service.lacks_memory or self._service.lacks_ranks:
                    await (self._restart_ranks() if self._service.lacks_ranks else self._make_room())
                elif intake.is_full:
                    await self._step()
                elif self._service.is_spoilt:
                    await self._recover()
                elif hold and self._before is not None and not self._before.is_quiet:
                    await self._let_through(self._before)
                elif hold and intake.is_admitting:
                    await self._service.drain(hold, self._drain_reason(), began=self._held_since)
                elif control.is_stopping or (last_step is not None and self.record.progress.steps >= last_step):
                    return
                elif self.requests.are_waiting or self._must_save:
                    await (self._pause() if control.requested_pause.holds else self._save())
                elif self.evaluator is not None and not self.evaluator.is_ready(self.record):
                    await self._get_ready()
                elif self._is_called or self._is_overdue:
                    await self._synchronise()
                else:
                    await self._collect()
            except* (AcceleratorLostError, SiteFailedError) as errors:  # in a group: a round has tasks of its own
                _LOG.debug("Stage %d ends its work: %s", self.replica.index + 1, errors)
                self._service.note_lost_ranks(errors)
        await self._stay_paused(lost)

    def _drain_reason(self) -> DrainReason:
        if not self._control.is_stopping:
            return DrainReason.PAUSE
        return DrainReason.ABANDON if self._control.abandons_work else DrainReason.END

    async def settle(self) -> None:
        """Drop the present step and save the result of the steps before it."""
        await self._service.leave()
        await self._save()
        await self.replica.saver.close()

    async def _collect(self) -> None:
        """Admit microbatches until a step is full or other work is due. Accumulated work is kept.

        Marks a lone round as overdue if it is due and no microbatch has arrived for AUTO_STEP_SECONDS.
        """
        if self.state is NodeState.STARTING:
            self._set_state(NodeState.TRAINING)
        service, intake = self._service, self._service.intake
        intake.wanted = self.replica.outer.parameters.sequences_per_step  # a later version may change it
        service.open()
        came, due = intake.accumulated, anyio.current_time() + AUTO_STEP_SECONDS
        while not (service.is_filled or self.requests.are_waiting or self._is_called or self._is_overdue):
            await service.wait_for_change(due)
            if anyio.current_time() >= due:
                self._is_overdue = intake.is_idle and intake.accumulated is came and self._is_due_alone
                came, due = intake.accumulated, anyio.current_time() + AUTO_STEP_SECONDS

    async def _synchronise(self) -> None:
        """Run a round with the other replicas between two microbatches. A request to hold cancels it."""
        await self._service.drain("The replicas of this stage synchronise.")
        if not self._service.lacks_memory:  # the accumulated gradients may be part of the round
            await first_of(self._take_part, self._held)

    def _hold(self) -> str | None:
        """Return the reason to hold, if any, and note when the hold began.

        All stages of the node share the time that open microbatches have to end.
        """
        hold = self._control.must_hold
        if hold is None:
            self._held_since = None
        else:
            self._withdraw()
            if self._held_since is None:
                self._held_since = anyio.current_time()
        return hold

    async def _held(self) -> None:
        while self._control.must_hold is None:
            await self._control.changed()

    async def _let_through(self, before: StageLoop) -> None:
        """Admit what the stage before has begun, although no new microbatch can begin there."""
        self._service.open()
        if not (self._service.is_filled or before.is_quiet):
            await self._service.wait_for_change()

    async def _get_ready(self) -> None:
        evaluator = self.evaluator
        if evaluator is None:
            return
        await evaluator.get_ready(self.record, self.requests)
        if evaluator.held_out is not None:
            self.replica.vote.pin(evaluator.held_out, evaluator.for_choice)
            if self.state is NodeState.STARTING:
                self._set_state(NodeState.TRAINING)

    async def _pause(self) -> None:
        """Hold until resumed or stopped; save when asked. A stop needs no accelerator, so it does not resume first."""
        await self._service.suspend()
        self._set_state(NodeState.PAUSED)
        while self._is_held or not (self._control.is_stopping or await self._has_resumed()):
            if self.requests.save_wanted:
                await self._save()
            else:
                await first_of(self._rest, self._asked)
        if self._control.is_stopping:
            return
        self.pace.restart()
        self._set_state(NodeState.TRAINING)

    async def _stay_paused(self, lost: AcceleratorLostError) -> None:
        """Pause until the node stops: this process can never use the accelerator again, nor read its tensors.

        The present step and the steps since the newest checkpoint exist only there.
        """
        _LOG.error("%s", lost)
        self._withdraw()
        await self._service.discard(lost.message, is_paused=True)
        while not self._control.is_stopping:
            if not self._control.requested_pause.holds:  # at the start, and after each Resume
                self._control.pause(f"Paused: {lost}")
            self._set_state(NodeState.PAUSED)
            if self.requests.save_wanted:
                await self._save()
            await self._control.changed()

    async def _has_resumed(self) -> bool:
        async with self.moving:  # a new pause must not drop the tensors before the stage is resumed
            await self._load_tensors()
            try:
                await self._service.resume()
            except AcceleratorFullError as error:
                _LOG.warning("Training does not continue: %s", error)
                self._wait_for_room()
                self._set_state(NodeState.PAUSED)  # a waiter for the end of the pause checks again
                return False
            return True

    async def _make_room(self) -> None:
        """Drop the present step: the microbatch that ran out of memory may have left part of its gradients."""
        await self._service.discard("The accelerator has no memory left.")
        self._wait_for_room()

    async def _restart_ranks(self) -> None:
        """Drop the present step, of which a rank had a part, and start the ranks again.

        They take over this node's weights, or those of the newest checkpoint if each rank had a part of them. No round
        waits for this node meanwhile.
        """
        with self._control.restarting_ranks():
            await self._restart()

    async def _restart(self) -> None:
        executor, saver = self.replica.executor, self.replica.saver
        self._withdraw()
        await self._service.discard("The ranks of this node start again.", is_paused=True)
        try:
            obstacle = await self._service.compute.run(executor.recover)
        except SiteRestartError:  # the launcher of this process starts all ranks again
            if not executor.is_sharded:
                await self._save()
            raise
        if executor.is_dropped:  # they ended with the rank
            saver.note_lost()
        if obstacle:
            _LOG.error("The site pauses: %s.", obstacle)
            self._control.pause(f"Paused: {obstacle}. Resume to start the ranks again.")
        elif executor.is_dropped:
            async with self.moving:
                _LOG.warning("%s", await self._restore_last_good())
        if not obstacle:  # no longer paused: the restored state may need its first evaluation before a step
            self._service.intake.close("The stage is not ready yet.")

    def _wait_for_room(self) -> None:
        """Pause for a minute, unless a hold is already requested."""
        if self._control.must_hold is None:
            self._control.pause(FULL, SECONDS_BEFORE_MEMORY_RETRY)

    @property
    def _is_held(self) -> bool:
        return self._control.requested_pause.holds and not self._control.is_stopping

    async def _rest(self) -> None:
        """Free the memory that only the next checkpoint needs."""
        await self.replica.saver.rest()
        await anyio.sleep_forever()

    @property
    def is_dropped(self) -> bool:
        """Whether the stage's state is on the disk only."""
        return self.replica.saver.is_dropped

    async def seconds_until_save(self) -> float:
        """Seconds until the owner's write limit allows a checkpoint of the present state; 0.0 if it is on disk."""
        return await self.replica.saver.seconds_until_save(self.record)

    @property
    def _saved(self) -> CheckpointGeneration | None:
        """The newest checkpoint, if it contains the present state."""
        saved = None if self.last_report is None else self.last_report.generation
        present = self.record.progress.steps, self.replica.outer.state.outer_step
        return saved if saved is not None and (saved.step, saved.outer_step) == present else None

    @property
    def may_drop_tensors(self) -> bool:
        """Whether the stage is paused, and its state is on disk and not in use. It stays so while `moving` is held."""
        is_at_rest = self.state is NodeState.PAUSED and self._is_held and not self._readers
        return self._saved is not None and is_at_rest

    async def drop_tensors(self) -> None:
        """Drop the tensors of a stage that `may_drop_tensors`, and the present step, as a restart does.

        The caller holds `moving`. The pause waits at its end until the tensors are dropped, and then loads them.
        """
        saver, saved = self.replica.saver, self._saved
        if saved is None:
            raise ValueError("only a state that is on disk may be dropped")
        await self._service.discard("The node is paused.", is_paused=True)
        if not self._ledger.is_clear:
            self._rewind_feed(self._ledger.position)
        await saver.drop_tensors(saved)

    def _rewind_feed(self, position: DataPosition | None) -> None:
        """Give up what is in flight and read the data from this position on; None: from that of the start."""
        if self.evaluator is not None:
            self._ledger.rewind(position)  # the driver, which the pause has stopped from reading, begins again
            self.evaluator.rewind_feed(self.record, position)

    @asynccontextmanager
    async def in_memory(self) -> AsyncGenerator[None]:
        """Keep the tensors in memory, also in a pause. Raises StorageError if their checkpoint cannot be read."""
        self._readers += 1
        try:
            async with self.moving:
                await self._load_tensors()
            yield
        finally:
            self._readers -= 1

    async def _load_tensors(self) -> None:
        """Load dropped tensors from the newest checkpoint. Raises StorageError if there is none that can be read.

        If the newest one is damaged, training continues from the one before, with the data after that one.
        """
        saver, steps = self.replica.saver, self.record.progress.steps
        if not saver.is_dropped:
            return
        with anyio.CancelScope(shield=True):  # tensors and record change together
            restored = await saver.restore()
            if restored is None:
                words = " ".join(saver.warnings)
                raise StorageError(f"No checkpoint of the paused model can be read. {words}", "Check the disk.")
            self._continue_from(restored)
            if self.record.progress.steps != steps:
                self._rewind_feed(self.record.progress.position)

    async def _asked(self) -> None:
        """Wait until the pause is over or a checkpoint is requested."""
        while self._is_held and not self.requests.save_wanted:
            await self._control.changed()

    async def _save(self) -> None:
        self._must_save = False
        number = self._control.saves  # later requests need another checkpoint
        async with self.moving:
            await self.replica.outer.finish_root()  # the checkpoint contains it
            try:
                self.last_report = await self.replica.saver.save(self.record)
            except AcceleratorLostError as error:
                self.last_report = WriteReport(self.record.progress.steps, 0.0, 0.0, None, error.message)
        self.requests.save_taken(number)

    def _set_state(self, state: NodeState) -> None:
        self.state = state
        self._changed()

    async def _step(self) -> None:
        """Make the optimizer step on the accumulated gradients, then a due round, evaluation and checkpoint."""
        if not await self._has_applied_gradients():
            return
        outer_step_done = self._is_due_alone and await self._run_round()  # a group starts its own rounds
        if self.evaluator is not None:
            vote, held_out_loss = self.replica.vote, None
            if self.replica.group is not None:
                self.evaluator.note_vote(self.record, vote.mean_losses)
            if self.evaluator.is_due(self.record):
                held_out_loss = await self.evaluator.measure(self.record, vote.measured_mean)
            self.evaluator.note(self.record, held_out_loss)
        await self.replica.saver.offer(self.record, outer_step_done)

    @property
    def _is_called(self) -> bool:
        """Whether a round with other replicas waits for this stage."""
        return self.replica.group is not None and self.replica.group.is_called

    def _withdraw(self) -> None:
        """Let a waiting round continue without this stage."""
        if self.replica.group is not None:
            self.replica.group.withdraw()

    async def _take_part(self) -> None:
        """Run the waiting round without open microbatches. The present step is kept or joins the round."""
        self._is_overdue = False
        if not (self._is_called or self._is_due_alone):
            return
        outer, came = self.replica.outer, self._service.intake.accumulated
        if outer.steps_with_the_group and came.sequences and not await self._has_applied_gradients():
            self._withdraw()
            return
        began = self.pace.monotonic()
        completed = await self._run_round()
        self.pace.skip(self.pace.monotonic() - began)
        if completed:
            await self.replica.saver.offer(self.record, outer_step_done=True)

    async def _recover(self) -> None:
        """Handle a stage whose outputs are not finite, so that no step fills: restore it as after several bad steps."""
        await self._service.discard("The stage goes back to its last checkpoint.")
        progress = self.record.progress
        policy = SkippedSteps(progress.non_finite.skipped + 1, STEPS_BEFORE_RESTORE, self.record.progress.steps + 1)
        self.record.progress = replace(progress, non_finite=policy)
        await self._after_skipped_step()

    async def _has_applied_gradients(self) -> bool:
        """Make a step on the accumulated gradients and count it. Returns whether loss and gradient were finite.

        The loss is that of the stage itself or, at the stage where this node drives, the one that the last stage
        returned.
        """
        record, pace, outer, intake = self.record, self.pace, self.replica.outer, self._service.intake
        intake.close("The stage is making its step.")
        with anyio.CancelScope(shield=True):  # weights and record change together or not at all
            done = intake.take()
            own = self._ledger.stepped(done.keys)
            parameters = outer.parameters
            learning_rate = outer.learning_rate()
            max_norm = stage_clip_norm(self.replica.index, parameters.stage_count, parameters.inner.max_grad_norm)
            result = await outer.inner_step(self._service.executor, learning_rate, max_norm, done.tokens)
            loss = result.loss if result.loss is not None else own.mean_loss()
            pace.step_ended(done.tokens if result.finite else 0)
            record.progress = record.progress.after_step(
                loss,
                done.tokens,
                done.sequences,
                position=own.position,
                finite=result.finite,
                grad_norm=result.grad_norm,
            )
            if result.finite:
                record.note_loss(loss, self._wall_clock(), learning_rate)
                outer.after_step(done.sequences)
                self._ledger.begin_step(record.progress.steps + 1)
        if record.progress.non_finite.in_a_row:
            await self._after_skipped_step()
            return False
        return True

    @property
    def _is_due_alone(self) -> bool:
        group, elapsed = self.replica.group, self.pace.monotonic() - self._last_round
        is_alone = group is None or group.is_alone
        return is_alone and self.replica.outer.is_due(elapsed)

    async def _run_round(self) -> bool:
        group = self.replica.group
        exchange = lone_exchange if group is None else group.exchange
        completed = await self.replica.outer.run_round(exchange, self._wall_clock())
        self._last_round = self.pace.monotonic()
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
        """Restore the newest checkpoint without its data position, so that the spoilt steps' data are not repeated."""
        restored = await self.replica.saver.restore()
        if restored is None:
            return "There is no earlier checkpoint; the weights are those from before these steps."
        position = self.record.progress.position
        self._continue_from(restored)
        self.record.progress = replace(self.record.progress, position=position, noted=())
        return f"The checkpoint of step {self.record.progress.steps} was restored."

    def _continue_from(self, restored: Restored) -> None:
        self.record.replace_with(restored.record)
        self._ledger.begin_step(self.record.progress.steps + 1)
        self.replica.outer.restore(restored.outer_state, restored.residual, restored.outer_progress)
