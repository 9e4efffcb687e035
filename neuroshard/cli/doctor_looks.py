"""What `neuroshard doctor` looks at on this computer, each look with its finding and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings

MANIFEST_SECONDS = 10.0
LEAST_FREE_BYTES = 2_000_000_000
_INSTALL_TORCH = "Install PyTorch into this environment as pytorch.org says for this computer."


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    is_well: bool
    detail: str
    action: str = ""


@dataclass(frozen=True)
class Case:
    """What a look may use: the settings, and the status of the node that runs with this data folder, if one does."""

    loaded: LoadedSettings
    status: Mapping[str, Any] | None


def python(_case: Case) -> Finding:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    is_known = sys.version_info >= (3, 11)
    return Finding("python", is_known, version, "" if is_known else "Install Python 3.11 or newer.")


def torch(_case: Case) -> Finding:
    """Whether PyTorch can be loaded."""
    try:
        import torch as library
    except (ImportError, OSError) as error:  # OSError: a library of the system that it needs
        return Finding("torch", is_well=False, detail=f"cannot be imported: {error}", action=_INSTALL_TORCH)
    cuda = library.version.cuda
    return Finding("torch", is_well=True, detail=f"{library.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}")


def device(case: Case) -> Finding:
    """What computes, and whether a GPU lies idle because PyTorch cannot use it."""
    from neuroshard.node.cores import default_threads
    from neuroshard.node.probe import choose_device

    chosen = choose_device(case.loaded.settings.device)
    threads = case.loaded.settings.cpu_threads or default_threads()
    memory_mb = f", {chosen.memory_mb:,} MB" if chosen.memory_mb else ""
    unused = [] if chosen.kind != "cpu" or case.loaded.settings.device == "cpu" else _nvidia_gpus()
    action = f"{', '.join(unused)}: not used, this PyTorch has no CUDA. {_INSTALL_TORCH}" if unused else ""
    return Finding("device", is_well=True, detail=f"{chosen.name}{memory_mb}, {threads} CPU threads", action=action)


def _nvidia_gpus() -> list[str]:
    """Names of the GPUs that the driver knows, with PyTorch or without."""
    from importlib import import_module

    library: Any = import_module("pynvml")
    try:
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        names = [str(library.nvmlDeviceGetName(handle)) for handle in handles]
        library.nvmlShutdown()
    except library.NVMLError:
        return []
    return names


def memory(case: Case) -> Finding:
    """What training may take, and what model fits that."""
    from neuroshard.model.memory_limit import memory_bound, probe_memory, tier_mb
    from neuroshard.model.proposal import propose_architecture
    from neuroshard.node.configuration import limit_source

    bound = memory_bound(probe_memory(), case.loaded.settings.memory)
    tier = tier_mb(bound.mb)
    layers = propose_architecture(tier, 32_000).layer_count
    source = limit_source(bound.by, case.loaded.sources["memory"])
    detail = f"{bound.mb:,} MB may be used ({source}), tier {tier:,}: up to {layers} layers on the CPU"
    return Finding("memory", is_well=True, detail=detail)


def disk(case: Case) -> Finding:
    """Whether the data folder can be written and has room."""
    import shutil

    from neuroshard.config.data_dir import prepare_data_dir

    folder = case.loaded.settings.data_dir
    prepare_data_dir(folder)
    free = shutil.disk_usage(folder).free
    action = "" if free >= LEAST_FREE_BYTES else "Free some space, or name another folder with --data-dir."
    return Finding("disk", free >= LEAST_FREE_BYTES, f"{free / 1e9:.1f} GB free in {folder}", action)


def autostart(_case: Case) -> Finding:
    """Whether a node starts at login, and whether the program that should is there."""
    import os

    from neuroshard.cli.autostart import MEND
    from neuroshard.errors import UsageError
    from neuroshard.node.autostart import places_of_this_computer, status

    try:
        found = status(places_of_this_computer(os.environ))
    except UsageError as error:  # a system that none is known for
        return Finding("autostart", is_well=True, detail=f"off. {error.message}")
    if found.missing:
        return Finding("autostart", is_well=False, detail=found.complaint(), action=MEND)
    return Finding("autostart", is_well=True, detail=f"on: {found.kind} {found.path}" if found.is_on else "off")


def token(case: Case) -> Finding:
    """Whose wallet it is."""
    from neuroshard.node.identity import wallet_of

    wallet, kind, warnings = wallet_of(case.loaded)
    return Finding("token", is_well=True, detail=f"{kind}, wallet {wallet.wallet_id}", action=" ".join(warnings))


def data(case: Case) -> Finding:
    """Whether the data set, at the CDN or elsewhere, answers and what it has."""
    import anyio

    from neuroshard.node.data_opening import look_at_source

    genesis = case.loaded.settings.genesis
    found = anyio.run(look_at_source, genesis, MANIFEST_SECONDS, backend="trio")
    return Finding("data", is_well=True, detail=found)
