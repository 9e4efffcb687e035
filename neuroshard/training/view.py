"""The trainer as others see it: frozen status values, made on request from what the trainer holds."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.status.snapshot import (
    CheckpointStatus,
    DataStatus,
    DilocoStatus,
    LossPoint,
    NodeState,
    TrainingStatus,
    VerificationStatus,
)
from neuroshard.training.precision import Precision
from neuroshard.training.progress import Speed
from neuroshard.training.record import TrainingRecord
from neuroshard.training.verification import TREND_POINTS, Evidence, verify


@dataclass(frozen=True)
class TrainerSnapshot:
    """Everything a NodeStatus says about training."""

    state: NodeState
    reason: str
    paused_until: float | None  # seconds since the epoch
    training: TrainingStatus
    verification: VerificationStatus
    diloco: DilocoStatus
    data: DataStatus
    checkpoints: CheckpointStatus
    history: tuple[LossPoint, ...]


def training_status(
    record: TrainingRecord,
    parameters: RunParameters,
    *,
    speed: Speed,
    precision: Precision,
    held_out_sequences: int,
    unigram_entropy: float | None,
) -> TrainingStatus:
    """Progress of the inner steps."""
    progress = record.progress
    return TrainingStatus(
        steps=progress.steps,
        tokens=progress.tokens,
        loss=progress.loss,
        loss_ema=progress.loss_ema,
        initial_loss=progress.initial_loss,
        lr=learning_rate_at(progress.steps, parameters.inner),
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


def verification_status(
    record: TrainingRecord, parameters: RunParameters, state: NodeState, reason: str
) -> VerificationStatus:
    """The verdict for a trainer in this state; waiting for data is part of training."""
    progress = record.progress
    return verify(
        Evidence(
            evaluations=record.evaluations.evaluations,
            recent=record.history.recent(TREND_POINTS),
            initial_loss=progress.initial_loss,
            is_training=state in (NodeState.TRAINING, NodeState.WAITING_FOR_DATA, NodeState.STARTING),
            state_reason=reason,
            learning_rate=parameters.inner.learning_rate,
            last_non_finite_step=progress.non_finite.last_step,
        )
    )
