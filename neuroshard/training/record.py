"""Everything a checkpoint keeps beside tensors, between the trainer's own values and the checkpoint's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from neuroshard.errors import CheckpointError
from neuroshard.status.snapshot import LossPoint
from neuroshard.training.checkpoint.metadata import CheckpointMeta
from neuroshard.training.evaluation import EvaluationRecord
from neuroshard.training.history import LossHistory
from neuroshard.training.non_finite import NonFinitePolicy
from neuroshard.training.outer_sync import OuterProgress
from neuroshard.training.precision import Precision
from neuroshard.training.progress import NotedLoss, Progress
from neuroshard.types import Architecture, JsonValue, LayerRange, NodeId, RunId, WalletId

_TORCH_GENERATOR = "torch"


@dataclass(frozen=True)
class StageIdentity:
    """Whose checkpoint it is and what it fits."""

    wallet_id: WalletId
    node_id: NodeId
    run_id: RunId
    architecture: Architecture
    layers: LayerRange
    threads: int  # of one torch operation: results are bit-identical only with the same number


@dataclass(frozen=True)
class Inherited:
    """What others had made of a stage when this node took it over: it is not counted as this node's work."""

    steps: int = 0
    tokens: int = 0


@dataclass
class TrainingRecord:
    """What the trainer knows beside tensors; the trainer is its only writer."""

    progress: Progress = field(default_factory=Progress)
    history: LossHistory = field(default_factory=LossHistory)
    evaluations: EvaluationRecord = field(default_factory=EvaluationRecord)
    evaluation_seconds: float | None = None  # what the last evaluation cost
    node_id: NodeId | None = None  # whose data position a restored record holds
    pinned_digest: str = ""  # SHA-256 of the pinned sequences: results on others are not comparable
    inherited: Inherited = field(default_factory=Inherited)

    def note_loss(self, loss: float | None, time: float, learning_rate: float) -> None:
        """Add the last step to the curve; `time` in seconds since the epoch."""
        if loss is not None:
            self.history.add(LossPoint(self.progress.steps, time, loss, learning_rate, self.progress.tokens))


def to_meta(
    record: TrainingRecord,
    *,
    outer: OuterProgress,
    outer_step: int,
    identity: StageIdentity,
    precision: Precision,
    time: float,
) -> CheckpointMeta:
    """The metadata of a checkpoint taken now; `time` in seconds since the epoch."""
    progress = record.progress
    extra: dict[str, JsonValue] = {
        "evaluations": record.evaluations.to_json(),
        "evaluation_seconds": record.evaluation_seconds,
        "pinned_digest": record.pinned_digest,
        "initial_loss": progress.initial_loss,
        "grad_norm": progress.grad_norm,
        "noted": [[n.step, n.train_loss, n.held_out_loss] for n in progress.noted],
        "non_finite": asdict(progress.non_finite),
        "outer": asdict(outer),
        "inherited": asdict(record.inherited),
    }
    return CheckpointMeta(
        wallet_id=identity.wallet_id,
        node_id=identity.node_id,
        run_id=identity.run_id,
        architecture=identity.architecture,
        layers=identity.layers,
        step=progress.steps,
        time=time,
        tokens=progress.tokens,
        sequences=progress.sequences,
        loss=progress.loss,
        loss_ema=progress.loss_ema,
        outer_step=outer_step,
        inner_step=outer.inner_steps,
        data_position=progress.position,
        rng={_TORCH_GENERATOR: torch.random.get_rng_state().numpy().tobytes().hex()},
        threads=identity.threads,
        precision=precision.value,
        held_out=record.evaluations.points,
        history=record.history.snapshot(),
        extra=extra,
    )


def from_meta(meta: CheckpointMeta) -> tuple[TrainingRecord, OuterProgress]:
    """The trainer's values of a checkpoint. Raises CheckpointError when its extra part is not one of ours."""
    extra: Mapping[str, Any] = meta.extra
    try:
        progress = Progress(
            steps=meta.step,
            tokens=meta.tokens,
            sequences=meta.sequences,
            loss=meta.loss,
            loss_ema=meta.loss_ema,
            initial_loss=extra["initial_loss"],
            grad_norm=extra["grad_norm"],
            position=meta.data_position,
            noted=tuple(NotedLoss(int(step), float(loss), held_out) for step, loss, held_out in extra["noted"]),
            non_finite=NonFinitePolicy(**extra["non_finite"]),
        )
        record = TrainingRecord(
            progress,
            LossHistory(meta.history),
            EvaluationRecord.from_json(extra["evaluations"]),
            extra["evaluation_seconds"],
            meta.node_id,
            str(extra["pinned_digest"]),
            Inherited(**extra.get("inherited", {})),
        )
        counted: dict[str, Any] = {"since_round": meta.sequences, **extra["outer"]}
        return record, OuterProgress(**counted)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("The checkpoint's training record is malformed.") from error


def restore_random_state(meta: CheckpointMeta) -> None:
    """Put torch's generator back where it was. Raises CheckpointError for a malformed state."""
    state = meta.rng.get(_TORCH_GENERATOR)
    if state is None:
        return
    try:
        torch.random.set_rng_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError("The checkpoint's random state is malformed.") from error
