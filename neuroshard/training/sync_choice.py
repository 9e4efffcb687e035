"""The outer state of a stage, by the strategy of its run."""

from __future__ import annotations

from collections.abc import Callable

from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.model.tensor_schema import TensorSchema
from neuroshard.optim.inner import stage_clip_norm
from neuroshard.training.assembly import Stage
from neuroshard.training.compute import ComputeThread
from neuroshard.training.gradient_averaging import GradientAveraging
from neuroshard.training.gradient_sync import GradientSync
from neuroshard.training.outer_sync import Exchange, OuterSync


def sync_of(
    compute: ComputeThread, stage: Stage, exchange: Exchange, versions: Callable[[int], RunParameters], index: int
) -> OuterSync:
    """Of stage number `index`; `versions` gives the parameters of the run that hold at an outer step."""
    model, state = stage.executor.model, stage.outer_state
    schema = TensorSchema.of(model)

    def outer_at(outer_step: int) -> OuterOptimization:
        return versions(outer_step).outer

    def averaging_at(outer_step: int) -> GradientAveraging:
        parameters = versions(outer_step)
        max_norm = stage_clip_norm(index, parameters.stage_count, parameters.inner.max_grad_norm)
        return GradientAveraging.of(schema, parameters.outer, parameters.inner, max_norm)

    parameters, sequences_per_step = outer_at(state.outer_step), versions(state.outer_step).sequences_per_step
    if parameters.strategy == "averaging":
        return GradientSync(
            compute=compute,
            model=model,
            parameters=parameters,
            exchange=exchange,
            state=state,
            averaging=averaging_at,
            sequences_per_step=sequences_per_step,
            residual=stage.residual,
            progress=stage.outer_progress,
            versions=outer_at,
        )
    return OuterSync(
        compute=compute,
        model=model,
        parameters=parameters,
        exchange=exchange,
        state=state,
        residual=stage.residual,
        progress=stage.outer_progress,
        versions=outer_at,
    )
