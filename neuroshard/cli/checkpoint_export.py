"""`neuroshard checkpoint export`: the saved stages of a run as one model for other programs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir
from neuroshard.cli.remote import DemoNode
from neuroshard.cli.saved_states import SHOWN_PRECISION, From, facts_of, of_one_run, saved, steps_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuroshard.training.checkpoint.catalogue import SavedStage

FORMATS = ("hf", "huggingface", "gguf", "torch")  # the first two are one


def export(
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="Folder (hf) or file (gguf, torch) to write.")],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf: a Hugging Face Llama folder; gguf: a file for llama.cpp; torch: the classic file, with optimizer "
            "state.",
        ),
    ] = "hf",
    at: Annotated[
        datetime | None,
        typer.Option("--at", help="Of each stage the newest state at or before this local time. (default: now)"),
    ] = None,
    from_folders: From = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN_ID", help="Or its beginning. (default: the one saved last)")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One state alone: a .json from `checkpoint list`.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="tokenizer.json of the data set. (default: the copy that the node keeps)"),
    ] = None,
    data_dir: DataDir = None,
    demo: DemoNode = False,
    as_json: AsJson = False,
) -> None:
    """Assemble the saved stages of a run into one model for other programs."""
    from neuroshard.training.checkpoint.catalogue import DamagedStageError, choose, spread_warnings

    _check_format(format_name)
    found = saved(from_folders, data_dir, demo=demo)
    if checkpoint is not None:
        found = [stage for stage in found if Path(stage.generation.path) == checkpoint.absolute()]
    found = of_one_run(found, run)
    moment = None if at is None else at.timestamp() + SHOWN_PRECISION
    while True:
        choice = choose(found, moment)
        alone = checkpoint is not None and format_name == "torch"
        stages = choice.stages if alone else choice.require_whole()
        try:
            _write(stages, format_name, out, tokenizer)
        except DamagedStageError as error:
            if checkpoint is not None:
                raise
            typer.echo(f"{error} The state before it is taken.", err=True)
            found = [stage for stage in found if stage is not error.stage]
        else:
            break
    for warning in spread_warnings(stages):
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        written = {"out": str(out.absolute()), "format": format_name, "stages": [facts_of(stage) for stage in stages]}
        typer.echo(json.dumps(written))
    else:
        typer.echo(f"{steps_named(stages)} written to {out}.")


def _check_format(format_name: str) -> None:
    """Before anything is read. Raises UsageError for an unknown format or one that needs something installed."""
    from neuroshard.errors import UsageError

    if format_name not in FORMATS:
        raise UsageError(f"--format {format_name} is not known.", "Use --format hf, --format gguf or --format torch.")
    if format_name == "gguf":
        from neuroshard.training.checkpoint.export_gguf import require_gguf

        require_gguf()


def _write(stages: Sequence[SavedStage], format_name: str, out: Path, tokenizer: Path | None) -> None:
    """Raises DamagedStageError, StorageError, and DataError for a tokenizer that is not there or not the run's."""
    if format_name == "torch":
        from neuroshard.training.checkpoint.export import export_torch

        export_torch(stages, out)
        return
    from neuroshard.errors import DataError
    from neuroshard.node.saved_tokenizer import table_of

    table = table_of(stages, tokenizer)
    if format_name == "gguf":
        from neuroshard.training.checkpoint.export_gguf import export_gguf

        if table is None:
            raise DataError("No copy of the run's tokenizer lies in these folders.", _NAME_TOKENIZER)
        export_gguf(stages, out, table)
        return
    from neuroshard.training.checkpoint.export_llama import export_huggingface

    export_huggingface(stages, out, table)
    if table is None:
        typer.echo(f"warning: {out} has no tokenizer: no copy of it lies in these folders. {_NAME_TOKENIZER}", err=True)


_NAME_TOKENIZER = "Name tokenizer.json of its data set: --tokenizer FILE."
