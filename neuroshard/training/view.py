"""The trainer as others see it: frozen status values, made on request from what the trainer holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from neuroshard.config.run_parameters import RunParameters
from neuroshard.optim.schedule import learning_rate_at
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
from neuroshard.training.composition import Composition
from neuroshard.training.parts import StageParts, TrainerParts
from neuroshard.training.precision import Precision
from neuroshard.training.progress import Speed
from neuroshard.training.record import TrainingRecord
from neuroshard.training.stage_loop import StageLoop
from neuroshard.training.verification import TREND_POINTS, Evidence, verify

AT_WORK = frozenset({NodeState.TRAINING, NodeState.WAITING_FOR_DATA, NodeState.WAITING_FOR_STAGES, NodeState.STARTING})
NOTHING_HELD = DilocoStatus(members=0, explanation="This node holds no layers: it has nothing to synchronise.")


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
    checkpoints: CheckpointStatus  # of the stage with the first layers; trouble and losses of any
    history: tuple[LossPoint, ...]
    stages: tuple[StageStatus, ...] = ()
    flow: PipelineFlow | None = None  # of the microbatches that this node drives


@dataclass(frozen=True)
class TrainerState:
    """What a trainer does, and why."""

    state: NodeState
    reason: str
    paused_until: float | None  # seconds since the epoch


def trainer_snapshot(parts: TrainerParts, loops: Composition, state: TrainerState, data: DataStatus) -> TrainerSnapshot:
    """All of it, about the primary loop, with a row for each stage."""
    record, pace = loops.primary.record, loops.primary.pace
    held = parts.stages[0] if parts.stages else None
    parameters = parts.parameters if held is None else parts.in_force(held)
    held_out = None if loops.drive is None else loops.drive.watch.held_out
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
        stages=tuple(stage_status(stage, loop.record, saved) for stage, loop, saved in rows),
        flow=None if loops.drive is None else loops.drive.driver.flow.flow(),
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
    """Progress of the inner steps."""
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


def _learning_rate(record: TrainingRecord, parameters: RunParameters, held: StageParts | None) -> float:
    """Of the next step; who only drives has no line of its own and tells it by the steps it has seen."""
    return (
        learning_rate_at(record.progress.steps, parameters.inner)
        if held is None
        else held.outer.learning_rate(parameters)
    )


def verification_status(
    record: TrainingRecord, parameters: RunParameters, state: TrainerState, *, is_measured_here: bool
) -> VerificationStatus:
    """The verdict for a trainer in this state; waiting for data is part of training."""
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


def diloco_status(stages: Sequence[StageParts]) -> DilocoStatus:
    """Outer steps of the stage with the first layers, rounds of all."""
    if not stages:
        return NOTHING_HELD
    outer, group = stages[0].outer, stages[0].group
    status = outer.status()
    certified = "" if group is None else group.certified_root(status.outer_steps)
    rounds = tuple(stage.group.status for stage in stages if stage.group is not None)
    return replace(status, certified_root=certified or status.certified_root, rounds=rounds)


def stage_status(parts: StageParts, record: TrainingRecord, checkpoints: CheckpointStatus) -> StageStatus:
    """One stage's row."""
    intake, progress = parts.service.intake, record.progress
    return StageStatus(
        index=parts.index,
        layers=parts.executor.model.layer_range,
        steps=progress.steps,
        outer_step=parts.outer.state.outer_step,
        loss=progress.loss,
        grad_norm=progress.grad_norm,
        sequences_accumulated=intake.accumulated.sequences,
        sequences_wanted=intake.wanted,
        open_microbatches=intake.open_microbatches,
        sessions=parts.service.session_count,
        state_root=parts.outer.progress.state_root,
        last_saved_step=checkpoints.last_saved_step,
    )


def checkpoint_status(stages: Sequence[CheckpointStatus]) -> CheckpointStatus:
    """Of a node with these stages: the first one's, with what could be lost and the alarm of the worst one."""
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
    saver = loop.stage.parts.saver
    if saver is None:
        return CheckpointStatus(could_lose="everything: checkpoints are off")
    return saver.status(loop.steps, loop.pace.speed.step_seconds)
