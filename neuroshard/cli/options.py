"""Options that several commands share, and how given flags become settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="Checkpoints, cache, logs and keys. (default: per-user folder)"),
]
Port = Annotated[int | None, typer.Option("--port", help="HTTP port of dashboard and API. (default: 8000)")]
Host = Annotated[
    str | None,
    typer.Option(
        "--host", help="Address to serve on; any other than loopback requires the API secret. (default: 127.0.0.1)"
    ),
]
GenesisSource = Annotated[
    str | None,
    typer.Option("--genesis", metavar="URL-OR-FOLDER", help="Genesis data: https://, http://, file:// or a folder."),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cuda, mps or cpu. (default: auto)")]
MemoryLimit = Annotated[
    int | None, typer.Option("--memory", metavar="MB", help="Memory limit, never exceeded. (default: measured)")
]
Threads = Annotated[
    int | None, typer.Option("--cpu-threads", metavar="N", help="CPU threads for training. (default: measured)")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def given(**flags: object) -> dict[str, object]:
    """Only the flags that were really given; the others are left to environment, file and defaults."""
    return {key: value for key, value in flags.items() if value is not None}


def node_folder(data_dir: Path | None, *, demo: bool) -> Path:
    """The data folder that a command means."""
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.node.demo import DEMO_FOLDER

    folder = resolve_data_dir(data_dir)
    return folder / DEMO_FOLDER if demo else folder
