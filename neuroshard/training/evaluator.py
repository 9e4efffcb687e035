"""Held-out evaluation by the driver: its schedule, its pinned sequences, its cost, and its report to the data feed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import anyio
from torch import Tensor

from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import Evaluation, EvaluationRecord, Measured, evaluation_is_due, nats_per_token
from neuroshard.identity import SignedClaim
from neuroshard.pipeline.control import Control, Requests
from neuroshard.pipeline.driver import DataWait, Pace
from neuroshard.pipeline.microbatch import Retry, StageError
from neuroshard.pipeline.microbatch_call import measured_losses
from neuroshard.pipeline.routing import Routing
from neuroshard.training.parts import DriverParts
from neuroshard.training.record import NotedLoss, TrainingRecord

TRIES = 5  # of one microbatch
STAGE_RETRY_SECONDS = 0.2


class Evaluator:
    """Evaluates the pinned sequences through the stages, a microbatch at a time."""

    def __init__(
        self,
        routing: Routing,
        held_out: HeldOut,
        batch_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.held_out = held_out
        self._routing = routing
        self._batch_size = batch_size
        self._clock = clock
        self._digest = sha256(held_out.sequences.numpy().tobytes()).hexdigest()
        self._trained_seconds = 0.0

    def prepare(self, record: TrainingRecord) -> None:
        """Forget evaluations that were made on other sequences: they cannot be compared."""
        if record.pinned_digest != self._digest:
            record.evaluations = EvaluationRecord()
            record.evaluation_seconds = None
            record.pinned_digest = self._digest

    def is_due(self, record: TrainingRecord, step_seconds: float = 0.0) -> bool:
        """Whether to evaluate now, after another step that took `step_seconds`."""
        self._trained_seconds += step_seconds
        return evaluation_is_due(self._trained_seconds, record.evaluation_seconds)

    async def evaluate(self, record: TrainingRecord, now: float) -> Evaluation:
        """Evaluate and record the result, unless it is not finite.

        `now` is in seconds since the epoch. Raises StageError when a stage fails again and again.
        """
        started = self._clock()
        losses: list[float] = []
        claims: list[SignedClaim] = []
        sequences = self.held_out.sequences
        for start in range(0, len(sequences), self._batch_size):
            rows = sequences[start : start + self._batch_size]
            told = await self._measured(rows)
            losses += nats_per_token(told.summed, rows.shape[1] - 1)
            claims += [] if told.claim is None else [told.claim]
        nodes = tuple(sorted({claim.delegation.node_id for claim in claims}))
        signed = tuple(claim.encode().decode() for claim in claims)
        evaluation = Evaluation(record.progress.steps, now, tuple(losses), nodes, signed)
        record.evaluation_seconds = self._clock() - started
        self._trained_seconds = 0.0
        if evaluation.is_finite:
            record.evaluations.add(evaluation)
        return evaluation

    async def _measured(self, rows: Tensor) -> Measured:
        """The losses of some sequences; a stage that fails is asked again."""
        for _ in range(TRIES - 1):
            try:
                return await measured_losses(self._routing, rows[:, :-1], rows[:, 1:])
            except StageError as error:
                if error.retry is Retry.NEVER:
                    raise
                await anyio.sleep(STAGE_RETRY_SECONDS)
        return await measured_losses(self._routing, rows[:, :-1], rows[:, 1:])


_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # after a stage that could not be measured


class EvaluationSchedule:
    """Keeps the evaluations of a record, which belongs to the loop that asks."""

    def __init__(
        self,
        driving: DriverParts,
        batch_size: int,
        *,
        control: Control,
        pace: Pace,
        waiting: DataWait,
        wall_clock: Callable[[], float],
    ) -> None:
        self._driving = driving
        self._batch_size = batch_size
        self._control = control
        self._pace = pace
        self._waiting = waiting
        self._wall_clock = wall_clock
        self._examiner: Evaluator | None = None

    @property
    def held_out(self) -> HeldOut | None:
        """The pinned sequences, once they are here."""
        return None if self._examiner is None else self._examiner.held_out

    def replay_losses_to_feed(self, record: TrainingRecord) -> None:
        """A feed that goes on where the record stops must know the losses of the shard it is in."""
        feed, progress = self._driving.feed, record.progress
        if progress.position != feed.position:
            record.progress = replace(progress, noted=())
        for noted in record.progress.noted:
            feed.note_evaluation(noted.train_loss, noted.held_out_loss, noted.step)

    def is_ready(self, record: TrainingRecord) -> bool:
        """Whether steps may be made: only after an evaluation that all others are compared with.

        Who goes on from the work of others makes its first one after a step: meanwhile the swarm has its help.
        """
        return self._examiner is not None and (not record.evaluations.is_empty or record.inherited.steps > 0)

    async def get_ready(self, record: TrainingRecord, requests: Requests) -> None:
        """Pin the sequences or measure the first loss, unless a request comes first."""
        if self._examiner is None:
            await self._pin(record, requests)
        elif await self.measure(record) is None:
            await requests.unless_waiting(lambda: anyio.sleep(RETRY_SECONDS))

    def is_due(self, record: TrainingRecord) -> bool:
        """Whether to measure now, after another step."""
        return self._examiner is not None and self._examiner.is_due(record, self._pace.step_seconds)

    async def measure(self, record: TrainingRecord) -> float | None:
        """The mean held-out loss; None when it is not finite, or given up for a request or for want of a stage."""
        examiner, control, now = self._examiner, self._control, self._wall_clock()
        if examiner is None or control.must_hold:
            return None
        try:
            evaluation = await control.until_changed(lambda: examiner.evaluate(record, now))
        except StageError as error:
            _LOG.warning("The held-out loss could not be measured: %s", error)
            evaluation = None
        self._pace.restart()  # the pace of the steps is told without evaluations
        if evaluation is None:
            return None
        if not evaluation.is_finite:
            policy = replace(record.progress.non_finite, last_step=record.progress.steps)
            record.progress = replace(record.progress, non_finite=policy)
            _LOG.warning("The held-out loss at step %d is not a number.", evaluation.step)
            if record.evaluations.is_empty:  # without a baseline no step is made: do not try for ever
                control.pause("Paused: the held-out loss is not a number. Resume to measure it again.")
            return None
        _LOG.info("Held-out loss at step %d: %.3f nats a token.", evaluation.step, evaluation.mean)
        return evaluation.mean

    def note(self, record: TrainingRecord, held_out_loss: float | None) -> None:
        """Tell the feed the losses of the last step, so that it can leave a memorised shard."""
        steps, loss = record.progress.steps, record.progress.loss
        if loss is None:
            return
        self._driving.feed.note_evaluation(loss, held_out_loss, steps)
        record.progress = record.progress.with_noted(NotedLoss(steps, loss, held_out_loss))

    async def _pin(self, record: TrainingRecord, requests: Requests) -> None:
        held_out = await self._waiting.timed(lambda: requests.unless_waiting(self._driving.feed.held_out))
        if held_out is not None:
            self._examiner = Evaluator(self._driving.routing, held_out, self._batch_size)
            self._examiner.prepare(record)
