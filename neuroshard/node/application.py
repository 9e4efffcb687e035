"""Life of a running node on its event loop: known to others at once, then at work; one task tree. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import trio

from neuroshard.errors import NeuroShardError
from neuroshard.identity import Wallet
from neuroshard.model.memory_limit import memory_bound, probe_memory, tier_mb
from neuroshard.node.arrival import Arrival
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.configuration import Configuration, limit_source
from neuroshard.node.contribution_keeper import ContributionKeeper
from neuroshard.node.identity import node_identity
from neuroshard.node.kindness.kept_pause import restore_pause
from neuroshard.node.kindness.network_rules import NetworkRules
from neuroshard.node.kindness.transfer_ledger import TransferLedger
from neuroshard.node.kindness.watch import KindnessWatch
from neuroshard.node.process_memory import peak_megabytes, resident_megabytes
from neuroshard.node.publisher import Publisher, StartupProgress
from neuroshard.node.society import Society, observe_network
from neuroshard.node.startup_stages import LOADING, startup_stages
from neuroshard.node.stopping import StopRequest
from neuroshard.node.tasks import accompanied
from neuroshard.node.update_watch import watch_for_updates
from neuroshard.pipeline.control import RequestedPause
from neuroshard.runs.offer import RunOffer
from neuroshard.status.board import CommandChannel, StatusBoard
from neuroshard.status.snapshot import MemoryStatus, NodeState
from neuroshard.telemetry.counters import Counters

if TYPE_CHECKING:
    from neuroshard.node.demo import DemoOptions
    from neuroshard.node.node_work import NodeWork

INTRODUCTION_SECONDS = 2.0  # PyTorch, whose loading holds everything else up, waits so long for a node to be known


@dataclass(frozen=True)
class ExitReport:
    """How a node ended."""

    exit_code: int
    message: str


@dataclass(frozen=True)
class Workplace:
    """What a node's work gets from the process around it."""

    configuration: Configuration
    wallet: Wallet
    board: StatusBoard
    counters: Counters
    stop: StopRequest
    demo: DemoOptions | None
    is_trainer: bool  # drives the layers of others and holds none


@dataclass(frozen=True)
class Beginning:
    """What there is when the work begins: this node is on its way to others, or among them."""

    memory: MemoryStatus
    publisher: Publisher
    startup: StartupProgress
    loop: CommandLoop
    society: Society
    arrival: Arrival
    wish: RequestedPause


class Application:
    """One node, from nothing to the end."""

    def __init__(self, place: Workplace, commands: CommandChannel) -> None:
        self._place = place
        self._commands = commands

    def run(self) -> ExitReport:
        """Run until stopped. Raises NeuroShardError when the node cannot go on."""
        return trio.run(self._main)  # pyright: ignore[reportUnknownMemberType]

    async def _main(self) -> ExitReport:
        place, wish = self._place, RequestedPause()
        settings, publisher = place.configuration.settings, Publisher(place.board)
        publisher.warn(*restore_pause(wish, settings.data_dir))
        if not settings.training:
            wish.begin("Started without training: resume to train.")
        loop = CommandLoop(self._commands, place.board, place.configuration, place.stop, wish)
        identity = node_identity(place.wallet, settings.data_dir)
        memory = measured_memory(place.configuration)
        publisher.change(node_id=identity.node_id, wallet_id=identity.wallet_id, memory=memory)
        society = Society.of(settings, identity)
        society.genesis = settings.genesis
        stages = startup_stages(settings, is_demo=place.demo is not None, holds_layers=not place.is_trainer)
        startup = StartupProgress(publisher, stages)

        def enter(offer: RunOffer) -> None:
            society.join(offer, place.board.current, is_shared=True)

        arrival = Arrival(society.finder, publisher, startup, identity.wallet_id, enter)
        beginning = Beginning(memory, publisher, startup, loop, society, arrival, wish)
        observe = partial(observe_network, society, publisher)
        keeper = ContributionKeeper(settings.data_dir, place.board, publisher)
        ledger = TransferLedger(settings.data_dir)
        publisher.warn(*ledger.warnings)
        network = NetworkRules(ledger, society.networking.gate, society.networking, society.moved)
        kindness = KindnessWatch(place.configuration, wish, loop, publisher, network=network)
        updates = [partial(watch_for_updates, settings, publisher)] if settings.update_check else []
        companions = (loop.run, observe, society.networking.run, keeper.run, kindness.run, *updates)
        await accompanied(partial(self._live, beginning), *companions)
        return ExitReport(0, f"Stopped: {place.stop.reason or 'all steps are done'}.")

    async def _live(self, beginning: Beginning) -> None:
        """Meet the others, load PyTorch meanwhile, and work."""
        arrival = [beginning.arrival.run] if self._place.configuration.settings.run else []
        try:
            await accompanied(partial(self._work, beginning), *arrival)
        except NeuroShardError as error:
            beginning.publisher.state(NodeState.FAILED, str(error))
            raise

    async def _work(self, beginning: Beginning) -> None:
        with beginning.startup.stage(LOADING):
            if self._place.configuration.settings.run:
                with anyio.move_on_after(INTRODUCTION_SECONDS):
                    await beginning.arrival.found()
                    await beginning.society.introduced()
            make_work = await anyio.to_thread.run_sync(_loaded)
        await make_work(self._place, beginning).run()


def _loaded() -> Callable[[Workplace, Beginning], NodeWork]:
    """Import what trains; takes seconds, holding the interpreter most of the time."""
    from neuroshard.node.node_work import NodeWork

    return NodeWork


def measured_memory(configuration: Configuration) -> MemoryStatus:
    """This computer's memory and what of it the node may use."""
    bound = memory_bound(probe_memory(), configuration.settings.memory)
    return MemoryStatus(
        tier_mb=tier_mb(bound.mb),
        limit_mb=bound.mb,
        limit_source=limit_source(bound.by, configuration.source_of("memory")),
        need_mb=0,
        resident_mb=resident_megabytes(),
        peak_mb=peak_megabytes(),
    )
