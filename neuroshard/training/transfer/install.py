"""Turns a received state into a checkpoint here: what is the stage's goes on, what was the donor's own does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, cast

from neuroshard.swarm.training_report import MAX_LOSS
from neuroshard.training.checkpoint.metadata import CheckpointMeta
from neuroshard.training.checkpoint.store import CheckpointStore
from neuroshard.training.outer_sync import OuterProgress
from neuroshard.training.precision import Precision
from neuroshard.training.progress import Progress
from neuroshard.training.record import Inherited, StageIdentity, TrainingRecord, to_meta
from neuroshard.training.transfer.receiver import Received


def adopted_meta(received: Received, identity: StageIdentity) -> CheckpointMeta:
    """A record that goes on where the donor's stage was.

    Steps, tokens and what counts towards the next round go on; the donor's curve, tests, data and generator do not.
    """
    meta = received.manifest.meta
    progress = Progress(
        steps=meta.step,
        tokens=meta.tokens,
        sequences=meta.sequences,
        loss_ema=_loss(meta.loss_ema),
        initial_loss=_loss(meta.extra.get("initial_loss")),
    )
    outer = OuterProgress(
        inner_steps=meta.inner_step,
        sequences=_count(meta.extra.get("outer"), "sequences"),
        line_sequences=_count(meta.extra.get("outer"), "line_sequences"),
        since_round=_count(meta.extra.get("outer"), "since_round"),
        state_root=received.root,
    )
    made = to_meta(
        TrainingRecord(progress, inherited=Inherited(meta.step, meta.tokens)),
        outer=outer,
        outer_step=meta.outer_step,
        identity=identity,
        precision=Precision.FP32,
        time=meta.time,
    )
    return replace(made, rng={}, precision="")


def install(received: Received, identity: StageIdentity, store: CheckpointStore) -> None:
    """Make it the newest checkpoint of the stage; blocks. Raises StorageError."""
    store.adopt(adopted_meta(received, identity), received.path, received.manifest.checkpoint.tensors.sha256)


def _loss(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and 0 <= value <= MAX_LOSS else None


def _count(fields: Any, name: str) -> int:
    value = cast("Mapping[str, Any]", fields).get(name) if isinstance(fields, Mapping) else None
    return value if type(value) is int and 0 <= value < 1 << 48 else 0
