"""Runs evaluations: when they are due, on which sequences, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import sha256

import anyio
from torch import Tensor

from neuroshard.data.feed import HeldOut
from neuroshard.identity import SignedClaim
from neuroshard.training.evaluation import Evaluation, EvaluationRecord, evaluation_is_due
from neuroshard.training.held_out_claim import Measured, nats_a_token
from neuroshard.training.microbatch import Retry, StageError
from neuroshard.training.microbatch_run import measured_losses
from neuroshard.training.record import TrainingRecord
from neuroshard.training.routing import Routing

TRIES = 5  # of one microbatch
RETRY_SECONDS = 0.2


class Examiner:
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
            losses += nats_a_token(told.summed, rows.shape[1] - 1)
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
                await anyio.sleep(RETRY_SECONDS)
        return await measured_losses(self._routing, rows[:, :-1], rows[:, 1:])
