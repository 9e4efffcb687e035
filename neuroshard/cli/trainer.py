"""`neuroshard trainer`: drives a run's stages without holding any of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli.options import (
    EndWithStdin,
    GenesisSource,
    Headless,
    Host,
    LogJson,
    MaxStorage,
    MaxUpload,
    MemoryLimit,
    NoLanDiscovery,
    NoPortMapping,
    NoRelay,
    NoTraining,
    P2pHost,
    P2pPort,
    Peers,
    Port,
    RunId,
    Token,
    TokenFile,
    Verbose,
    settings_given,
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
    """Send data through the layers that other nodes of a run hold, without holding any: no GPU, little memory.

    A run takes any number of them. Each reads data of its own and says where they go on before it sends them. Without
    --data-dir it has the folder `trainer` in the per-user folder, so that it can run beside a node.
    """
    from neuroshard.config.data_dir import default_data_dir
    from neuroshard.config.loading import load_settings

    flags = settings_given({name: value for name, value in context.params.items() if name != "end_with_stdin"})
    loaded = load_settings(flags, os.environ, default_data_dir() / TRAINER_FOLDER)
    from neuroshard.node.launch import run_node  # only now: this takes a while, and mistakes are told before

    raise typer.Exit(run_node(loaded, is_trainer=True, ends_with_stdin=end_with_stdin))
