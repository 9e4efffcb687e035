"""Saved states as the commands of `neuroshard checkpoint` find, choose and tell them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import node_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuroshard.training.checkpoint.catalogue import SavedStage
    from neuroshard.types import LayerRange

SHOWN_PRECISION = 0.999_999  # seconds: the list shows whole ones, and what it shows can be gone back to

From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        help="Data folder of a node, or a folder with several; may be repeated. (default: the data folder)",
    ),
]


def saved(given: Sequence[Path] | None, data_dir: Path | None, *, demo: bool) -> list[SavedStage]:
    """All saved states, newest first: in the given folders, or of the node and of those that its demo started."""
    from neuroshard.training.checkpoint.catalogue import saved_stages
    from neuroshard.training.checkpoint.store import find_stage_folders, search_stage_folders

    if given or demo:
        roots = [path.absolute() for path in given] if given else [node_folder(data_dir, demo=True)]
        folders = {folder for root in roots for folder in search_stage_folders(root)}
    else:
        own = node_folder(data_dir, demo=False)
        folders = {folder for root in (own, *own.glob("node-*")) for folder in find_stage_folders(root)}
    return saved_stages(sorted(folders))


def none_found(given: Sequence[Path] | None, data_dir: Path | None, *, demo: bool) -> str:
    """That nothing is saved, and where it was looked for."""
    places = [path.absolute() for path in given] if given else [node_folder(data_dir, demo=demo)]
    return f"No checkpoints yet in {', '.join(map(str, places))}."


def of_one_run(found: list[SavedStage], run: str | None) -> list[SavedStage]:
    """Those of the named run or of the one saved last, that can be read. Raises CheckpointError when there are none."""
    from neuroshard.errors import CheckpointError

    if run is not None:
        found = [stage for stage in found if stage.run_id.startswith(run)]
    usable = [stage for stage in found if stage.has_tensors]
    for stage in found:
        if not stage.has_tensors:
            typer.echo(f"{stage.generation.path} is left out: its tensors are not beside it.", err=True)
    if not usable:
        raise CheckpointError("There is no such checkpoint.", "`neuroshard checkpoint list` shows what there is.")
    return [stage for stage in usable if stage.run_id == usable[0].run_id]


def steps_named(stages: Sequence[SavedStage]) -> str:
    """How far these stages are."""
    if len(stages) == 1 and stages[0].is_whole:
        return f"Step {stages[0].generation.step:,}"
    return ", ".join(f"{layers_named(stage.layers)} of step {stage.generation.step:,}" for stage in stages)


def layers_named(layers: LayerRange) -> str:
    """The layers of a stage."""
    from neuroshard.swarm.stage_coverage import layers_text

    return f"layer {layers_text(layers)}" if len(layers) == 1 else f"layers {layers_text(layers)}"


def facts_of(stage: SavedStage) -> dict[str, object]:
    """What is told of a saved state as JSON."""
    place = {"run_id": stage.run_id, "layers": [stage.layers.start, stage.layers.stop]}
    return {**asdict(stage.generation), **place, "layer_count": stage.architecture.layer_count}
