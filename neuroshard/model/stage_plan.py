"""How a run cuts its layers into contiguous stages; one stage is a plan too."""

from __future__ import annotations

from itertools import pairwise

from neuroshard.config.run_parameters import RunParameters
from neuroshard.types import LayerRange


class StagePlan(tuple[LayerRange, ...]):
    """Contiguous layer ranges that cover a model once, in order."""

    __slots__ = ()

    @classmethod
    def of(cls, *stages: LayerRange) -> StagePlan:
        """The plan with these stages. Raises ValueError unless they start at 0 and follow each other without a gap."""
        if not stages or stages[0].start != 0 or any(a.stop != b.start for a, b in pairwise(stages)):
            raise ValueError(f"stages must cover the layers from 0 without gaps, got {stages}")
        return cls(stages)

    @classmethod
    def even(cls, layer_count: int, stage_count: int) -> StagePlan:
        """Sizes that differ by at most one, the larger ones first. Raises ValueError unless 1 <= stages <= layers."""
        if not 1 <= stage_count <= layer_count:
            raise ValueError(f"{layer_count} layers cannot make {stage_count} stages")
        size, extra = divmod(layer_count, stage_count)
        edges = [stage * size + min(stage, extra) for stage in range(stage_count + 1)]
        return cls.of(*(LayerRange(start, stop) for start, stop in pairwise(edges)))


def plan_of(parameters: RunParameters) -> StagePlan:
    """The layers of each stage of a run."""
    return StagePlan.even(parameters.architecture.layer_count, parameters.stage_count)
