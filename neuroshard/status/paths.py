"""Where a node keeps its things, as the API and the command line tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PathsStatus:
    """Where the node keeps what on this computer."""

    data_dir: str = ""
    config_file: str = ""
    data_cache: str = ""
    checkpoints: str = ""  # of all wallets, runs and stages
    logs: str = ""
    node_key: str = ""
    api_secret: str = ""
