"""Held-out evaluation by the driver: its schedule, its pinned sequences, its cost, and its report to the data feed."""

from __future__ import annotations

import logging
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TypeAlias

import anyio
from torch import Tensor

from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import (
    PINNED_SEQUENCES,
    Evaluation,
    HeldOutLosses,
    Measured,
    nats_per_token,
)
from neuroshard.identity import SignedClaim
from neuroshard.pipeline.control import Control, Requests
from neuroshard.pipeline.driver import DataWait, Pace
from neuroshard.pipeline.microbatch import Retry, StageError
from neuroshard.pipeline.microbatch_call import measured_losses
from neuroshard.pipeline.routing import Routing
from neuroshard.training.parts import DriverParts
from neuroshard.training.record import NOTED_LOSSES, EvaluationRecord, NotedLoss, TrainingRecord
from neuroshard.types import DataPosition

TRIES = 5  # per microbatch
STAGE_RETRY_SECONDS = 0.2
RETRY_SECONDS = 1.0  # after a failure of a stage
TIME_SHARE = 0.02
MIN_INTERVAL_SECONDS = 5.0  # no reader needs more points
LEAST_VOTED = PINNED_SEQUENCES // 2

_LOG = logging.getLogger(__name__)


def evaluation_is_due(trained_seconds: float, cost_seconds: float | None) -> bool:
    """Return whether an evaluation of `cost_seconds` stays within 2 % of the time trained since the last one.

    The first one (cost unknown) is due at once, because all later ones are compared with it.
    """
    if cost_seconds is None:
        return True
    return trained_seconds >= max(MIN_INTERVAL_SECONDS, cost_seconds / TIME_SHARE)


MeanLosses: TypeAlias = Callable[[], Awaitable[tuple[float, ...] | None]]
"""Returns the losses of the mean of all replicas on the pinned sequences; (): not now; None: there is no such mean."""


class Evaluator:
    """Measures the held-out loss of a record when it is due. The record belongs to the calling loop."""

    def __init__(
        self,
        driving: DriverParts,
        batch_size: int,
        *,
        control: Control,
        pace: Pace,
        waiting: DataWait,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`wall_clock` returns seconds since the epoch; `clock` measures the duration of an evaluation."""
        self.held_out: HeldOut | None = None  # the pinned sequences; None until they are loaded
        self.for_choice: Tensor | None = None  # other pinned sequences (n, t + 1), that nothing here is measured on
        self._driving = driving
        self._batch_size = batch_size
        self._control = control
        self._pace = pace
        self._waiting = waiting
        self._wall_clock = wall_clock
        self._clock = clock
        self._trained_seconds = 0.0  # since the last evaluation
        self._voted: tuple[float, ...] = ()  # losses of the last vote
        self._first_position = driving.feed.position

    def replay_losses_to_feed(self, record: TrainingRecord) -> None:
        """Replay the losses on the record's shard, so that a resumed feed changes shards at the same step."""
        feed, progress = self._driving.feed, record.progress
        if progress.position != feed.position:
            record.progress = replace(progress, noted=())
        for noted in record.progress.noted:
            feed.note_evaluation(noted.train_loss, noted.held_out_loss, noted.step)

    def rewind_feed(self, record: TrainingRecord, position: DataPosition | None) -> None:
        """Let the feed continue after the last step, as after a restart. `position` is None before the first step."""
        self._driving.feed.rewind(self._first_position if position is None else position)
        self.replay_losses_to_feed(record)

    def is_ready(self, record: TrainingRecord) -> bool:
        """Whether steps may be made: the first evaluation, the baseline of all others, comes before them.

        A node that continues other nodes' work makes its first evaluation after a step, so that it can help at once.
        """
        return self.held_out is not None and (not record.evaluations.is_empty or record.inherited.steps > 0)

    async def get_ready(self, record: TrainingRecord, requests: Requests) -> None:
        """Load the pinned sequences or measure the first loss, unless a request comes first."""
        if self.held_out is None:
            await self._pin(record, requests)
        elif await self.measure(record) is None:
            await requests.unless_waiting(lambda: anyio.sleep(RETRY_SECONDS))

    def is_due(self, record: TrainingRecord) -> bool:
        """Add the time of a step and return whether an evaluation is due."""
        if self.held_out is None:
            return False
        self._trained_seconds += self._pace.step_seconds
        return evaluation_is_due(self._trained_seconds, record.evaluation_seconds)

    async def measure(self, record: TrainingRecord, of_replicas: MeanLosses | None = None) -> float | None:
        """Evaluate and record the mean held-out loss in nats per token: of the replicas' mean if there is one.

        Returns None if it is not finite, not new, a request interrupted it, or a stage failed repeatedly.
        """
        held_out, control = self.held_out, self._control
        if held_out is None or control.must_hold:
            return None
        try:
            evaluation = await control.until_changed(partial(self._evaluate, held_out, record, of_replicas))
        except StageError as error:
            _LOG.warning("The held-out loss could not be measured: %s", error)
            evaluation = None
        self._pace.restart()  # evaluations do not count as time of the steps
        if evaluation is None:
            return None
        if not evaluation.is_finite:
            policy = replace(record.progress.non_finite, last_step=record.progress.steps)
            record.progress = replace(record.progress, non_finite=policy)
            _LOG.warning("The held-out loss at step %d is not a number.", evaluation.step)
            if record.evaluations.is_empty:  # no step is made without a baseline: pause instead of trying for ever
                control.pause("Paused: the held-out loss is not a number. Resume to measure it again.")
            return None
        _LOG.info("Held-out loss at step %d: %.3f nats per token.", evaluation.step, evaluation.mean)
        return evaluation.mean

    def note_vote(self, record: TrainingRecord, losses: tuple[float, ...]) -> None:
        """Record the losses that this node's vote measured of the mean of all replicas, once, as an evaluation.

        A vote whose time ran out has measured the first of the pinned sequences. LEAST_VOTED of them are enough. The
        next evaluation is due as late as after its own.
        """
        held_out, known = self.held_out, record.evaluations.evaluations
        is_enough = held_out is not None and LEAST_VOTED <= len(losses) <= len(held_out.sequences)
        if not is_enough or not known or losses == self._voted:
            return
        self._voted = losses
        evaluation = Evaluation(record.progress.steps, self._wall_clock(), losses)
        if evaluation.is_finite and evaluation.step > known[-1].step:
            record.evaluations.add(evaluation)
            self._trained_seconds = 0.0

    def note(self, record: TrainingRecord, held_out_loss: float | None) -> None:
        """Report the losses of the last step to the feed, so that it can leave a memorised shard."""
        steps, loss = record.progress.steps, record.progress.loss
        if loss is None:
            return
        self._driving.feed.note_evaluation(loss, held_out_loss, steps)
        noted = (*record.progress.noted, NotedLoss(steps, loss, held_out_loss))
        record.progress = replace(record.progress, noted=noted[-NOTED_LOSSES:])

    async def _pin(self, record: TrainingRecord, requests: Requests) -> None:
        """Load the pinned sequences. Evaluations of other sequences are dropped because they cannot be compared."""
        with self._waiting.timed():
            pinned = await requests.unless_waiting(partial(self._driving.feed.held_out, 2 * PINNED_SEQUENCES))
        if pinned is None:
            return
        held_out = replace(pinned, sequences=pinned.sequences[:PINNED_SEQUENCES])
        self.held_out, self.for_choice = held_out, pinned.sequences[PINNED_SEQUENCES:]
        digest = sha256(held_out.sequences.numpy().tobytes()).hexdigest()
        if record.pinned_digest != digest:
            record.evaluations, record.evaluation_seconds = EvaluationRecord(), None
            record.pinned_digest = digest

    async def _evaluate(
        self, held_out: HeldOut, record: TrainingRecord, of_replicas: MeanLosses | None
    ) -> Evaluation | None:
        """Evaluate, and record the result if it is finite. Returns None while there is no new mean to measure."""
        now, started, step = self._wall_clock(), self._clock(), record.progress.steps
        losses = None if of_replicas is None else await of_replicas()
        if losses is None:
            evaluation = await evaluate(self._driving.routing, held_out.sequences, self._batch_size, step=step, now=now)
        elif not losses or losses == self._voted:
            self._trained_seconds = 0.0
            return None
        else:
            self._voted, evaluation = losses, Evaluation(step, now, losses)
        record.evaluation_seconds = self._clock() - started
        self._trained_seconds = 0.0
        if evaluation.is_finite:
            record.evaluations.add(evaluation)
        return evaluation


async def evaluate(routing: Routing, sequences: Tensor, batch_size: int, *, step: int, now: float) -> Evaluation:
    """Evaluate sequences (n, t+1) through the stages, one microbatch at a time. `now` is in seconds since the epoch.

    Raises StageError when a stage fails repeatedly.
    """
    losses: list[float] = []
    claims: list[SignedClaim[HeldOutLosses]] = []
    for start in range(0, len(sequences), batch_size):
        rows = sequences[start : start + batch_size]
        measured = await _measured(routing, rows)
        losses += nats_per_token(measured.summed, rows.shape[1] - 1)
        claims += [] if measured.claim is None else [measured.claim]
    nodes = tuple(sorted({claim.delegation.node_id for claim in claims}))
    signed = tuple(b64encode(claim.encode()).decode() for claim in claims)
    return Evaluation(step, now, tuple(losses), nodes, signed)


async def _measured(routing: Routing, rows: Tensor) -> Measured:
    """Measure the losses of some sequences; a failed stage is asked again up to TRIES times."""
    for _ in range(TRIES - 1):
        try:
            return await measured_losses(routing, rows[:, :-1], rows[:, 1:])
        except StageError as error:
            if error.retry is Retry.NEVER:
                raise
            await anyio.sleep(STAGE_RETRY_SECONDS)
    return await measured_losses(routing, rows[:, :-1], rows[:, 1:])
