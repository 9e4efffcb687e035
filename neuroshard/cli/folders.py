"""`neuroshard folders`: where a user's data lie, for the programs that remove NeuroShard."""

from __future__ import annotations

import json

import typer

from neuroshard.cli.options import AsJson


def folders(as_json: AsJson = False) -> None:
    """Print the folders that hold your keys, settings and checkpoints, one a line. They need not be there yet."""
    from neuroshard.config.data_dir import data_folders

    found = [str(folder) for folder in data_folders()]
    typer.echo(json.dumps({"folders": found}) if as_json else "\n".join(found))
