"""`neuroshard checkpoint`: see, check, export and go back to saved states. Works while no node runs, too."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, node_folder
from neuroshard.cli.remote import DemoNode

if TYPE_CHECKING:
    from neuroshard.status.snapshot import CheckpointGeneration
    from neuroshard.training.checkpoint.store import CheckpointStore

_SHOWN_PRECISION = 0.999_999  # seconds: the list shows whole ones, and what it shows can be gone back to

app = typer.Typer(help="List, check, export and restore checkpoints.", no_args_is_help=True)


@app.command("list")
def list_checkpoints(data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False) -> None:
    """List the saved states with their local time, newest first."""
    found = _generations(node_folder(data_dir, demo=demo))
    if as_json:
        typer.echo(json.dumps([asdict(generation) for _, generation in found]))
        return
    if not found:
        typer.echo("No checkpoints yet.")
    for _, item in found:
        when = datetime.fromtimestamp(item.time, UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S")  # as --at reads it
        loss = "      " if item.loss is None else f"{item.loss:6.3f}"
        typer.echo(f"step {item.step:>9,}  {when}  loss {loss}  {item.bytes / 1e6:8.1f} MB  {item.path}")


@app.command("verify")
def verify(data_dir: DataDir = None, demo: DemoNode = False) -> None:
    """Read every saved state completely and compare its digest. Exit code 5 when one is damaged."""
    from neuroshard.errors import CheckpointError

    damaged = 0
    for store, item in _generations(node_folder(data_dir, demo=demo)):
        try:
            store.verify(item)
        except CheckpointError as error:
            damaged += 1
            typer.echo(f"DAMAGED  {item.path}: {error}")
        else:
            typer.echo(f"ok       {item.path}")
    if damaged:
        raise CheckpointError(
            f"{damaged} checkpoints are damaged.", "The next start falls back to the newest good one."
        )


@app.command("export")
def export(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    format_name: Annotated[str, typer.Option("--format", help="torch: the classic file.")] = "torch",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .json from `checkpoint list`. (default: the newest)")
    ] = None,
    data_dir: DataDir = None,
    demo: DemoNode = False,
) -> None:
    """Write a saved state as one file for other programs."""
    from neuroshard.errors import CheckpointError, UsageError

    if format_name != "torch":
        raise UsageError(f"--format {format_name} is not known.", "Use --format torch.")
    found = _generations(node_folder(data_dir, demo=demo))
    if checkpoint is not None:
        found = [(store, item) for store, item in found if Path(item.path) == checkpoint.absolute()]
    if not found:
        raise CheckpointError("There is no such checkpoint.", "`neuroshard checkpoint list` shows what there is.")
    from neuroshard.training.checkpoint.export import export_torch

    store, item = found[0]
    export_torch(store.open(Path(item.path)), out)
    typer.echo(f"Step {item.step:,} written to {out}.")


@app.command("restore")
def restore(
    at: Annotated[datetime, typer.Option("--at", help="Go back to the newest state at or before this local time.")],
    data_dir: DataDir = None,
    demo: DemoNode = False,
) -> None:
    """Go back in time: newer states are set aside (not deleted), and the next start goes on from the older one."""
    from neuroshard.errors import CheckpointError, UsageError
    from neuroshard.training.checkpoint.lock import AlreadyRunningError, InstanceLock
    from neuroshard.training.checkpoint.set_aside import go_back

    folder = node_folder(data_dir, demo=demo)
    try:
        lock = InstanceLock.acquire(folder)
    except AlreadyRunningError as error:
        raise UsageError("A node is running on this data folder.", "Stop it first: `neuroshard stop`.") from error
    try:
        moved = [go_back(store, at.timestamp() + _SHOWN_PRECISION) for store in _stores(folder)]
    finally:
        lock.release()
    kept = [generation for generation, _ in moved if generation is not None]
    if not kept:
        raise CheckpointError("No checkpoint is that old; nothing was changed.", "See `neuroshard checkpoint list`.")
    for generation in kept:
        typer.echo(f"The next start goes on from step {generation.step:,}: {generation.path}")
    for _, aside in moved:
        for path in aside:
            typer.echo(f"set aside: {path}")


def _stores(folder: Path) -> list[CheckpointStore]:
    from neuroshard.training.checkpoint.store import CheckpointStore, find_stage_folders

    return [CheckpointStore(stage) for stage in find_stage_folders(folder)]


def _generations(folder: Path) -> list[tuple[CheckpointStore, CheckpointGeneration]]:
    """All states below a data folder with their stores, newest first."""
    found = [(store, item) for store in _stores(folder) for item in store.generations()]
    return sorted(found, key=lambda pair: -pair[1].time)
