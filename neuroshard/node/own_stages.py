"""Chooses this node's stages: those it held before, or those the swarm needs most and this computer can hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path

import anyio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.config.state_file import StateFile
from neuroshard.errors import StorageError, TooLittleMemoryError
from neuroshard.identity import NodeIdentity
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import StagePlan, plan_of
from neuroshard.model.memory_limit import MEGABYTE, TIER_MB, least_limit_mb, planned_bytes
from neuroshard.model.memory_need import REMEMBERED_MICROBATCHES, MemoryNeed, PipelineLoad, SiteMode, memory_need
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.pipeline.driver import MICROBATCHES_OF_SESSION
from neuroshard.pipeline.sessions import SessionLimits, microbatches_in_flight
from neuroshard.pipeline.stage_server import ServiceLimits
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.placement.stage_choice import choose_stages, fitting_windows
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.runs.stage_plan import LEAST_OPEN
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.types import LayerRange

REMEMBERED_OF_DRIVER = 16


@dataclass(frozen=True)
class StageWork:
    """Limits on the work that a stage's server holds; the default is for a model in one stage on the CPU."""

    limits: ServiceLimits | None = None
    kept_graphs: int | None = None
    moments_on_host: bool = False


@dataclass(frozen=True)
class DevicePlan:
    """How stages use the memory of the device, or of the device of each rank."""

    moments_on_host: bool = False
    compiles: bool = False
    mode: SiteMode = "replicate"


def device_plan(parameters: RunParameters, stages: StageRange, room: HardwareBudget) -> DevicePlan:
    """Choose the first plan with which these stages fit at their least load; if none fits, the first without compiling.

    Compiling is given up first, because it needs the copy of a block. Moments go to the host, and a site divides
    tensors among its ranks, if the owner's settings say so or nothing fits otherwise.
    """
    plans = list(_plans(parameters, room))
    fitting = (plan for plan in plans if _fits(parameters, stages, room, plan))
    return next(fitting, replace(plans[0], compiles=False))


def _plans(parameters: RunParameters, room: HardwareBudget) -> Iterator[DevicePlan]:
    """All plans that the settings allow, the best first. The blocks of a divided stage are never compiled.

    Muon's moments stay on the device, and it needs whole matrices, so `auto` never divides them.
    """
    is_muon = parameters.inner.optimizer == "muon"
    places = {"auto": (False, True), "device": (False,), "host": (True,)}["device" if is_muon else room.moments_memory]
    modes: tuple[SiteMode, ...] = ("replicate",)
    if room.ranks > 1 and room.site_mode != "auto":
        modes = (room.site_mode,)
    elif room.ranks > 1 and not is_muon:
        modes = ("replicate", "shard")
    for mode, on_host in product(modes, places):
        if room.compiles and mode == "replicate":
            yield DevicePlan(on_host, compiles=True, mode=mode)
        yield DevicePlan(on_host, compiles=False, mode=mode)


def _fits(parameters: RunParameters, stages: StageRange, room: HardwareBudget, plan: DevicePlan) -> bool:
    """Whether these stages fit with their least load."""
    need = need_of(parameters, stages, room, least_load(parameters, stages), plan=plan)
    return need.fits(room.tier_mb, room.device_tier_mb)


def need_of(
    parameters: RunParameters,
    stages: StageRange,
    room: HardwareBudget,
    load: PipelineLoad | None,
    *,
    plan: DevicePlan | None = None,
) -> MemoryNeed:
    """Compute the peak memory of training these stages together with `load`, by default in their `device_plan`."""
    plan = plan or device_plan(parameters, stages, room)
    layers = stages.layers(plan_of(parameters))
    outer = parameters.outer
    return memory_need(
        parameters.architecture,
        layers,
        parameters.batch_size,
        room.device,
        load,
        codec=outer.codec,
        averages_gradients=outer.strategy == "averaging",
        optimizer=parameters.inner.optimizer,
        subspace_cache_mb=parameters.subspace_cache_mb,
        moments_on_host=plan.moments_on_host,
        compiles=plan.compiles,
        ranks=room.ranks,
        mode=plan.mode,
    )


def least_load(parameters: RunParameters, stages: StageRange) -> PipelineLoad | None:
    """Smallest load with which these stages are useful to a pipeline; None for a model in one stage."""
    return next(iter(reversed(list(_loads(parameters, stages)))), None)


def best_load(parameters: RunParameters, stages: StageRange, room: HardwareBudget) -> PipelineLoad | None:
    """Largest load that fits the memory; the least load if none fits. None for a model in one stage.

    Memory goes to the microbatches of one driver first, then to their activations, then to further drivers.
    """
    plan = device_plan(parameters, stages, room)
    for load in _loads(parameters, stages):
        if need_of(parameters, stages, room, load, plan=plan).fits(room.tier_mb, room.device_tier_mb):
            return load
    return least_load(parameters, stages)


def stage_work(
    parameters: RunParameters,
    layers: LayerRange,
    load: PipelineLoad | None,
    *,
    width: int = 1,
    moments_on_host: bool = False,
) -> StageWork:
    """Limits of one stage under a load of each of its ranks, so that its memory stays within the computed need."""
    if load is None:
        return StageWork(moments_on_host=moments_on_host)
    shapes = StageShapes.for_layers(parameters.architecture, layers, parameters.batch_size)
    load = replace(load, open_microbatches=load.open_microbatches * width, kept_graphs=load.kept_graphs * width)
    answer = shapes.kept_bytes(parameters.batch_size * parameters.architecture.sequence_length)
    of_driver = min(load.open_microbatches, microbatches_in_flight(parameters.stage_count) * width)
    of_usual = SessionLimits()
    at_once = max(of_usual.sessions_of_driver, 2 * -(-of_driver // MICROBATCHES_OF_SESSION))
    sessions = SessionLimits(
        sessions=max(of_usual.sessions, 4 * at_once),
        sessions_of_driver=at_once,
        open_microbatches=load.open_microbatches,
        open_of_driver=of_driver,
        kept_bytes=(load.open_microbatches + REMEMBERED_MICROBATCHES) * answer,
        kept_bytes_of_driver=(load.open_microbatches + REMEMBERED_OF_DRIVER) * answer,
    )
    return StageWork(ServiceLimits(sessions), load.kept_graphs, moments_on_host)


def _loads(parameters: RunParameters, stages: StageRange) -> Iterator[PipelineLoad]:
    """All possible loads, the best first; a stage never has more microbatches open than a step has."""
    if parameters.stage_count == 1:
        return
    plan = plan_of(parameters)
    layers = tuple(plan[index] for index in stages)
    of_step = max(1, parameters.sequences_per_step // parameters.batch_size)
    of_driver = microbatches_in_flight(parameters.stage_count)
    most, usual, least = (min(of_step, count) for count in (2 * of_driver, of_driver, LEAST_OPEN))
    for count in range(most, usual, -1):
        yield PipelineLoad(layers, count, kept_graphs=count)
    for kept in range(usual, -1, -1):
        yield PipelineLoad(layers, usual, kept_graphs=kept)
    for count in range(usual - 1, least - 1, -1):
        yield PipelineLoad(layers, count, kept_graphs=0)


_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
QUIET_SECONDS = 1.5  # without a new member the view of the swarm counts as complete
PATIENCE_SECONDS = 5.0  # wait for the first report of any node
LONGEST_SECONDS = 10.0


@dataclass(frozen=True)
class StageChooser:
    """Chooses this node's stages, once per start."""

    swarm: StageSwarm
    networking: Networking
    is_first: bool = False  # first node of a demo: it takes the first layers, so that its dashboard shows everything
    admitted: LayerRange | None = None  # the layers for which an organiser admitted this node
    now: Callable[[], float] = time.time  # wall clock, as in the membership's `met_at`

    async def choose(self, windows: tuple[StageRange, ...], kept: StageRange | None) -> StageRange:
        """Choose one of the windows. Stages kept on this disk come first, because no other node may have their state.

        The stage of the organiser's admission comes next. Without kept stages it waits up to some seconds for reports
        of the swarm; seconds before this call count too.
        """
        around_kept = [window for window in windows if kept is not None and window.covers(kept)]
        if around_kept:
            return around_kept[0]
        if kept is not None and any(window.covers(kept) for window in self.swarm.windows):
            return kept  # the node had grown beyond the number that nodes begin with
        if len(self.swarm.plan) > 1 and self.networking.is_wanted:
            await self._listen()
        coverage = self.swarm.coverage()
        if self.is_first and not coverage.holders:
            windows = tuple(window for window in windows if 0 in window) or windows
        windows = self._with_admitted(windows)
        chosen = choose_stages(self.swarm.node_id, self.swarm.wallet_id, windows, coverage)
        if chosen is None:
            raise ValueError("a node without a window for its memory must not come so far")
        if len(self.swarm.plan) > 1:
            _LOG.info("This node takes %s of %d.", chosen.words, len(self.swarm.plan))
        return chosen

    def _with_admitted(self, windows: tuple[StageRange, ...]) -> tuple[StageRange, ...]:
        """Return the windows that contain the admitted stage, or all of them if none does."""
        wanted = [stage for stage, layers in enumerate(self.swarm.plan) if layers == self.admitted]
        found = tuple(window for window in windows if any(stage in window for stage in wanted))
        if wanted and not found:
            _LOG.warning("This computer has too little memory for stage %d, its organiser's choice.", wanted[0] + 1)
        return found or windows

    async def _listen(self) -> None:
        """Wait until no new member has appeared for QUIET_SECONDS; these may have passed before the call."""
        with anyio.move_on_after(PATIENCE_SECONDS):
            while self.swarm.membership.met_at is None:
                await anyio.sleep(LOOK_SECONDS)
        with anyio.move_on_after(LONGEST_SECONDS):
            while (met_at := self.swarm.membership.met_at) is not None and self.now() - met_at < QUIET_SECONDS:
                await anyio.sleep(LOOK_SECONDS)


def windows_of(parameters: RunParameters, room: HardwareBudget, most: int | None) -> tuple[StageRange, ...]:
    """Longest sequences of stages that fit this computer's memory, each of at most `most` stages (None: any number).

    Raises TooLittleMemoryError with the MB needed if not even one stage fits.
    """
    plan = plan_of(parameters)

    def fits(allowed: Sequence[DevicePlan], stages: StageRange) -> bool:
        return (most is None or len(stages) <= most) and any(_fits(parameters, stages, room, each) for each in allowed)

    # Moments on the host and divided tensors make steps slower. They help a node to hold a stage at all, not to hold
    # more of them.
    for _, same in groupby(_plans(parameters, room), lambda each: (each.mode, each.moments_on_host)):
        if windows := fitting_windows(len(plan), partial(fits, tuple(same))):
            return windows
    raise _too_little(parameters, plan, room)


def megabytes_for(parameters: RunParameters, stages: StageRange, room: HardwareBudget) -> int:
    """MB of memory that this process needs to train these stages with the largest load that fits."""
    need = need_of(parameters, stages, room, best_load(parameters, stages, room))
    return -(-planned_bytes(need.host_bytes, room.tier_mb) // MEGABYTE)


def _too_little(parameters: RunParameters, plan: StagePlan, room: HardwareBudget) -> TooLittleMemoryError:
    stages = [StageRange(stage, stage + 1) for stage in range(len(plan))]
    needs = [need_of(parameters, stage, room, least_load(parameters, stage)).host_bytes for stage in stages]
    least = least_limit_mb(min(needs))
    allow = f"Allow {-(-least // TIER_MB) * TIER_MB} MB with --memory, "
    help_on = "help without holding layers with `neuroshard trainer`, " if len(plan) > 1 else ""
    what = "This run needs" if len(plan) == 1 else f"The smallest of the {len(plan)} stages of this run needs"
    return TooLittleMemoryError(
        f"{what} {least:,} MB of memory here, but only {room.tier_mb:,} MB may be used, counted in steps of 500 MB.",
        f"{allow}{help_on}or start a new run with another --data-dir.",
    )


FILE_NAME = "stages.json"
_MAX_BYTES = 1024


def note_stages(data_dir: Path, identity: NodeIdentity, run: LocalRun, stages: StageRange) -> tuple[str, ...]:
    """Store the stages that this node holds now. A failure does not stop training; it returns a warning instead."""
    try:
        _note(data_dir, identity, run).write(stages)
    except StorageError as error:
        return (f"{error} A restart may begin with other layers than these.",)
    return ()


def kept_stages(data_dir: Path, identity: NodeIdentity, run: LocalRun) -> StageRange | None:
    """The stages that this node held last, if it has a checkpoint of one; without a note the newest checkpoint's stage.

    The note comes first because checkpoints of stages that the node left, to help elsewhere, may be as new.
    """
    plan = plan_of(run.parameters)
    folders = [stage_folder(data_dir, identity.wallet_id, run.run_id, layers) for layers in plan]
    times = {
        index: max(file.stat().st_mtime for file in files)
        for index, folder in enumerate(folders)
        if (files := list(folder.glob("step-*.json")))
    }
    if not times:
        return None
    noted = _noted(_note(data_dir, identity, run), len(plan))
    if noted is not None and any(index in times for index in noted):
        return noted
    newest = max(times, key=lambda index: times[index])
    return StageRange(newest, newest + 1)


def _note(data_dir: Path, identity: NodeIdentity, run: LocalRun) -> StateFile[StageRange]:
    folder = stage_folder(data_dir, identity.wallet_id, run.run_id, plan_of(run.parameters)[0]).parent
    consequence = "this node begins with the layers of its newest checkpoint"
    return StateFile(folder / FILE_NAME, StageRange, "set_aside", consequence, max_bytes=_MAX_BYTES, data_dir=data_dir)


def _noted(file: StateFile[StageRange], stage_count: int) -> StageRange | None:
    """Read the note; None if it is missing, damaged or of another plan: the caller uses the newest checkpoint."""
    try:
        note = file.read()
    except StorageError as error:
        _LOG.warning("%s This node begins with the layers of its newest checkpoint.", error)
        return None
    if note is not None and note.stop > stage_count:
        _LOG.warning("%s contains no stages of this run. This node uses its newest checkpoint.", file.path)
        return None
    return note
