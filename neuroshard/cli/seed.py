"""`neuroshard seed`: an address for newcomers to begin with."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from neuroshard.cli.options import (
    DataDir,
    LogJson,
    MaxUpload,
    NoLanDiscovery,
    NoPortMapping,
    P2pHost,
    Peers,
    Verbose,
    settings_given,
)


def seed(
    p2p_port: Annotated[int | None, typer.Option("--p2p-port", help="Port for nodes. (default: 4001)")] = None,
    p2p_host: P2pHost = None,
    peer: Peers = None,
    data_dir: DataDir = None,
    max_upload: MaxUpload = None,
    no_lan_discovery: NoLanDiscovery = False,
    no_port_mapping: NoPortMapping = False,
    log_json: LogJson = False,
    verbose: Verbose = False,
) -> None:
    """Help nodes find each other: a stateless node that trains nothing and needs no token. Prints its addresses.

    Run two, the second with an address of the first as --peer, so that losing one changes nothing.
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
