"""`neuroshard checkpoint assemble`: get the certified state of every stage of a run from its nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import (
    AsJson,
    Invite,
    LogJson,
    NoLanDiscovery,
    NoPortMapping,
    NoRelay,
    OrganiserUrl,
    P2pHost,
    P2pPort,
    Peers,
    Token,
    TokenFile,
    Verbose,
    end_of_second,
    settings_given,
)

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings
    from neuroshard.node.stage_collection import CollectedStates

ASSEMBLER_FOLDER = "assembler"
ENTRY_OPTIONS = ("token", "token_file", "invite", "organiser", "peer")  # with which a computer enters a run
DEFAULT_WAIT_SECONDS = 120.0

At = Annotated[
    float | None,
    typer.Option(
        "--at",
        parser=end_of_second,
        metavar="TIME",
        help="The newest state certified at or before this local time: 2026-11-29T14:30. (default: the newest kept)",
    ),
]
OuterStep = Annotated[
    int | None,
    typer.Option("--outer-step", min=1, metavar="N", help="The newest state at or before this outer step."),
]
RunToAssemble = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="FILE-OR-ID", help="The run: its id, or its signed file. (default: that of --invite)"
    ),
]
Wait = Annotated[
    float,
    typer.Option("--wait", min=1, metavar="SECONDS", help="Give a stage up when nothing of it arrives for this time."),
]
AssemblerDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="Keys and logs. (default: `assembler` in the per-user folder)"),
]


def assemble(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder for the states. It keeps a broken-off download.")
    ],
    run: RunToAssemble = None,
    at: At = None,
    outer_step: OuterStep = None,
    wait: Wait = DEFAULT_WAIT_SECONDS,
    token: Token = None,
    token_file: TokenFile = None,
    invite: Invite = None,
    organiser: OrganiserUrl = None,
    peer: Peers = None,
    p2p_port: P2pPort = None,
    p2p_host: P2pHost = None,
    no_lan_discovery: NoLanDiscovery = False,
    no_port_mapping: NoPortMapping = False,
    no_relay: NoRelay = False,
    data_dir: AssemblerDir = None,
    log_json: LogJson = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Get the certified state of every stage of a run from its nodes. This computer holds no stage and trains nothing.

    Each stage advances by its own clock, so a model is named by a time. Every state is checked with the certificates of
    its stage. A second start continues. Then use `neuroshard checkpoint export --from FOLDER`.

    It enters the run like any node: with the owner's token, an invitation, or an organiser that admits it.
    """
    others = {"out", "at", "outer_step", "wait", "as_json"}
    loaded = assembler_settings({name: value for name, value in context.params.items() if name not in others})
    collected = collect(loaded, out, at, outer_step, wait)
    if as_json:
        typer.echo(json.dumps(collection_facts(collected, out)))
        return
    for line in collected_lines(collected):
        typer.echo(line)
    typer.echo(
        f"All {len(collected.stages)} stages are in {out}. Export them: neuroshard checkpoint export --from {out}"
    )


def assembler_settings(flags: Mapping[str, object]) -> LoadedSettings:
    """The settings of a node that collects states, in a data folder of its own.

    A run that is named by its signed file is stored there. Raises like `load_settings`, StorageError, and DataError.
    """
    from neuroshard.config.folders import default_data_dir
    from neuroshard.config.loading import load_settings

    given, run = settings_given(flags), flags.get("run")
    is_file = isinstance(run, str) and Path(run).is_file()
    if is_file:
        del given["run"]
    loaded = load_settings(given, os.environ, default_data_dir() / ASSEMBLER_FOLDER)
    if not is_file:
        return loaded
    from neuroshard.config.folders import prepare_data_dir
    from neuroshard.runs.stored_runs import JoinedRuns, read_offer_file

    offer = read_offer_file(Path(str(run)))
    prepare_data_dir(loaded.settings.data_dir)
    JoinedRuns(loaded.settings.data_dir).keep(offer)
    return load_settings({**given, "run": offer.run_id}, os.environ, default_data_dir() / ASSEMBLER_FOLDER)


def collect(
    loaded: LoadedSettings, out: Path, at: float | None, outer_step: int | None, wait: float
) -> CollectedStates:
    """Collect the states of a run. Raises CheckpointError that names the missing stages, and other NeuroShardErrors."""
    from neuroshard.errors import CheckpointError, UsageError

    if at is not None and outer_step is not None:
        raise UsageError("--at and --outer-step exclude each other.", "Give one of them.")
    from neuroshard.membership.stage_coverage import missing_sentence
    from neuroshard.node.stage_collection import Limit, collect_run  # loads PyTorch

    limit = Limit(at, outer_step)
    collected, missing = collect_run(loaded, out.absolute(), limit, lambda words: typer.echo(words, err=True), wait)
    if missing:
        reasons = " ".join(f"{missing_sentence([each.layers])} {each.reason}" for each in missing)
        raise CheckpointError(
            f"{len(missing)} of {len(missing) + len(collected.stages)} stages did not come. {reasons}",
            f"The others are kept in {out}: repeat the command to continue.",
        )
    return collected


def collected_lines(collected: CollectedStates) -> list[str]:
    """One line per stage: the outer step, and the time that was reached."""
    from neuroshard.membership.stage_coverage import layers_text
    from neuroshard.node.stage_collection import time_text

    return [
        f"layers {layers_text(stage.layers):9} outer step {stage.outer_step:>7,}  certified "
        f"{time_text(stage.certified_at)}  root {stage.root[:16]}"
        for stage in collected.stages
    ]


def collection_facts(collected: CollectedStates, out: Path) -> dict[str, object]:
    """The collected states for the JSON output."""
    stages = [
        {
            "layers": [stage.layers.start, stage.layers.stop],
            "outer_step": stage.outer_step,
            "root": stage.root,
            "height": stage.height,
            "certified_at": stage.certified_at,
        }
        for stage in collected.stages
    ]
    return {"run_id": collected.run_id, "out": str(out.absolute()), "stages": stages}
