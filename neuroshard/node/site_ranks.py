"""The ranks of a node's site: their devices, the start of the site on rank 0, and the work of the other ranks."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.config.settings import Settings
from neuroshard.errors import SiteRestartError, UsageError
from neuroshard.host.computer import default_threads
from neuroshard.host.resources import devices_of
from neuroshard.model.memory_need import DeviceKind
from neuroshard.node.own_stages import DevicePlan
from neuroshard.training.site.plan import SitePlan, site_plan
from neuroshard.training.site.process_group import LostRankError
from neuroshard.training.site.site import Site
from neuroshard.training.site.worker import follow_rank_0, rank_facts

_LOG = logging.getLogger(__name__)

_ACCELERATORS: tuple[DeviceKind, ...] = ("cuda", "xpu")


@dataclass(frozen=True)
class RankDevices:
    """Number of a site's ranks, the kind of their devices, and the CPU threads of each."""

    width: int
    kind: DeviceKind
    threads: int


def rank_devices(settings: Settings, plan: SitePlan) -> RankDevices | None:
    """Choose the devices of a site; None if this computer has no two accelerators for `--site auto`.

    Raises UsageError if the devices of this computer do not suffice.
    """
    wanted = settings.device
    if wanted == "mps":
        raise UsageError("A site cannot use mps, because a Mac has only one GPU.", "Leave --site out.")
    if ":" in wanted:
        raise UsageError(f"With --site, --device names a kind and not {wanted}.", f"Use {wanted.partition(':')[0]}.")
    counts: dict[DeviceKind, int] = {kind: len(devices_of(kind)) for kind in _ACCELERATORS if wanted in ("auto", kind)}
    kind: DeviceKind | None = next((kind for kind in _ACCELERATORS if counts.get(kind)), None)
    threads = settings.cpu_threads or default_threads()
    if wanted == "cpu":
        width = plan.width or 1
        return RankDevices(width, "cpu", _share(threads, plan, width)) if width > 1 else None
    count = 0 if kind is None else counts[kind]
    if plan.width is None and count < 2:
        return None
    width = plan.width or count
    needed = plan.local_rank + 1 if plan.is_launched else width
    if kind is None or (count < needed and not (plan.is_launched and count == 1)):
        raise UsageError(
            f"A site of {width} ranks needs {needed} accelerators on this computer, which has {count}.",
            "Use fewer ranks, or --device cpu to compute on the processor.",
        )
    return RankDevices(width, kind, _share(threads, plan, width))


def _share(threads: int, plan: SitePlan, width: int) -> int:
    """CPU threads of one rank. A launcher has divided the processor already."""
    return threads if plan.is_launched else max(1, threads // width)


def open_site(settings: Settings, environment: Mapping[str, str]) -> Site | None:
    """Start the ranks of a node's site, of which this process is rank 0; None if the node has one device.

    Raises UsageError if the ranks do not come or do not fit together.
    """
    plan = site_plan(settings.site, environment)
    devices = None if plan is None else rank_devices(settings, plan)
    if plan is None or devices is None or devices.width == 1:
        if settings.site == "auto":
            _LOG.info("This computer has one device for training, so the node needs no site.")
        return None
    if getattr(sys, "frozen", False) and not plan.is_launched:
        raise UsageError("This package cannot start the ranks of a site.", "Install NeuroShard with pip to use --site.")
    site = Site(
        plan,
        devices.width,
        devices.kind,
        threads=devices.threads,
        timeout_seconds=settings.site_timeout,
        compilation=settings.compile,
    )
    site.begin()
    _LOG.info("This node computes on %d ranks (%s).", devices.width, devices.kind)
    if plan.is_launched:
        _LOG.warning(
            "The ranks of a site are not authenticated: %s port %d must not be reachable from other networks.",
            plan.address,
            plan.port,
        )
    return site


def follow_plan(site: Site, parameters: RunParameters, plan: DevicePlan) -> None:
    """Divide the tensors of the next stages among the ranks, or copy them to each, and compile only as planned.

    Raises UsageError for a run whose tensors cannot be divided.
    """
    if plan.mode == "shard" and parameters.inner.optimizer == "muon":
        raise UsageError(
            "This run trains with Muon, which needs whole matrices, so its layers cannot be divided among GPUs.",
            "Set site_mode to replicate.",
        )
    site.plan_stages(is_sharded=plan.mode == "shard", compiles=plan.compiles)
    if site.is_sharded:
        _LOG.info("The weights of these layers are divided among %d ranks.", site.width)


def follow_as_rank(settings: Settings, plan: SitePlan) -> int:
    """Work as a rank that a launcher has started, until rank 0 ends; return the exit code.

    The settings and the token of the node leave the environment. Raises UsageError for ranks that do not fit together,
    and SiteRestartError if rank 0 has ended without notice.
    """
    for name in [name for name in os.environ if name.startswith("NEUROSHARD_")]:
        del os.environ[name]
    devices = rank_devices(settings, plan)
    if devices is None:
        raise UsageError("A launcher has started this rank, but it has no device.", "Set --site and --device.")
    for number in (signal.SIGINT, signal.SIGTERM):  # for rank 0, which saves and then ends all ranks
        signal.signal(number, signal.SIG_IGN)
    facts = rank_facts(devices.width, devices.kind)
    try:
        follow_rank_0(plan, facts, None, threads=devices.threads, timeout_seconds=settings.site_timeout)
    except LostRankError as error:
        event = "has failed" if error.rank == plan.rank else "has lost rank 0"
        raise SiteRestartError(f"Rank {plan.rank} {event}: {error}.", "Start all ranks again.") from error
    return 0
