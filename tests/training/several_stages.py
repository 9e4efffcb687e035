"""A trainer that holds all three stages of the small model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from small_stage import IDENTITY, PARAMETERS, MemoryFeed, make_parts, make_stage
from torch import Tensor

from neuroshard.config.run_parameters import RunParameters
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, StageClient
from neuroshard.training.parts import DriverParts, StageParts, TrainerParts
from neuroshard.training.stage_checkpoint import Stage
from neuroshard.training.trainer import Trainer
from neuroshard.types import LayerRange

CUTS = (0, 1, 2, 3)
WHOLE = replace(PARAMETERS, sequences_per_step=8, inner=replace(PARAMETERS.inner, max_grad_norm=1e9))  # never clipped
SPLIT = replace(WHOLE, stage_count=3)


def make_stages(compute: ComputeThread, folder: Path, parameters: RunParameters = SPLIT) -> list[Stage]:
    """Built or restored, each in a folder of its own."""
    return [
        make_stage(compute, folder / str(number), parameters, replace(IDENTITY, layers=LayerRange(start, stop)))
        for number, (start, stop) in enumerate(pairwise(CUTS))
    ]


def parts_of(
    compute: ComputeThread, stages: Sequence[Stage], parameters: RunParameters = SPLIT
) -> tuple[StageParts, ...]:
    """Each stage in a sync group of one."""
    return tuple(
        make_parts(compute, stage, parameters, replace(IDENTITY, layers=LayerRange(start, stop)), number)
        for number, (stage, (start, stop)) in enumerate(zip(stages, pairwise(CUTS), strict=True))
    )


def make_split_trainer(
    compute: ComputeThread,
    stages: Path | list[Stage],
    *,
    feed: MemoryFeed | None = None,
    in_flight: int = 1,
    parameters: RunParameters = SPLIT,
    wrap: Callable[[int, LocalStageClient], StageClient] = lambda _, hop: hop,
    monotonic: Callable[[], float] | None = None,
) -> Trainer:
    """Drives microbatches through its own three stages, given ones or those that a folder holds."""
    stages = make_stages(compute, stages, parameters) if isinstance(stages, Path) else stages
    held = parts_of(compute, stages, parameters)
    feed = feed or MemoryFeed(stages[0].record.progress.position)
    routing = FixedRouting([wrap(part.index, LocalStageClient(part.service)) for part in held])
    parts = TrainerParts(parameters, held, DriverParts(IDENTITY.node_id, feed, routing, in_flight))
    records = [stage.record for stage in stages]
    return Trainer(parts, records) if monotonic is None else Trainer(parts, records, monotonic=monotonic)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """By name, of all stages."""
    return {
        name: parameter.detach().clone()
        for stage in trainer.parts.stages
        for name, parameter in stage.executor.model.named_parameters()
    }
