"""`neuroshard checkpoint`: see, check, export and go back to saved states. Works while no node runs, too."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.checkpoint_export import export
from neuroshard.cli.options import AsJson, DataDir, node_folder
from neuroshard.cli.remote import DemoNode
from neuroshard.cli.saved_states import SHOWN_PRECISION, From, facts_of, layers_named, none_found, saved, steps_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuroshard.status.snapshot import CheckpointGeneration
    from neuroshard.training.checkpoint.catalogue import SavedStage
    from neuroshard.training.checkpoint.store import CheckpointStore

_SHARED = (
    "Where other nodes train the same run, this one takes their newer state over: stop them all, go back at each of "
    "them with the same --at, and only then start them."
)

app = typer.Typer(help="List, check, export and restore checkpoints.", no_args_is_help=True)
app.command("export")(export)


@app.command("list")
def list_checkpoints(
    from_folders: From = None, data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False
) -> None:
    """List the saved states of all stages with their local time, newest first."""
    found = saved(from_folders, data_dir, demo=demo)
    if as_json:
        typer.echo(json.dumps([facts_of(stage) for stage in found]))
        return
    if not found:
        typer.echo(none_found(from_folders, data_dir, demo=demo))
    for stage in found:
        item = stage.generation
        when = datetime.fromtimestamp(item.time, UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S")  # as --at reads it
        loss = "          " if item.loss is None else f"loss {item.loss:5.3f}"
        part = f"  {layers_named(stage.layers):14}" if not stage.is_whole else ""
        typer.echo(f"step {item.step:>9,}  {when}  {loss}  {item.bytes / 1e6:8.1f} MB{part}  {item.path}")
    for line in _together(found):
        typer.echo(line)


@app.command("verify")
def verify(
    from_folders: From = None, data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False
) -> None:
    """Read every saved state completely and compare its digest. Exit code 5 when one is damaged."""
    from neuroshard.errors import CheckpointError
    from neuroshard.training.checkpoint.store import CheckpointStore

    checked = list[dict[str, object]]()
    found = saved(from_folders, data_dir, demo=demo)
    if not found and not as_json:
        typer.echo(none_found(from_folders, data_dir, demo=demo))
    for item in (stage.generation for stage in found):
        problem = ""
        try:
            CheckpointStore(Path(item.path).parent).verify(item)
        except CheckpointError as error:
            if not Path(item.path).exists():  # a running node has newer ones
                typer.echo(f"gone     {item.path}: the node has replaced it meanwhile", err=as_json)
                continue
            problem = str(error)
        checked.append({"path": item.path, "step": item.step, "sound": not problem, "problem": problem or None})
        if not as_json:
            typer.echo(f"DAMAGED  {item.path}: {problem}" if problem else f"ok       {item.path}")
    if as_json:
        typer.echo(json.dumps(checked))
    damaged = sum(not item["sound"] for item in checked)
    if damaged:
        raise CheckpointError(
            f"{damaged} checkpoints are damaged.", "The next start falls back to the newest good one."
        )


@app.command("restore")
def restore(
    at: Annotated[datetime, typer.Option("--at", help="Go back to the newest state at or before this local time.")],
    data_dir: DataDir = None,
    demo: DemoNode = False,
    as_json: AsJson = False,
) -> None:
    """Go back in time: newer states are set aside (not deleted), and the next start goes on from the older one."""
    from neuroshard.errors import CheckpointError, UsageError
    from neuroshard.training.checkpoint.lock import AlreadyRunningError, InstanceLock
    from neuroshard.training.checkpoint.set_aside import go_back, set_newer_aside
    from neuroshard.training.checkpoint.store import CheckpointStore
    from neuroshard.training.transfer.copy_places import copy_folders

    folder = node_folder(data_dir, demo=demo)
    try:
        lock = InstanceLock.acquire(folder)
    except AlreadyRunningError as error:
        raise UsageError("A node is running on this data folder.", "Stop it first: `neuroshard stop`.") from error
    try:
        moment = at.timestamp() + SHOWN_PRECISION
        moved = [go_back(store, moment) for store in _stores(folder)]
        kept = [generation for generation, _ in moved if generation is not None]
        # a copy of what another node trained would bring the newer state back, here or to that node
        copies = [CheckpointStore(copy) for copy in copy_folders(folder)] if kept else []
        moved += [(None, set_newer_aside(store, moment, "newer-than-asked-for")) for store in copies]
    finally:
        lock.release()
    if not kept:
        raise CheckpointError("No checkpoint is that old; nothing was changed.", "See `neuroshard checkpoint list`.")
    set_aside = [str(path) for _, aside in moved for path in aside]
    shared = [_SHARED] if _has_met_others(folder, kept) else []
    if as_json:
        told = {"goes_on_from": [asdict(generation) for generation in kept], "set_aside": set_aside, "warnings": shared}
        typer.echo(json.dumps(told))
        return
    for generation in kept:
        typer.echo(f"The next start goes on from step {generation.step:,}: {generation.path}")
    for path in set_aside:
        typer.echo(f"set aside: {path}")
    for line in shared:
        typer.echo(line)


def _has_met_others(folder: Path, kept: Sequence[CheckpointGeneration]) -> bool:
    """Whether others may train what lies in this data folder: it met some, or has a part of a model only."""
    from neuroshard.node.libp2p_opening import PEERS_FILE
    from neuroshard.training.checkpoint.catalogue import saved_stages

    stages = saved_stages(sorted({Path(generation.path).parent for generation in kept}))
    return (folder / PEERS_FILE).exists() or any(not stage.is_whole for stage in stages)


def _stores(folder: Path) -> list[CheckpointStore]:
    from neuroshard.training.checkpoint.store import CheckpointStore, find_stage_folders

    return [CheckpointStore(stage) for stage in find_stage_folders(folder)]


def _together(found: Sequence[SavedStage]) -> list[str]:
    """What the stages of each run make together, for runs of which no state is a whole model."""
    from neuroshard.swarm.stage_coverage import missing_sentence
    from neuroshard.training.checkpoint.catalogue import choose, spread_warnings

    lines = list[str]()
    for run in dict.fromkeys(stage.run_id for stage in found):
        stages = [stage for stage in found if stage.run_id == run]
        if any(stage.is_whole for stage in stages):
            continue
        choice = choose(stages)
        lines.append(f"run {run[:16]}, newest of each stage: {steps_named(choice.stages)}.")
        lines += [missing_sentence(choice.missing)] if choice.missing else spread_warnings(choice.stages)
    return lines
