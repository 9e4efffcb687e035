"""Adoption of a state that this node has received: the stage continues from it as from a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, cast

from neuroshard.pipeline.executor import Precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.outer_state import OuterProgress, count_of, line_from_json
from neuroshard.state.receiver import ReceivedState
from neuroshard.training.record import Inherited, Progress, StageIdentity, TrainingRecord, to_meta
from neuroshard.types import MAX_LOSS


def adopted_meta(received: ReceivedState, identity: StageIdentity) -> CheckpointMeta:
    """Create the record of a stage that continues from a donor's state.

    Steps, tokens and the progress towards the next round continue. The donor's curve, evaluations, data position and
    random generator do not.
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
        since_round=_count(meta.extra.get("outer"), "since_round"),
        state_root=received.root,
    )
    made = to_meta(
        TrainingRecord(progress, inherited=Inherited(meta.step, meta.tokens)),
        outer=outer,
        outer_step=meta.outer_step,
        line=line_from_json(meta.extra.get("outer")),
        identity=identity,
        precision=Precision.FP32,
        time=meta.time,
    )
    return replace(made, rng={}, precision="")


def install(received: ReceivedState, identity: StageIdentity, store: CheckpointStore) -> None:
    """Store a received state as the newest checkpoint of the stage. Blocks on disk. Raises StorageError."""
    store.adopt(adopted_meta(received, identity), received.path, received.manifest.checkpoint.tensors.sha256)


def _loss(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and 0 <= value <= MAX_LOSS else None


def _count(fields: Any, name: str) -> int:
    return count_of(cast("Mapping[str, Any]", fields).get(name)) if isinstance(fields, Mapping) else 0
