"""Commands that start a node of another kind: `demo`, `trainer` and `seed`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from neuroshard.cli.failures import show_failure_on_desktop
from neuroshard.cli.options import (
    CompileOption,
    DataDir,
    DeviceOption,
    EndWithStdin,
    GenesisSource,
    Headless,
    Host,
    InnerSteps,
    Invite,
    LogJson,
    MaxStorage,
    MaxUpload,
    MemoryLimit,
    NoLanDiscovery,
    NoPortMapping,
    NoRelay,
    NoTraining,
    OptimizerMemoryOption,
    OrganiserUrl,
    OwnText,
    P2pHost,
    P2pPort,
    Peers,
    Port,
    PublicName,
    RunId,
    SiteOption,
    Threads,
    Token,
    TokenFile,
    Verbose,
    given,
    settings_given,
)
from neuroshard.types import LOOPBACK

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings
    from neuroshard.node.demo import DemoOptions
    from neuroshard.node.process import ListenerHandover


MOST_NODES = 16
DEMO_LAYERS = 4


def demo(
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="End after K steps with a summary. (default: run until it is stopped)"),
    ] = None,
    text: OwnText = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=MOST_NODES, metavar="N", help="Start N nodes on this computer that form a swarm.")
    ] = 1,
    stages: Annotated[
        int,
        typer.Option(min=1, max=DEMO_LAYERS, metavar="S", help="Cut the model into S parts on different nodes."),
    ] = 1,
    port: Port = None,
    host: Host = None,
    data_dir: DataDir = None,
    device: DeviceOption = None,
    compile: CompileOption = None,
    optimizer_memory: OptimizerMemoryOption = None,
    site: SiteOption = None,
    memory: MemoryLimit = None,
    cpu_threads: Threads = None,
    max_storage: MaxStorage = None,
    inner_steps: InnerSteps = None,
    no_training: NoTraining = False,
    headless: Headless = False,
    log_json: LogJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a small model on text found in every Python installation and watch it learn in the dashboard."""
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.node.demo import DemoOptions, demo_folder

    options = DemoOptions(steps=steps, text_folder=text, nodes=nodes, stages=stages)
    flags = given(
        port=port,
        host=host,
        device=device,
        compile=compile,
        optimizer_memory=optimizer_memory,
        site=site,
        memory=memory,
        cpu_threads=cpu_threads,
        max_storage=max_storage,
        inner_steps=inner_steps,
        training=False if no_training else None,
        p2p_host=LOOPBACK,
        network=nodes > 1,
        max_stages=options.stages_a_node,
        spare_stages=options.spare_stages_a_node,
        browser=False if headless else None,
        log_json=log_json or None,
        verbose=verbose or None,
    )
    with show_failure_on_desktop(flags):
        flags["data_dir"] = demo_folder(resolve_data_dir(data_dir), options)
        code = _run(flags, options)
    raise typer.Exit(code)


def run_wizard_demo(folder: Path, handover: ListenerHandover) -> int:
    """Run the demo that the owner chose in the wizard, at the wizard's port. Returns the exit code."""
    from neuroshard.node.demo import DemoOptions

    return _run({"data_dir": folder, "p2p_host": LOOPBACK, "network": False}, DemoOptions(), handover)


def _run(flags: Mapping[str, object], options: DemoOptions, handover: ListenerHandover | None = None) -> int:
    """Run a demo with these flags and return the exit code. Several nodes share the CPU threads."""
    from neuroshard.host.computer import default_threads
    from neuroshard.node.demo import demo_token
    from neuroshard.node.launch import run_node

    threads = {"cpu_threads": max(1, default_threads() // options.nodes)} if options.nodes > 1 else {}
    token = demo_token(cast("Path", flags["data_dir"]))

    def load() -> LoadedSettings:
        return demo_settings({**threads, **flags, "token": token}, os.environ)

    if (code := followed_as_rank(load())) is not None:
        return code
    # The processes of a swarm, and the steps of one with an end, belong to one start.
    reload = load if options.nodes == 1 and options.steps is None else None
    return run_node(load(), demo=options, handover=handover, reload=reload)


def followed_as_rank(loaded: LoadedSettings) -> int | None:
    """Work as a further rank of a site, if a launcher has started this process as one; return the exit code.

    Returns None for every other process: it is the node.
    """
    if loaded.settings.site == "off":
        return None
    from neuroshard.training.site.plan import site_plan

    plan = site_plan(loaded.settings.site, os.environ)
    if plan is None or plan.rank == 0:
        return None
    from neuroshard.node.site_ranks import follow_as_rank  # loads PyTorch

    return follow_as_rank(loaded.settings, plan)


def demo_settings(flags: Mapping[str, object], environment: Mapping[str, str]) -> LoadedSettings:
    """Load the settings of a demo. It creates its own run, so `run` and `peer` are ignored with a warning."""
    from neuroshard.config.loading import load_settings, source_name

    loaded = load_settings(flags, environment)
    keys = [key for key in ("run", "peer", "invite") if loaded.sources[key] != "default"]
    if not keys:
        return loaded
    named = " and ".join(dict.fromkeys(source_name(loaded.sources[key], key) for key in keys))
    return replace(
        loaded,
        settings=loaded.settings.model_copy(update={"run": None, "peer": (), "invite": None}),
        sources={**loaded.sources, **dict.fromkeys(keys, "default")},
        warnings=(
            *loaded.warnings,
            f"A demo trains a run of its own: the run to join in {named} is ignored.",
        ),
    )


TRAINER_FOLDER = "trainer"
TrainerDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="FOLDER", help="Cache, logs and keys. (default: `trainer` in the per-user folder)"
    ),
]


def trainer(
    context: typer.Context,
    token: Token = None,
    token_file: TokenFile = None,
    port: Port = None,
    host: Host = None,
    genesis_source: GenesisSource = None,
    data_dir: TrainerDir = None,
    run_id: RunId = None,
    invite: Invite = None,
    organiser: OrganiserUrl = None,
    public_name: PublicName = None,
    peer: Peers = None,
    p2p_port: P2pPort = None,
    p2p_host: P2pHost = None,
    max_upload: MaxUpload = None,
    no_lan_discovery: NoLanDiscovery = False,
    no_port_mapping: NoPortMapping = False,
    no_relay: NoRelay = False,
    memory: MemoryLimit = None,
    max_storage: MaxStorage = None,
    no_training: NoTraining = False,
    headless: Headless = False,
    log_json: LogJson = False,
    verbose: Verbose = False,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Feed text to the layers that other nodes of a run hold. It holds none itself, and needs no GPU and little memory.

    A run can have any number of trainers; each reads different data. The default data folder is `trainer` in the
    per-user folder, so that a trainer can run next to a node.
    """
    from neuroshard.config.folders import default_data_dir
    from neuroshard.config.loading import load_settings

    flags = settings_given({name: value for name, value in context.params.items() if name != "end_with_stdin"})

    def load() -> LoadedSettings:
        return load_settings(flags, os.environ, default_data_dir() / TRAINER_FOLDER)

    loaded = load()
    from neuroshard.node.launch import run_node  # slow import: wrong settings are reported before it

    raise typer.Exit(run_node(loaded, is_trainer=True, ends_with_stdin=end_with_stdin, reload=load))


def seed(
    p2p_port: Annotated[
        int | None, typer.Option("--p2p-port", metavar="PORT", help="Port for nodes. (default: 4001)")
    ] = None,
    p2p_host: P2pHost = None,
    peer: Peers = None,
    data_dir: DataDir = None,
    max_upload: MaxUpload = None,
    no_lan_discovery: NoLanDiscovery = False,
    no_port_mapping: NoPortMapping = False,
    log_json: LogJson = False,
    verbose: Verbose = False,
) -> None:
    """Help nodes find each other: run a node that does not train and needs no token. Prints its addresses.

    Run two of them, the second with an address of the first as --peer, so that the network survives the loss of one.
    """
    from neuroshard.node.seed import run_seed, seed_settings

    flags = settings_given(
        {
            "p2p_port": p2p_port,
            "p2p_host": p2p_host,
            "peer": peer,
            "max_upload": max_upload,
            "no_lan_discovery": no_lan_discovery,
            "no_port_mapping": no_port_mapping,
            "log_json": log_json,
            "verbose": verbose,
        }
    )
    raise typer.Exit(run_seed(seed_settings(flags, data_dir, os.environ)))
