"""How many microbatches the stages of this computer have in work, and how many of them keep their activations. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import plan_of
from neuroshard.model.memory_need import (
    REMEMBERED_MICROBATCHES,
    MemoryNeed,
    PipelineLoad,
    memory_need,
)
from neuroshard.node.proposal import Room
from neuroshard.pipeline.sessions import SessionLimits
from neuroshard.pipeline.stage_server import ServiceLimits
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange

LEAST_OPEN = 4  # microbatches at a time: with fewer the other stages of a pipeline mostly wait
USUAL_OPEN = 8  # those of one driver
MOST_OPEN = SessionLimits().open_microbatches
REMEMBERED_OF_DRIVER = 16


@dataclass(frozen=True)
class StageWork:
    """What a stage's service may have in work; the default is that of a model in one stage."""

    limits: ServiceLimits | None = None
    kept_graphs: int | None = None


def need_of(parameters: RunParameters, stages: StageRange, room: Room, load: PipelineLoad | None) -> MemoryNeed:
    """Peak memory of training these stages."""
    layers = stages.layers(plan_of(parameters))
    outer = parameters.outer
    return memory_need(
        parameters.architecture,
        layers,
        parameters.batch_size,
        room.device,
        load,
        codec=outer.codec,
        averages_gradients=outer.strategy == "averaging",
    )


def least_load(parameters: RunParameters, stages: StageRange) -> PipelineLoad | None:
    """What these stages must at least have in work to be of use; None for a model in one stage."""
    return next(iter(reversed(list(_loads(parameters, stages)))), None)


def best_load(parameters: RunParameters, stages: StageRange, room: Room) -> PipelineLoad | None:
    """The most that fits the memory; the least when nothing does. None for a model in one stage.

    The microbatches of one driver come first, then their activations, then those of further drivers.
    """
    for load in _loads(parameters, stages):
        if need_of(parameters, stages, room, load).fits(room.tier_mb, room.device_tier_mb):
            return load
    return least_load(parameters, stages)


def stage_work(parameters: RunParameters, layers: LayerRange, load: PipelineLoad | None) -> StageWork:
    """What one stage of a load may have in work, so that its memory is what the need says."""
    if load is None:
        return StageWork()
    shapes = StageShapes.for_layers(parameters.architecture, layers, parameters.batch_size)
    answer = shapes.kept_bytes(parameters.batch_size * parameters.architecture.sequence_length)
    sessions = SessionLimits(
        open_microbatches=load.open_microbatches,
        open_of_driver=min(load.open_microbatches, SessionLimits().open_of_driver),
        kept_bytes=(load.open_microbatches + REMEMBERED_MICROBATCHES) * answer,
        kept_bytes_of_driver=(load.open_microbatches + REMEMBERED_OF_DRIVER) * answer,
    )
    return StageWork(ServiceLimits(sessions), load.kept_graphs)


def _loads(parameters: RunParameters, stages: StageRange) -> Iterator[PipelineLoad]:
    """All loads to choose from, the best first; a stage never has more open than a step takes."""
    if parameters.stage_count == 1:
        return
    plan = plan_of(parameters)
    layers = tuple(plan[index] for index in stages)
    of_step = max(1, parameters.sequences_per_step // parameters.batch_size)
    most, usual, least = (min(of_step, count) for count in (MOST_OPEN, USUAL_OPEN, LEAST_OPEN))
    for count in range(most, usual, -1):
        yield PipelineLoad(layers, count, kept_graphs=count)
    for kept in range(usual, -1, -1):
        yield PipelineLoad(layers, usual, kept_graphs=kept)
    for count in range(usual - 1, least - 1, -1):
        yield PipelineLoad(layers, count, kept_graphs=0)
