"""The life of a node that drives and holds no stage: it counts as steps what it drove, and evaluates in between."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import anyio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.control import Control, Requests
from neuroshard.pipeline.driver import InFlightLedger, Pace, RemoteFirstStage
from neuroshard.pipeline.microbatch import MicrobatchKey
from neuroshard.status.snapshot import NodeState
from neuroshard.training.evaluator import Evaluator
from neuroshard.training.record import TrainingRecord

DRAIN_SECONDS = 10.0  # time for microbatches in flight before an end or an evaluation
PAUSE_SECONDS = 0.5  # the same before a pause; what is in flight then ends at the remote stages


class DriveLoop:
    """Opens and closes the driver's intake. One step has as many sequences as a step of the stages."""

    def __init__(
        self,
        parameters: RunParameters,
        record: TrainingRecord,
        evaluator: Evaluator,
        control: Control,
        *,
        pace: Pace,
        wall_clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called after every change of `state`."""
        self.record = record
        self.state = NodeState.STARTING  # or TRAINING, or PAUSED
        self.room = RemoteFirstStage(parameters.batch_size)
        self.ledger = InFlightLedger()
        self.ledger.begin_step(self.record.progress.steps + 1)
        self.pace = pace
        self._parameters = parameters
        self.evaluator = evaluator
        self._control = control
        self._requests = Requests(control)
        self._wall_clock = wall_clock
        self._changed = changed

    async def run(self, last_step: int | None = None) -> None:
        """Run until the control stops the loop or the data of `last_step` are done."""
        control = self._control
        while True:
            done = self._step_done()
            if done:
                await self._step(done)
                continue
            is_over = control.is_stopping or (last_step is not None and self.record.progress.steps >= last_step)
            if self.room.is_open and (is_over or control.requested_pause.holds):
                await self._drain()
            elif is_over:
                return
            elif control.requested_pause.holds:
                await self._pause()
            elif not self.evaluator.is_ready(self.record):
                await self.evaluator.get_ready(self.record, self._requests)
            else:
                self._set_state(NodeState.TRAINING)
                self.room.open()
                await self._requests.unless_waiting(lambda: self.ledger.ended.until(lambda: bool(self._step_done())))

    def _step_done(self) -> tuple[MicrobatchKey, ...]:
        """First finished microbatches that are enough for a step; () while there are too few."""
        wanted = self._parameters.sequences_per_step * self._parameters.architecture.sequence_length
        done = self.ledger.done
        for count in range(1, len(done) + 1):
            if self.ledger.tokens(done[:count]) >= wanted:
                return done[:count]
        return ()

    async def _step(self, keys: tuple[MicrobatchKey, ...]) -> None:
        own, record, parameters = self.ledger.stepped(keys), self.record, self._parameters
        loss = own.mean_loss()
        finite = loss is not None and isfinite(loss)  # otherwise the stages skip the step as well
        learning_rate = learning_rate_at(record.progress.steps, parameters.inner)
        self.pace.step_ended(own.tokens if finite else 0)
        sequences = own.tokens // parameters.architecture.sequence_length
        record.progress = record.progress.after_step(loss, own.tokens, sequences, position=own.position, finite=finite)
        if not finite:
            return
        record.note_loss(loss, self._wall_clock(), learning_rate)
        self.ledger.begin_step(self.record.progress.steps + 1)
        held_out_loss = None
        if self.evaluator.is_due(record):
            await self._drain()
            held_out_loss = await self.evaluator.measure(record)
        self.evaluator.note(record, held_out_loss)

    async def _drain(self) -> None:
        """Begin no more microbatches, and wait for a limited time for those in flight."""
        self.room.close()
        control = self._control
        is_short = control.abandons_work if control.is_stopping else control.requested_pause.holds
        with anyio.move_on_after(PAUSE_SECONDS if is_short else DRAIN_SECONDS):
            await self.ledger.ended.until(lambda: self.ledger.under_way == 0)

    async def _pause(self) -> None:
        self._set_state(NodeState.PAUSED)
        while self._control.requested_pause.holds and not self._control.is_stopping:
            await self._control.changed()
        self.pace.restart()
        self._set_state(NodeState.TRAINING)

    def _set_state(self, state: NodeState) -> None:
        if state is not self.state:
            self.state = state
            self._changed()
