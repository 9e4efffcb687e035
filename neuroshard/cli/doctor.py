"""`neuroshard doctor`: looks at everything a node needs and says what to do about what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from neuroshard.cli.exit_codes import ExitCode
from neuroshard.cli.options import AsJson, DataDir, GenesisSource, Host, Port, given

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings

MANIFEST_SECONDS = 10.0
LEAST_FREE_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    is_well: bool
    detail: str
    action: str = ""


def doctor(
    data_dir: DataDir = None,
    port: Port = None,
    host: Host = None,
    genesis: GenesisSource = None,
    as_json: AsJson = False,
) -> None:
    """Check Python, PyTorch, memory, disk, port, data source and every setting. Exit code 1 when something is wrong."""
    import logging

    from neuroshard.config.loading import load_settings

    logging.getLogger("neuroshard").addHandler(logging.NullHandler())  # what goes wrong is told as a finding, once
    loaded = load_settings(given(data_dir=data_dir, port=port, host=host, genesis=genesis))
    findings = [_examined(name, look, loaded) for name, look in _LOOKS]
    if as_json:
        facts = {"findings": [asdict(finding) for finding in findings], "settings": loaded.describe()}
        typer.echo(json.dumps(facts))
    else:
        for finding in findings:
            typer.echo(f"{'ok ' if finding.is_well else 'BAD'} {finding.subject:8} {finding.detail}")
            if finding.action:
                typer.echo(f"             {finding.action}")
        typer.echo("\nsettings:")
        for key, facts in loaded.describe().items():
            if isinstance(facts, dict):
                typer.echo(f"    {key:28} {facts['value']!s:40} {facts['source']}")
    if not all(finding.is_well for finding in findings):
        raise typer.Exit(ExitCode.REFUSED)


def _examined(name: str, look: Callable[[LoadedSettings], Finding], loaded: LoadedSettings) -> Finding:
    """What a look found; an error is a finding, too."""
    from neuroshard.errors import NeuroShardError

    try:
        return look(loaded)
    except NeuroShardError as error:
        return Finding(name, is_well=False, detail=error.message, action=error.action)


def _python(_loaded: LoadedSettings) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), version, "")


def _torch(loaded: LoadedSettings) -> Finding:
    import torch

    from neuroshard.node.cores import default_threads
    from neuroshard.node.probe import choose_device

    device = choose_device(loaded.settings.device)
    threads = loaded.settings.cpu_threads or default_threads()
    return Finding("torch", is_well=True, detail=f"{torch.__version__}, {device.name}, {threads} threads")


def _memory(loaded: LoadedSettings) -> Finding:
    from neuroshard.model.memory_limit import memory_bound, probe_memory, tier_mb
    from neuroshard.model.proposal import propose_architecture
    from neuroshard.node.configuration import limit_source

    bound = memory_bound(probe_memory(), loaded.settings.memory)
    tier = tier_mb(bound.mb)
    layers = propose_architecture(tier, 32_000).layer_count
    source = limit_source(bound.by, loaded.sources["memory"])
    detail = f"{bound.mb:,} MB may be used ({source}), tier {tier:,}: up to {layers} layers on the CPU"
    return Finding("memory", is_well=True, detail=detail)


def _disk(loaded: LoadedSettings) -> Finding:
    import shutil

    from neuroshard.config.data_dir import prepare_data_dir

    folder = loaded.settings.data_dir
    prepare_data_dir(folder)
    free = shutil.disk_usage(folder).free
    action = "" if free >= LEAST_FREE_BYTES else "Free some space, or name another folder with --data-dir."
    return Finding("disk", free >= LEAST_FREE_BYTES, f"{free / 1e9:.1f} GB free in {folder}", action)


def _port(loaded: LoadedSettings) -> Finding:
    from neuroshard.api.listening import bind
    from neuroshard.training.checkpoint.lock import read_lock_owner

    owner = read_lock_owner(loaded.settings.data_dir)
    if owner is not None:
        return Finding("port", is_well=True, detail=f"a node of this folder is running at port {owner.port}")
    bind(loaded.settings.host, loaded.settings.port).close()
    return Finding("port", is_well=True, detail=f"{loaded.settings.port} is free")


def _token(loaded: LoadedSettings) -> Finding:
    from neuroshard.node.identity import wallet_of

    wallet, kind, warnings = wallet_of(loaded)
    return Finding("token", is_well=True, detail=f"{kind}, wallet {wallet.wallet_id}", action=" ".join(warnings))


def _data(loaded: LoadedSettings) -> Finding:
    import anyio

    from neuroshard.node.data_opening import look_at_source

    genesis = loaded.settings.genesis
    found = anyio.run(look_at_source, genesis, MANIFEST_SECONDS, backend="trio")
    return Finding("data", is_well=True, detail=found)


_LOOKS: tuple[tuple[str, Callable[[LoadedSettings], Finding]], ...] = (
    ("python", _python),
    ("torch", _torch),
    ("memory", _memory),
    ("disk", _disk),
    ("port", _port),
    ("token", _token),
    ("data", _data),
)
