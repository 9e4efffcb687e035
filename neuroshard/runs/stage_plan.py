"""The plan of a run before anybody starts: parameters and memory of each stage, and what cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.model.architecture import parameter_count, plan_of
from neuroshard.model.memory_limit import TIER_MB, least_limit_mb
from neuroshard.model.memory_need import PipelineLoad, memory_need
from neuroshard.types import MAX_LAYERS, LayerRange

LEAST_OPEN = 4  # open microbatches of a stage: with fewer the other stages of a pipeline mostly wait


@dataclass(frozen=True)
class PlannedStage:
    """One stage, and the memory that a computer without accelerator needs to train it alone."""

    layers: LayerRange
    parameters: int
    memory_mb: int  # with the network's buffers, for the smallest load that is useful to a pipeline
    tier_mb: int  # the least memory limit, which counts in steps of 500 MB


def planned_stages(parameters: RunParameters) -> tuple[PlannedStage, ...]:
    """The stages of a run in their order."""
    return tuple(_planned(parameters, layers) for layers in plan_of(parameters))


def plan_warnings(parameters: RunParameters, stages: Sequence[PlannedStage], here_mb: int) -> tuple[str, ...]:
    """Parts of the plan that cannot work, or not well. `here_mb` is the memory limit of this computer."""
    warnings = list[str]()
    layer_count, open_at_once = parameters.architecture.layer_count, _microbatches(parameters)
    if layer_count > MAX_LAYERS:
        warnings.append(f"layer_count = {layer_count}: nodes cannot announce more than {MAX_LAYERS} layers.")
    large = [number for number, stage in enumerate(stages, 1) if stage.tier_mb > here_mb]
    if large:
        which = "no stage" if len(large) == len(stages) else f"{len(stages) - len(large)} of {len(stages)} stages"
        least, most = min(stage.tier_mb for stage in stages), max(stage.tier_mb for stage in stages)
        needed = f"{most:,} MB" if least == most else f"{least:,} to {most:,} MB"
        warnings.append(f"This computer may use {here_mb:,} MB and can train {which}; a stage needs {needed}.")
    if open_at_once < len(stages):
        warnings.append(
            f"A step has {open_at_once} microbatches for {len(stages)} stages, so at least "
            f"{len(stages) - open_at_once} of them wait at any time. Raise sequences_per_step to "
            f"{len(stages) * parameters.batch_size} or more."
        )
    return tuple(warnings)


def _planned(parameters: RunParameters, layers: LayerRange) -> PlannedStage:
    load = None if parameters.stage_count == 1 else PipelineLoad((layers,), min(_microbatches(parameters), LEAST_OPEN))
    outer = parameters.outer
    need = memory_need(
        parameters.architecture,
        layers,
        parameters.batch_size,
        "cpu",
        load,
        codec=outer.codec,
        averages_gradients=outer.strategy == "averaging",
        optimizer=parameters.inner.optimizer,
        subspace_cache_mb=parameters.subspace_cache_mb,
    )
    megabytes = least_limit_mb(need.host_bytes)
    tier = -(-megabytes // TIER_MB) * TIER_MB
    return PlannedStage(layers, parameter_count(parameters.architecture, layers), megabytes, tier)


def _microbatches(parameters: RunParameters) -> int:
    """Microbatches of a step."""
    return max(1, parameters.sequences_per_step // parameters.batch_size)
