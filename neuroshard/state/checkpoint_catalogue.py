"""Saved stages that form one model: all states in given folders, and the selection among them by time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from neuroshard.errors import CheckpointError
from neuroshard.membership.stage_coverage import layers_text, missing_sentence
from neuroshard.state.checkpoint_manifest import CheckpointManifest
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import Architecture, LayerRange, RunId

FAR_APART_SECONDS = 600.0
FAR_APART_STEPS = 50
FAR_APART_SHARE = 0.05  # of the steps


@dataclass(frozen=True)
class SavedStage:
    """One saved state of one stage on disk."""

    generation: CheckpointGeneration
    manifest: CheckpointManifest

    @property
    def run_id(self) -> RunId:
        return self.manifest.meta.run_id

    @property
    def architecture(self) -> Architecture:
        """Architecture of the whole model."""
        return self.manifest.meta.architecture

    @property
    def layers(self) -> LayerRange:
        return self.manifest.meta.layers

    @property
    def is_whole(self) -> bool:
        """Whether the stage is the whole model."""
        return len(self.layers) == self.architecture.layer_count

    @property
    def tensor_file(self) -> Path:
        return Path(self.generation.path).with_name(self.manifest.tensors.file)

    @property
    def has_tensors(self) -> bool:
        """Whether the tensor file exists in full length; a copied manifest may be without it."""
        try:
            return self.tensor_file.stat().st_size == self.manifest.tensors.bytes
        except OSError:
            return False


class DamagedStageError(CheckpointError):
    """A saved state whose tensors differ from those that were written."""

    def __init__(self, stage: SavedStage, reason: str) -> None:
        super().__init__(f"{stage.generation.path} is damaged: {reason}")
        self.stage = stage


@dataclass(frozen=True)
class StageSelection:
    """One saved state of each stage that was found; together they are the model unless layers are missing."""

    stages: tuple[SavedStage, ...]  # in the order of their layers, without overlaps when nothing is missing
    missing: tuple[LayerRange, ...]

    @property
    def architecture(self) -> Architecture:
        """Architecture of the whole model."""
        return self.stages[0].architecture

    def require_whole(self) -> tuple[SavedStage, ...]:
        """Return the stages of the whole model. Raises CheckpointError that names the missing layers."""
        if self.missing:
            raise CheckpointError(
                f"{missing_sentence(self.missing)} These folders contain no saved state of them.",
                "Add --from FOLDER for each node that holds them.",
            )
        return self.stages


def saved_stages(folders: Iterable[Path]) -> list[SavedStage]:
    """List all states in these stage folders, newest first. Read-only. Raises StorageError for an unreadable folder."""
    stages = [SavedStage(*found) for folder in folders for found in CheckpointStore(folder).manifests()]
    return sorted(stages, key=lambda stage: -stage.generation.time)


def choose(stages: Sequence[SavedStage], at: float | None = None) -> StageSelection:
    """Select each stage's newest state at or before `at` (seconds since the epoch; None: any time), all of one run.

    Among overlapping stages it selects the set whose oldest state is newest. Raises CheckpointError when no state is
    that old.
    """
    newest: dict[LayerRange, SavedStage] = {}
    for stage in sorted(stages, key=lambda stage: -stage.generation.time):
        if at is None or stage.generation.time <= at:
            newest.setdefault(stage.layers, stage)
    if not newest:
        raise CheckpointError("There is no such checkpoint.", "`neuroshard checkpoint list` shows the checkpoints.")
    found = [newest[layers] for layers in sorted(newest)]
    layer_count = found[0].architecture.layer_count
    missing = _missing(newest, layer_count)
    return StageSelection(tuple(found) if missing else _without_overlaps(found, layer_count), missing)


def spread_warnings(stages: Sequence[SavedStage]) -> tuple[str, ...]:
    """Return warnings for stages that were saved so far apart that they hardly fit together."""
    times = [stage.generation.time for stage in stages]
    steps = [stage.generation.step for stage in stages]
    warnings = list[str]()
    if max(times) - min(times) > FAR_APART_SECONDS:
        seconds = max(times) - min(times)
        warnings.append(
            f"The stages were saved up to {_duration(seconds)} apart, from {moment(min(times))} to "
            f"{moment(max(times))}: combined, they make a worse model than stages that were saved together."
        )
    if max(steps) - min(steps) > max(FAR_APART_STEPS, FAR_APART_SHARE * max(steps)):
        warnings.append(
            f"The stages are at steps from {min(steps):,} to {max(steps):,}: the older ones were trained on less data."
        )
    return tuple(warnings)


def _missing(found: Iterable[LayerRange], layer_count: int) -> tuple[LayerRange, ...]:
    """Return the layers that are in none of the ranges, as ranges."""
    covered = {layer for layers in found for layer in range(layers.start, layers.stop)}
    missing = list[LayerRange]()
    for layer in range(layer_count):
        if layer in covered:
            continue
        start = missing.pop().start if missing and missing[-1].stop == layer else layer
        missing.append(LayerRange(start, layer + 1))
    return tuple(missing)


def _without_overlaps(found: Sequence[SavedStage], layer_count: int) -> tuple[SavedStage, ...]:
    """Return the adjacent stages whose oldest state is the newest."""
    best: dict[int, tuple[float, tuple[SavedStage, ...]]] = {layer_count: (inf, ())}  # by the first layer
    for stage in sorted(found, key=lambda stage: -stage.layers.start):
        if stage.layers.stop not in best:
            continue
        oldest, rest = best[stage.layers.stop]
        candidate = min(oldest, stage.generation.time), (stage, *rest)
        if stage.layers.start not in best or candidate[0] > best[stage.layers.start][0]:
            best[stage.layers.start] = candidate
    if 0 not in best:
        ranges = ", ".join(layers_text(stage.layers) for stage in found)
        raise CheckpointError(f"The saved stages overlap but do not meet: layers {ranges}.")
    return best[0][1]


def _duration(seconds: float) -> str:
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def moment(time: float) -> str:
    """A time as `--at` reads it, in whole seconds of the local time."""
    return datetime.fromtimestamp(time, UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
