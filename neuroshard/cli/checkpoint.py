"""`neuroshard checkpoint`: list, verify, export and restore saved states. No node needs to be running."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.assemble import (
    DEFAULT_WAIT_SECONDS,
    ENTRY_OPTIONS,
    OuterStep,
    Wait,
    assemble,
    assembler_settings,
    collect,
)
from neuroshard.cli.hub import PUBLIC_HUB, hub_token, require_hub_library, require_private_way
from neuroshard.cli.hub import push as push_files
from neuroshard.cli.options import (
    AsJson,
    DataDir,
    Invite,
    OrganiserUrl,
    Peers,
    Token,
    TokenFile,
    end_of_second,
    node_folder,
)
from neuroshard.cli.remote import DemoNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuroshard.state.checkpoint_catalogue import SavedStage
    from neuroshard.state.checkpoint_store import CheckpointStore
    from neuroshard.status.snapshot import CheckpointGeneration
    from neuroshard.types import LayerRange


From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        help="Data folder of a node, or a folder with several of them. Can be repeated. (default: the data folder)",
    ),
]


def saved(given: Sequence[Path] | None, data_dir: Path | None, *, demo: bool) -> list[SavedStage]:
    """All saved states, newest first: those in the given folders, or those of the node or of its demo's nodes."""
    from neuroshard.state.checkpoint_catalogue import saved_stages
    from neuroshard.state.checkpoint_store import find_stage_folders, search_stage_folders

    if given or demo:
        roots = [path.absolute() for path in given] if given else [node_folder(data_dir, demo=True)]
        folders = {folder for root in roots for folder in search_stage_folders(root)}
    else:
        own = node_folder(data_dir, demo=False)
        folders = {folder for root in (own, *own.glob("node-*")) for folder in find_stage_folders(root)}
    return saved_stages(sorted(folders))


def none_found(given: Sequence[Path] | None, data_dir: Path | None, *, demo: bool) -> str:
    """Sentence for an empty list, with the folders that were searched."""
    places = [path.absolute() for path in given] if given else [node_folder(data_dir, demo=demo)]
    return f"No checkpoints yet in {', '.join(map(str, places))}."


def of_one_run(found: list[SavedStage], run: str | None) -> list[SavedStage]:
    """The readable states of the named run (default: the run saved last). Raises CheckpointError if there are none."""
    from neuroshard.errors import CheckpointError

    if run is not None:
        found = [stage for stage in found if stage.run_id.startswith(run)]
    usable = [stage for stage in found if stage.has_tensors]
    for stage in found:
        if not stage.has_tensors:
            typer.echo(f"{stage.generation.path} is skipped: the file with its tensors is missing.", err=True)
    if not usable:
        raise CheckpointError("There is no such checkpoint.", "`neuroshard checkpoint list` shows the checkpoints.")
    return [stage for stage in usable if stage.run_id == usable[0].run_id]


def steps_named(stages: Sequence[SavedStage]) -> str:
    """Steps of these stages in words, with their layers unless one stage is the whole model."""
    if len(stages) == 1 and stages[0].is_whole:
        return f"Step {stages[0].generation.step:,}"
    return ", ".join(f"{layers_named(stage.layers)} of step {stage.generation.step:,}" for stage in stages)


def layers_named(layers: LayerRange) -> str:
    """Layers of a stage in words, counted from 1."""
    from neuroshard.membership.stage_coverage import layers_text

    return f"layer {layers_text(layers)}" if len(layers) == 1 else f"layers {layers_text(layers)}"


def as_facts(stage: SavedStage) -> dict[str, object]:
    """Facts of a saved state for the JSON output."""
    place = {"run_id": stage.run_id, "layers": [stage.layers.start, stage.layers.stop]}
    return {**asdict(stage.generation), **place, "layer_count": stage.architecture.layer_count}


MOST_LISTINGS = 10
FORMATS = ("hf", "huggingface", "gguf", "torch", "dcp")  # the first two mean the same
FORMATS_TO_PUSH = ("hf", "huggingface", "gguf")
OutPath = Annotated[
    Path, typer.Option("--out", metavar="PATH", help="Folder (hf, dcp) or file (gguf, torch) to write.")
]
FormatName = Annotated[
    str,
    typer.Option(
        "--format",
        help="hf: a Hugging Face folder; gguf: a file for llama.cpp; dcp: a folder of torch.distributed.checkpoint "
        "with TorchTitan's names. They have the replicas' mean after a round. "
        "torch: a PyTorch file with this node's own weights and optimizer state.",
    ),
]
ExportAt = Annotated[
    float | None,
    typer.Option(
        "--at",
        parser=end_of_second,
        metavar="TIME",
        help="Use each stage's newest state at or before this local time: 2026-11-29T14:30. (default: now)",
    ),
]
SavedRun = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="RUN_ID", help="The run id, or its first digits. (default: the most recently saved run)"
    ),
]
OneState = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Export only this state: a .json file from `checkpoint list`.")
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="tokenizer.json of the data set. (default: the copy that the node keeps)"),
]
Push = Annotated[
    str | None,
    typer.Option(metavar="OWNER/NAME", help="Push the export to this repository of a hub, with a model card."),
]
HubTokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with your token at the hub. (default: HF_TOKEN)")
]
FromRun = Annotated[
    bool,
    typer.Option(
        "--from-run",
        help="First get the states from the nodes of --run, as `checkpoint assemble` does. They stay in OUT.states.",
    ),
]


def export(
    context: typer.Context,
    out: OutPath,
    format_name: FormatName = "hf",
    at: ExportAt = None,
    from_folders: From = None,
    run: SavedRun = None,
    checkpoint: OneState = None,
    tokenizer: TokenizerFile = None,
    push: Push = None,
    hub: Annotated[str, typer.Option(metavar="URL", help="The hub, for --push.")] = PUBLIC_HUB,
    hub_token_file: HubTokenFile = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create a public repository instead of a private one.")
    ] = False,
    from_run: FromRun = False,
    outer_step: OuterStep = None,
    wait: Wait = DEFAULT_WAIT_SECONDS,
    token: Token = None,
    token_file: TokenFile = None,
    invite: Invite = None,
    organiser: OrganiserUrl = None,
    peer: Peers = None,
    data_dir: DataDir = None,
    demo: DemoNode = False,
    as_json: AsJson = False,
) -> None:
    """Assemble the saved stages of a run into one model for other programs."""
    from neuroshard.errors import UsageError

    push_token = None if push is None else _check_push(format_name, hub, hub_token_file)
    entry = {name: value for name, value in context.params.items() if name in ENTRY_OPTIONS}
    if from_run:
        _check_sources(out, format_name, from_folders, checkpoint)
        loaded = assembler_settings({"run": run, "data_dir": data_dir, **entry})
        from_folders = [out.with_name(f"{out.name}.states")]
        run, at = collect(loaded, from_folders[0], at, outer_step, wait).run_id, None
    elif any(entry.values()) or outer_step is not None:
        raise UsageError("--outer-step, --peer, --invite, --organiser and a token need --from-run.", "Add it.")
    stages = _export_stages(out, format_name, at, from_folders, run, checkpoint, tokenizer, data_dir, demo=demo)
    written: dict[str, object] = {"out": str(out.absolute()), "format": format_name}
    if not as_json:
        typer.echo(f"{steps_named(stages)} written to {out}.")
    if push is not None and push_token is not None:
        written["pushed"] = push_files(_pushed_files(out, format_name), push, hub, push_token, is_public=public)
        if not as_json:
            typer.echo(f"Pushed to {written['pushed']}.")
    if as_json:
        typer.echo(json.dumps(written | {"stages": [as_facts(stage) for stage in stages]}))


def _check_sources(out: Path, format_name: str, from_folders: Sequence[Path] | None, checkpoint: Path | None) -> None:
    """Raise UsageError before anything is fetched for an export that cannot be made."""
    from neuroshard.errors import StorageError, UsageError

    _check_format(format_name)
    if from_folders or checkpoint is not None:
        raise UsageError("--from-run excludes --from and --checkpoint.", "Leave one of them out.")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise StorageError(f"{out} already exists.", "Name a new one. Existing files are never overwritten.")


def _export_stages(
    out: Path,
    format_name: str,
    at: float | None,
    from_folders: Sequence[Path] | None,
    run: str | None,
    checkpoint: Path | None,
    tokenizer: Path | None,
    data_dir: Path | None,
    *,
    demo: bool,
) -> Sequence[SavedStage]:
    """Export the newest states that are whole, skip damaged ones, and return the states that were used.

    A running node saves new states and deletes old ones meanwhile. If one is deleted before it is read, the states are
    listed again. Raises CheckpointError if that happens MOST_LISTINGS times.
    """
    from neuroshard.errors import CheckpointError
    from neuroshard.state.checkpoint_catalogue import DamagedStageError, choose, spread_warnings

    _check_format(format_name)
    found = saved(from_folders, data_dir, demo=demo)
    if checkpoint is not None:
        found = [stage for stage in found if Path(stage.generation.path) == checkpoint.absolute()]
    found = of_one_run(found, run)
    listings = 1
    while True:
        choice = choose(found, at)
        alone = checkpoint is not None and format_name == "torch"
        stages = choice.stages if alone else choice.require_whole()
        try:
            _write(stages, format_name, out, tokenizer)
        except DamagedStageError as error:
            if checkpoint is not None:
                raise
            if error.stage.has_tensors:
                typer.echo(f"{error} The state before it is used.", err=True)
                found = [stage for stage in found if stage is not error.stage]
                continue
            if listings == MOST_LISTINGS:
                raise CheckpointError(
                    "The running node deletes its states before they can be read.", "Pause it: `neuroshard pause`."
                ) from error
            typer.echo(f"The node has deleted {error.stage.generation.path}. The newest state is used.", err=True)
            found = of_one_run(saved(from_folders, data_dir, demo=demo), found[0].run_id)
            listings += 1
        else:
            break
    for warning in spread_warnings(stages):
        typer.echo(f"warning: {warning}", err=True)
    return stages


def _check_push(format_name: str, hub: str, token_file: Path | None) -> str:
    """Return the token at the hub. Raises UsageError before any state is read if the push cannot work."""
    from neuroshard.errors import UsageError

    if format_name not in FORMATS_TO_PUSH:
        raise UsageError(f"--push does not upload the {format_name} format.", "Use --format hf or --format gguf.")
    require_private_way(hub)
    require_hub_library(hub)
    return hub_token(token_file)


def _pushed_files(out: Path, format_name: str) -> dict[str, Path]:
    """Files of the export by their names in the repository."""
    if format_name != "gguf":
        return {path.name: path for path in sorted(out.iterdir())}
    return {out.name: out, "Modelfile": out.with_suffix(".Modelfile"), "README.md": out.with_suffix(".md")}


def _check_format(format_name: str) -> None:
    """Raise UsageError for an unknown format or one whose library is missing, before any state is read."""
    from neuroshard.errors import UsageError

    if format_name not in FORMATS:
        raise UsageError(f"--format {format_name} is not known.", "Use --format hf, gguf, torch or dcp.")
    if format_name == "gguf":
        from neuroshard.state.export import require_gguf

        require_gguf()


def _write(stages: Sequence[SavedStage], format_name: str, out: Path, tokenizer: Path | None) -> None:
    """Export the stages. Raises DamagedStageError, StorageError, and DataError for a missing or wrong tokenizer."""
    if format_name == "torch":
        from neuroshard.state.export import export_torch

        export_torch(stages, out)
        return
    if format_name == "dcp":
        from neuroshard.state.export import export_dcp

        export_dcp(stages, out)
        return
    from neuroshard.errors import DataError
    from neuroshard.runs.data_opening import table_of

    table = table_of(stages, tokenizer)
    if format_name == "gguf":
        from neuroshard.state.export import export_gguf

        if table is None:
            raise DataError("No copy of the run's tokenizer is in these folders.", _NAME_TOKENIZER)
        export_gguf(stages, out, table)
        return
    from neuroshard.state.export import export_huggingface

    export_huggingface(stages, out, table)
    if table is None:
        typer.echo(f"warning: {out} has no tokenizer: no copy of it is in these folders. {_NAME_TOKENIZER}", err=True)


_NAME_TOKENIZER = "Name tokenizer.json of its data set: --tokenizer FILE."


_SHARED = (
    "If other nodes train the same run, this one downloads their newer state: stop them all, restore each of them with "
    "the same --at, and only then start them."
)

app = typer.Typer(help="List, check, export, restore and assemble checkpoints.", no_args_is_help=True)
app.command("export")(export)
app.command("assemble")(assemble)


@app.command("list")
def list_checkpoints(
    from_folders: From = None, data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False
) -> None:
    """List the saved states of all stages with their local times, newest first."""
    found = saved(from_folders, data_dir, demo=demo)
    if as_json:
        typer.echo(json.dumps([as_facts(stage) for stage in found]))
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
def verify_checkpoints(
    from_folders: From = None, data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False
) -> None:
    """Read every saved state completely and check its digest. Exit code 5 if one is damaged."""
    from neuroshard.errors import CheckpointError
    from neuroshard.state.checkpoint_store import CheckpointStore

    checked = list[dict[str, object]]()
    found = saved(from_folders, data_dir, demo=demo)
    if not found and not as_json:
        typer.echo(none_found(from_folders, data_dir, demo=demo))
    for item in (stage.generation for stage in found):
        problem = ""
        try:
            CheckpointStore(Path(item.path).parent).verify(item)
        except CheckpointError as error:
            if not Path(item.path).exists():  # a running node has replaced it by a newer one
                typer.echo(f"gone     {item.path}: the node has since replaced it", err=as_json)
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
def restore_checkpoint(
    at: Annotated[
        float,
        typer.Option(
            "--at",
            parser=end_of_second,
            metavar="TIME",
            help="Return to the newest state at or before this local time, for example 2026-11-29T14:30.",
        ),
    ],
    data_dir: DataDir = None,
    demo: DemoNode = False,
    as_json: AsJson = False,
) -> None:
    """Return to an older state. Newer states are set aside, not deleted. The next start resumes from it."""
    from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
    from neuroshard.errors import CheckpointError, UsageError
    from neuroshard.state.checkpoint_store import CheckpointStore, go_back, set_newer_aside
    from neuroshard.state.disk_space import copy_folders

    folder = node_folder(data_dir, demo=demo)
    try:
        lock = InstanceLock.acquire(folder)
    except AlreadyRunningError as error:
        raise UsageError("A node is running on this data folder.", "Stop it first: `neuroshard stop`.") from error
    try:
        moved = [go_back(store, at) for store in _stores(folder)]
        kept = [generation for generation, _ in moved if generation is not None]
        # A copy of another node's stage would bring the newer state back, to this node or to that one.
        copies = [CheckpointStore(copy) for copy in copy_folders(folder)] if kept else []
        moved += [(None, set_newer_aside(store, at, "newer-than-asked-for")) for store in copies]
    finally:
        lock.release()
    if not kept:
        raise CheckpointError(
            "No checkpoint is that old; nothing was changed.", "`neuroshard checkpoint list` shows all."
        )
    set_aside = [str(path) for _, aside in moved for path in aside]
    shared = [_SHARED] if _has_met_others(folder, kept) else []
    if as_json:
        result = {
            "resumes_from": [asdict(generation) for generation in kept],
            "set_aside": set_aside,
            "warnings": shared,
        }
        typer.echo(json.dumps(result))
        return
    for generation in kept:
        typer.echo(f"The next start resumes from step {generation.step:,}: {generation.path}")
    for path in set_aside:
        typer.echo(f"set aside: {path}")
    for line in shared:
        typer.echo(line)


def _has_met_others(folder: Path, kept: Sequence[CheckpointGeneration]) -> bool:
    """Whether other nodes may train the same run: this node has met some, or it holds only a part of a model."""
    from neuroshard.membership.network_opening import PEERS_FILE
    from neuroshard.state.checkpoint_catalogue import saved_stages

    stages = saved_stages(sorted({Path(generation.path).parent for generation in kept}))
    return (folder / PEERS_FILE).exists() or any(not stage.is_whole for stage in stages)


def _stores(folder: Path) -> list[CheckpointStore]:
    from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders

    return [CheckpointStore(stage) for stage in find_stage_folders(folder)]


def _together(found: Sequence[SavedStage]) -> list[str]:
    """Sentences on the newest states together, for each run without a state of the whole model."""
    from neuroshard.membership.stage_coverage import missing_sentence
    from neuroshard.state.checkpoint_catalogue import choose, spread_warnings

    lines = list[str]()
    for run in dict.fromkeys(stage.run_id for stage in found):
        stages = [stage for stage in found if stage.run_id == run]
        if any(stage.is_whole for stage in stages):
            continue
        choice = choose(stages)
        lines.append(f"run {run[:16]}, newest of each stage: {steps_named(choice.stages)}.")
        lines += [missing_sentence(choice.missing)] if choice.missing else spread_warnings(choice.stages)
    return lines
