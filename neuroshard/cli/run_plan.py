"""`neuroshard run plan`: memory and traffic of each stage of a run that does not exist yet."""

from __future__ import annotations

import json
import os
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuroshard.cli.options import AsJson, MemoryLimit, given
from neuroshard.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuroshard.config.run_parameters import RunParameters
    from neuroshard.runs.stage_plan import PlannedStage

STANDARD_VOCABULARY = 32_000  # of a data set that `genesis build` makes with its largest vocabulary
ANY_KEY = "58" + 31 * "66"  # of an organiser that does not exist yet: a valid point, the base point of Ed25519
UPLOADS_MBIT = 5, 20, 100  # per second, of lines at home


def plan(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="run.toml or run.yaml: the parameters of the run.")],
    memory: MemoryLimit = None,
    as_json: AsJson = False,
) -> None:
    """Print layers, parameters, memory and traffic of each stage. Nothing is signed, and no data is needed.

    Without vocabulary_size and genesis in the file, the plan uses 32,000 ids.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.config.run_parameters import GenesisPins
    from neuroshard.identity import genesis_pins_from_json
    from neuroshard.model.memory_limit import available_mb, probe_memory, tier_mb
    from neuroshard.runs.run_file import model_warnings, new_parameters, read_run_config, recipe_warnings
    from neuroshard.runs.stage_plan import plan_warnings, planned_stages

    settings = load_settings(given(memory=memory), os.environ).settings
    entries = read_run_config(config)
    if entries.get("admission") == "admitted":
        entries = {"authority": [ANY_KEY], **entries}  # `run create` makes the key
    named = entries.get("genesis")
    nothing = GenesisPins("0" * 64, 1, None, "0" * 64, STANDARD_VOCABULARY)
    pins = nothing if named is None else genesis_pins_from_json(named)
    parameters = new_parameters(entries, pins)
    stages = planned_stages(parameters)
    here_mb = tier_mb(available_mb(probe_memory(), settings.memory))
    warnings = (
        *plan_warnings(parameters, stages, here_mb),
        *model_warnings(entries),
        *recipe_warnings(parameters.outer),
    )
    facts = _facts(parameters, stages, here_mb)
    if as_json:
        typer.echo(json.dumps({**facts, "warnings": warnings}))
        return
    for line in _table(parameters, facts):
        typer.echo(line)
    for warning in warnings:
        typer.echo(f"Warning: {warning}")


def _facts(parameters: RunParameters, stages: Sequence[PlannedStage], here_mb: int) -> dict[str, Any]:
    """The plan as JSON. An edge leads from a stage to the next one."""
    from neuroshard.pipeline.stage_protocol import wire_bytes, wire_precisions

    shape, precisions = parameters.architecture, wire_precisions(parameters)
    tokens = parameters.batch_size * shape.sequence_length  # of a microbatch, which may have bytes of its own
    forward, backward = (ceil(wire_bytes(tokens, shape.wire_size, precision) / tokens) for precision in precisions)
    forward += ID_BYTES if shape.subspace_rank else 0
    last = len(stages) - 1
    busiest = 0 if last == 0 else forward + backward if last > 1 else max(forward, backward)
    rows = [
        {
            "stage": number,
            "first_layer": stage.layers.start,
            "last_layer": stage.layers.stop - 1,
            "parameters": stage.parameters,
            "memory_mb": stage.memory_mb,
            "tier_mb": stage.tier_mb,
            "fits_here": stage.tier_mb <= here_mb,
            "activation_bytes_per_token": forward if number < last else None,
            "gradient_bytes_per_token": backward if number else None,
        }
        for number, stage in enumerate(stages)
    ]
    total = sum(stage.parameters for stage in stages)
    return {
        "parameters": total,
        "vocabulary_size": shape.vocabulary_size,
        "subspace_rank": shape.subspace_rank,
        "free_blocks": shape.free_blocks,
        "batch_size": parameters.batch_size,
        "wire_precision": precisions[0].value,
        "wire_precision_gradients": precisions[1].value,
        "busiest_upload_per_token": busiest,
        "here_mb": here_mb,
        "stages": rows,
    }


def _table(parameters: RunParameters, facts: dict[str, Any]) -> list[str]:
    shape, batch = parameters.architecture, parameters.batch_size
    model = f"{facts['parameters']:,} parameters, {shape.layer_count} layers of width {shape.hidden_size}"
    lines = [
        f"{model}, {shape.vocabulary_size:,} ids, sequences of {shape.sequence_length:,} tokens",
        f"{batch} sequence{'' if batch == 1 else 's'} per microbatch, activations in {facts['wire_precision']}",
        *_subspace_line(parameters),
        "Memory of a computer without accelerator that holds one stage; limits count in steps of 500 MB.",
        "",
        "stage  layers       parameters  memory (MB)  limit (MB)  bytes/token to next  gradients to previous",
    ]
    for row in facts["stages"]:
        layers = f"{row['first_layer']}-{row['last_layer']}"
        forward, backward = (
            "-" if row[name] is None else f"{row[name]:,}"
            for name in ("activation_bytes_per_token", "gradient_bytes_per_token")
        )
        lines.append(
            f"{row['stage'] + 1:>5}  {layers:<9} {row['parameters']:>13,}  {row['memory_mb']:>11,}  "
            f"{row['tier_mb']:>10,}  {forward:>19}  {backward:>21}"
        )
    return [*lines, *_line_speed(facts["busiest_upload_per_token"])]


def _line_speed(busiest: int) -> list[str]:
    """Tokens per second that usual lines carry through the stage that sends most."""
    if busiest == 0:
        return []
    *lower, highest = (f"{mbit * 125_000 // busiest:,} tokens/s at {mbit} Mbit/s" for mbit in UPLOADS_MBIT)
    speeds = f"{', '.join(lower)} and {highest}"
    return [f"The busiest stage uploads {busiest:,} bytes per token. The limit of its line is {speeds} up."]


def _subspace_line(parameters: RunParameters) -> list[str]:
    shape = parameters.architecture
    if shape.subspace_rank == 0:
        return []
    free = f"the last {shape.free_blocks} layers are free" if shape.free_blocks else "no layer is free"
    return [f"Subspace of rank {shape.subspace_rank}: coefficients and token ids travel; {free}"]
