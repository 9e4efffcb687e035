"""Life of a running node on its event loop: peers know it at once, then it works; one task tree. Loads no PyTorch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import trio

from neuroshard import __version__
from neuroshard.config.settings import Settings
from neuroshard.errors import DamagedFileError, NeuroShardError
from neuroshard.host.computer import peak_megabytes, resident_megabytes
from neuroshard.host.contribution_recorder import ContributionRecorder
from neuroshard.host.identity import node_identity
from neuroshard.host.live_settings import Configuration, limit_source
from neuroshard.host.owner_limits import NetworkRules, OwnerPolicyTask, TransferLedger, restore_pause
from neuroshard.identity import Wallet
from neuroshard.identity.invitations import Invitation
from neuroshard.membership.network_opening import searches_lan
from neuroshard.model.memory_limit import memory_bound, probe_memory, tier_mb
from neuroshard.network.lan_runs import WatchedLanRuns
from neuroshard.network.tasks import accompanied
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.own_machines import OwnMachines
from neuroshard.node.peer_network import PeerNetwork, observe_network
from neuroshard.node.process import StopRequest
from neuroshard.node.run_arrival import LOADING, RunArrival, begins_with_run, startup_steps
from neuroshard.node.run_desk import RunDesk
from neuroshard.pipeline.control import RequestedPause
from neuroshard.runs.offer import RunOffer
from neuroshard.status.board import CommandChannel, Publisher, StartupProgress, StatusBoard
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.snapshot import NodeState
from neuroshard.telemetry.counters import Counters
from neuroshard.update.checking import daily_notice

if TYPE_CHECKING:
    from neuroshard.node.assembly import NodeWork
    from neuroshard.node.demo import DemoOptions
    from neuroshard.training.site.site import Site


_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 3600.0  # between checks whether a day has passed since the last look-up


async def watch_for_updates(
    settings: Settings, publisher: Publisher, wall_clock: Callable[[], float] = time.time
) -> None:
    """Warn the owner daily about a newer version, until cancelled. A failed look-up is only logged."""
    while True:
        try:
            notice = await daily_notice(settings, __version__, wall_clock())
        except DamagedFileError as error:  # no update is found until the owner has acted
            publisher.warn(str(error))
        except NeuroShardError as error:
            _LOG.info("The check for a newer version failed: %s", error)
        else:
            if notice:
                publisher.warn(notice)
        await anyio.sleep(LOOK_SECONDS)


INTRODUCTION_SECONDS = 2.0  # PyTorch's import, which blocks all other work, waits this long for peers to know the node


@dataclass(frozen=True)
class ExitReport:
    """The exit code of a node's process and a sentence on why the node ended."""

    exit_code: int
    message: str


@dataclass(frozen=True)
class ProcessContext:
    """Objects that the process owns and passes to the node's work."""

    configuration: Configuration
    wallet: Wallet
    board: StatusBoard
    counters: Counters
    stop: StopRequest
    demo: DemoOptions | None
    is_trainer: bool  # drives the layers of others and holds none
    invitation: Invitation | None = None  # to the run that this node joins
    is_chosen: bool = False  # the run was chosen in the wizard or the dashboard: the node waits until it is admitted

    @property
    def holds_layers(self) -> bool:
        """Whether this node holds layers, or may hold some."""
        return not self.is_trainer

    @property
    def begins_with_run(self) -> bool:
        """Whether this node enters a run before it opens data."""
        return begins_with_run(self.configuration.settings, is_demo=self.demo is not None)


@dataclass(frozen=True)
class StartContext:
    """Objects that exist before PyTorch is loaded, while this node connects to its peers."""

    memory: MemoryStatus
    publisher: Publisher
    startup: StartupProgress
    loop: CommandLoop
    peer_network: PeerNetwork
    arrival: RunArrival
    requested_pause: RequestedPause
    site: Site | None = None  # the ranks that compute; None: this process computes alone


class Application:
    """Runs one node on its event loop from the first status to the exit report."""

    def __init__(self, place: ProcessContext, commands: CommandChannel) -> None:
        self._place = place
        self._commands = commands

    def run(self) -> ExitReport:
        """Run until stopped. Raises NeuroShardError if the node cannot continue."""
        return trio.run(self._main)  # pyright: ignore[reportUnknownMemberType]

    async def _main(self) -> ExitReport:
        place, requested_pause = self._place, RequestedPause()
        settings, publisher = place.configuration.settings, Publisher(place.board)
        if settings.device not in ("auto", "cpu") and place.holds_layers:
            await anyio.to_thread.run_sync(_check_device, settings.device)  # before any other node hears of this one
        site = await anyio.to_thread.run_sync(_opened_site, settings) if place.holds_layers else None
        publisher.warn(*restore_pause(requested_pause, settings.data_dir))
        if not settings.training:
            requested_pause.begin("Started without training: resume to train.")
        identity = node_identity(place.wallet, settings.data_dir)
        memory = measured_memory(place.configuration)
        publisher.change(node_id=identity.node_id, wallet_id=identity.wallet_id, memory=memory)
        peer_network = PeerNetwork.of(
            settings, identity, invitation=place.invitation, may_wait=place.is_chosen, holds_layers=place.holds_layers
        )
        desk = RunDesk(
            place.configuration,
            place.wallet,
            peer_network,
            place.board,
            place.stop,
            is_demo=place.demo is not None,
            publisher=publisher,
            nearby=WatchedLanRuns() if searches_lan(settings) and place.demo is None else None,
        )
        machines = OwnMachines(place.wallet, peer_network, self._commands, place.board)
        peer_network.networking.attach(machines.live)
        loop = CommandLoop(
            self._commands,
            place.board,
            place.configuration,
            place.stop,
            requested_pause,
            apply_settings=peer_network.limit_upload,
            runs=desk,
            machines=machines,
        )
        stages = startup_steps(settings, is_demo=place.demo is not None, holds_layers=place.holds_layers)
        startup = StartupProgress(publisher, stages)

        def enter(offer: RunOffer) -> None:
            peer_network.join(offer, place.board.current, is_shared=True)

        arrival = RunArrival(peer_network.finder, publisher, startup, identity.wallet_id, enter)
        beginning = StartContext(memory, publisher, startup, loop, peer_network, arrival, requested_pause, site)
        observe = partial(observe_network, peer_network, publisher)
        keeper = ContributionRecorder(settings.data_dir, place.board, publisher)
        ledger = TransferLedger(settings.data_dir)
        publisher.warn(*ledger.warnings)
        network = NetworkRules(ledger, peer_network.networking.gate, peer_network.networking, peer_network.moved)
        owner_policy = OwnerPolicyTask(place.configuration, requested_pause, loop, publisher, network=network)
        updates = [partial(watch_for_updates, settings, publisher)] if settings.update_check else []
        companions = (loop.run, desk.run, observe, peer_network.networking.run, keeper.run, owner_policy.run, *updates)
        try:
            await accompanied(partial(self._live, beginning), *companions)
        finally:
            if site is not None:
                site.close()
        return ExitReport(0, f"Stopped: {place.stop.reason or 'all steps are done'}.")

    async def _live(self, beginning: StartContext) -> None:
        """Join the named run while PyTorch loads, then train. A failure becomes the status before it is raised."""
        arrival = [beginning.arrival.run] if self._place.begins_with_run else []
        try:
            await accompanied(partial(self._work, beginning), *arrival)
        except NeuroShardError as error:
            beginning.publisher.state(NodeState.FAILED, str(error))
            raise

    async def _work(self, beginning: StartContext) -> None:
        with beginning.startup.stage(LOADING):
            if self._place.begins_with_run:
                with anyio.move_on_after(INTRODUCTION_SECONDS):
                    await beginning.arrival.found()
                    await beginning.peer_network.introduced()
            make_work = await anyio.to_thread.run_sync(_loaded)
        await make_work(self._place, beginning).run()


def _check_device(wanted: str) -> None:
    """Raise UsageError if this computer does not have the device. The import of PyTorch takes seconds."""
    from neuroshard.host.resources import choose_device

    choose_device(wanted)


def _opened_site(settings: Settings) -> Site | None:
    """Start the ranks of the node's site, if it has one. The import of PyTorch takes seconds."""
    if settings.site == "off":
        return None
    from neuroshard.node.site_ranks import open_site

    return open_site(settings, os.environ)


def _loaded() -> Callable[[ProcessContext, StartContext], NodeWork]:
    """Import PyTorch and the training code. This takes seconds and holds the interpreter most of the time."""
    from neuroshard.node.assembly import NodeWork

    return NodeWork


def measured_memory(configuration: Configuration) -> MemoryStatus:
    """Measure this computer's memory and the part of it that the node may use, in MB."""
    bound = memory_bound(probe_memory(), configuration.settings.memory)
    return MemoryStatus(
        tier_mb=tier_mb(bound.mb),
        limit_mb=bound.mb,
        limit_source=limit_source(bound.by, configuration.source_of("memory")),
        need_mb=0,
        resident_mb=resident_megabytes(),
        peak_mb=peak_megabytes(),
    )
