"""The work of a node: builds its parts step by step, each visible in the dashboard, and takes them down in reverse."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import inf

import anyio
import anyio.to_thread

from neuroshard.config.run_parameters import GenesisPins
from neuroshard.config.settings import Settings
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import FolderSource, NodesOnly, ShardSource, open_source
from neuroshard.data.source_monitor import SourceMonitor
from neuroshard.data.tokenizer import FIRST_MERGE_ID
from neuroshard.errors import DataError, UsageError
from neuroshard.exchange.data_files import DataStore
from neuroshard.host.computer import default_threads
from neuroshard.host.matmul_speed import matmul_flops_per_second
from neuroshard.host.resources import Device, choose_device
from neuroshard.identity import NodeIdentity, Wallet
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.memory_limit import tier_mb
from neuroshard.network.tasks import Companion, accompanied
from neuroshard.node.application import ProcessContext, StartContext
from neuroshard.node.data_sharing import DataSharing, open_data_store
from neuroshard.node.demo import DemoOptions, EmbeddedData, FurtherNodes, LocalSwarm, write_demo_invitation
from neuroshard.node.drive_training import begin_driving
from neuroshard.node.founding import Founder
from neuroshard.node.holder_monitor import HolderMonitor
from neuroshard.node.joining import StageSafety
from neuroshard.node.observation import Observer
from neuroshard.node.own_stages import StageChooser, kept_stages, windows_of
from neuroshard.node.pipeline_status import publish_stages
from neuroshard.node.queued_download import QueuedDownload
from neuroshard.node.run_arrival import (
    DATA,
    DEMO_DATA,
    HARDWARE,
    MODEL,
    OWN_TEXT,
    RUN,
    begins_with_run,
    publish_run_status,
)
from neuroshard.node.stage_training import NodeContext, RunningNode, StageTraining
from neuroshard.node.training_life import TrainingLife
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.runs.data_opening import OpenedData, largest_tokenizer_bytes, open_data, open_joined_data
from neuroshard.runs.finding import A_DEMONSTRATION, HOW_TO_JOIN, FoundRun, NoRun, RunFinder, not_joinable
from neuroshard.runs.finding import OWN_TEXT as OWN_TEXT_RUN
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.proposal import HardwareBudget, propose, propose_demo, run_parameters
from neuroshard.runs.stored_runs import LocalRun, LocalRuns
from neuroshard.status.board import Publisher, StartupProgress
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import NodeState
from neuroshard.training.site.site import Site

_LOG = logging.getLogger(__name__)

WAITING_LOOK_SECONDS = 0.5
OWN_TEXT_FOLDER = "own-text"  # in the data folder: the data set that is built from the owner's text


class Assembly:
    """Builds the node's parts, once per start. `close` closes everything that was opened, even after a failure."""

    def __init__(
        self,
        *,
        settings: Settings,
        wallet: Wallet,
        identity: NodeIdentity,
        publisher: Publisher,
        startup: StartupProgress,
        memory: MemoryStatus,
        finder: RunFinder,
        named: Callable[[], Awaitable[FoundRun | None]],
        enter: Callable[[LocalRun, str, Sequence[StageRange]], StageChooser],
        sharing: DataSharing,
        metered: Callable[[ShardSource], ShardSource],
        demo: DemoOptions | None,
        holds_layers: bool = True,
        site: Site | None = None,
    ) -> None:
        """`named` waits for the run given with --run; `metered` applies the owner's network rules to a source.

        `enter` is called when the run, the source of its data and the longest sequences of stages that fit this
        computer are known: it makes this node a part of the swarm.
        """
        self._settings = settings
        self._memory = memory
        self._named = named
        self._wallet = wallet
        self._identity = identity
        self._publisher = publisher
        self._finder = finder
        self._enter = enter
        self._sharing = sharing
        self._metered = metered
        self._demo = demo
        self._holds_layers = holds_layers
        self._site = site
        self._closing = AsyncExitStack()
        self.startup = startup

    async def lay(self) -> tuple[NodeContext, StageRange]:
        """Build the node's context and choose its first stages. Raises NeuroShardError if any of it cannot be used."""
        with self.startup.stage(HARDWARE):
            device = choose_device(self._settings.device).limited_to(self._settings.max_gpu_memory)
            threads = (self._settings.cpu_threads or default_threads()) if self._site is None else self._site.threads
            compute = self._compute_thread(threads, device)
            await compute.run(device.make_current)
            room = self._room(device, await self._speed(compute, device))
            _check_memory(room, self._demo)
        location = await self._location()
        runs = LocalRuns(self._settings.data_dir, self._wallet)
        fetcher, data, found = await self._find_run(location, runs, room)
        with self.startup.stage(MODEL):
            run = self._choose_run(data, room, runs, self._source_name(fetcher))
            most, spare = self._settings.max_stages, self._settings.spare_stages
            first = windows_of(run.parameters, room, most)
            windows = first if most is None else windows_of(run.parameters, room, most + spare)
            self._publish_run(run, found)
            is_split = run.parameters.stage_count > 1
            placing = self._enter(run, _place_of(fetcher), windows if is_split else ())
            if is_split:
                self.startup.report(MODEL, "Asking other nodes which layers they hold.")
            stages = await placing.choose(first, kept_stages(self._settings.data_dir, self._identity, run))
        ground = NodeContext(
            run,
            data,
            fetcher,
            compute,
            device,
            threads,
            room,
            self._memory,
            placing.swarm,
            self._sharing.data_store,
            SourceMonitor(data.genesis, run.parameters.genesis),
            windows,
            self._site,
        )
        return ground, stages

    async def lay_to_drive(self) -> NodeContext:
        """Build the context of a trainer, which holds no layers. Raises NeuroShardError if any of it cannot be used.

        Raises UsageError if there is no run of other nodes to drive.
        """
        with self.startup.stage(HARDWARE):
            device = choose_device("cpu")
            compute = self._compute_thread(1, device)
            room = self._room(device, 0.0)
        runs = LocalRuns(self._settings.data_dir, self._wallet)
        fetcher, data, found = await self._find_run(self._settings.genesis, runs, room)
        if data.run is None or not data.run.is_joined:
            raise UsageError("A trainer needs a run of other nodes, and none was found.", HOW_TO_JOIN)
        self._publish_run(data.run, found)
        swarm = self._enter(data.run, _place_of(fetcher), ()).swarm
        watch = SourceMonitor(data.genesis, data.run.parameters.genesis)
        data_store = self._sharing.data_store
        return NodeContext(
            data.run, data, fetcher, compute, device, 1, room, self._memory, swarm, data_store, watch, ()
        )

    async def close(self) -> None:
        """Close the compute thread, the data source and the demo's server, in reverse order of opening."""
        await self._closing.aclose()

    def _compute_thread(self, threads: int, device: Device) -> ComputeThread:
        compute = ComputeThread(threads, device=device.torch_device(), device_label=device.label, wave=self._site)
        self._closing.callback(compute.close)
        return compute

    async def _speed(self, compute: ComputeThread, device: Device) -> float:
        """Measure floating-point operations per second to choose a model. A run that is joined has its model."""
        if begins_with_run(self._settings, is_demo=self._demo is not None):
            return inf
        return await compute.run(partial(matmul_flops_per_second, device.torch_device()))

    def _room(self, device: Device, flops_per_second: float) -> HardwareBudget:
        device_tier = None if device.memory_mb is None else tier_mb(device.memory_mb)
        ranks = 1 if self._site is None else self._site.width
        shares = 1 if self._site is None else self._site.host_shares
        return HardwareBudget(
            self._memory.tier_mb // shares,
            device.kind,
            device_tier,
            flops_per_second,
            ranks,
            optimizer_memory=self._settings.optimizer_memory,
            compiles=self._settings.compile == "auto",
            site_mode=self._settings.site_mode,
        )

    async def _location(self) -> str | None:
        """The place of the data; None if the nodes of the run are the only one.

        The embedded text and the owner's own are built into a data set here.
        """
        if self._demo is not None:
            return await self._built(
                EmbeddedData(self._settings.data_dir, self._demo.text_folder, self._wallet), DEMO_DATA
            )
        if self._trains_own_text:
            folder = self._settings.data_dir / OWN_TEXT_FOLDER
            return await self._built(EmbeddedData(folder, self._settings.text, self._wallet), OWN_TEXT)
        return self._settings.genesis

    @property
    def _trains_own_text(self) -> bool:
        return self._demo is None and self._settings.text is not None and self._settings.run is None

    async def _built(self, data: EmbeddedData, step: str) -> str:
        """Build a data set from text and serve it on loopback, so that this node follows the same path as others."""
        with self.startup.stage(step):

            def progress(stage: str, fraction: float) -> None:
                anyio.from_thread.run_sync(self.startup.report, step, stage, fraction)

            built = await anyio.to_thread.run_sync(data.build, progress, abandon_on_cancel=True)
            self._closing.callback(data.close)
            _LOG.info(
                "%s %s tokens of %s.",
                "Reusing" if built.is_reused else "Built",
                f"{built.report.tokens:,}",
                built.report.source,
            )
            return data.serve()

    async def _find_run(
        self, location: str | None, runs: LocalRuns, room: HardwareBudget
    ) -> tuple[Fetcher, OpenedData, FoundRun | NoRun]:
        """Open the data source and find the run that trains on it."""
        named = await self._named()
        with self.startup.stage(DATA):
            source: ShardSource = NodesOnly() if location is None else open_source(location)
            if location is not None and self._demo is None and not isinstance(source, FolderSource):
                source = self._metered(source)
            fetcher = Fetcher(source, others=self._sharing)
            self._closing.push_async_callback(fetcher.source.aclose)
            return fetcher, *await self._open_data(fetcher, runs, room, named)

    async def _open_data(
        self, fetcher: Fetcher, runs: LocalRuns, room: HardwareBudget, named: FoundRun | None
    ) -> tuple[OpenedData, FoundRun | NoRun]:
        """Open the data set of the run to join, or of this node's own run; the status shows the reason for a wait."""
        store = self._sharing.data_store.store
        limit = largest_tokenizer_bytes(room.tier_mb)

        async def opened() -> tuple[OpenedData, FoundRun | NoRun]:
            if named is not None:
                return await open_joined_data(fetcher, store, LocalRun.of(named.offer, is_joined=True), limit), named
            data = await open_data(fetcher, store, runs, limit)
            found = await self._suggested_run(fetcher, data)
            if isinstance(found, NoRun):
                return data, found
            try:
                return await open_joined_data(fetcher, store, LocalRun.of(found.offer, is_joined=True), limit), found
            except DataError as error:
                self._publisher.warn(f"The run {found.offer.run_id[:16]} was found but not joined: {error}")
                return data, not_joinable(found, str(error))

        return await accompanied(opened, partial(self._report_waiting, fetcher))

    async def _suggested_run(self, fetcher: Fetcher, data: OpenedData) -> FoundRun | NoRun:
        """Ask the data set and peers for a run; meanwhile the status shows whom this node asks."""
        if self._demo is not None or self._trains_own_text:
            return OWN_TEXT_RUN if self._demo is None else A_DEMONSTRATION

        def report(reason: str, fraction: float | None) -> None:
            self.startup.report(RUN, reason, fraction)
            self._publisher.state(NodeState.STARTING, reason)

        with self.startup.stage(RUN):
            otherwise = "this computer trains a run of its own" if self._holds_layers else "the trainer ends"
            found = await self._finder.suggested(fetcher, data.genesis, report, otherwise)
        if isinstance(found, NoRun) and self._holds_layers:
            _LOG.info("%s", found.explanation)
        self._publisher.state(NodeState.STARTING, f"{DATA} ...")
        return found

    async def _report_waiting(self, fetcher: Fetcher) -> None:
        while True:
            await anyio.sleep(WAITING_LOOK_SECONDS)
            waiting = [item for item in fetcher.active() if item.retry_at is not None]
            description = fetcher.source.description
            for item in waiting:
                reason = f"Waiting for {description}: {item.error} The node tries again."
                self.startup.report(DATA, reason)
                status = DataStatus(description, verified=False, explanation=reason, downloads=fetcher.active())
                self._publisher.change(state=NodeState.WAITING_FOR_DATA, state_reason=reason, data=status)

    def _choose_run(self, data: OpenedData, room: HardwareBudget, runs: LocalRuns, source: str) -> LocalRun:
        """Return the earlier run on this data, or create one of the size that this computer can train."""
        run = data.run
        wanted = self._settings.inner_steps
        if run is not None and run.is_joined:
            return run
        if run is None:
            vocabulary = data.table.next_merge_id
            proposal = propose_demo(vocabulary, self._demo.stages) if self._demo else propose(room, vocabulary)
            pins = data.genesis.pins(data.table.next_merge_id)
            parameters = run_parameters(proposal, pins, name="own", inner_steps=wanted)
            windows_of(parameters, room, None)
            run = runs.create(parameters)
            _LOG.info("A new run of your own starts: %s.", run.run_id[:16])
        elif wanted is not None and wanted != run.parameters.outer.inner_steps:
            self._publisher.warn(
                f"This run was created with {run.parameters.outer.inner_steps} inner steps; "
                f"inner_steps = {wanted} applies only to a new run, in another data folder."
            )
        runs.remember_source(source, run)
        return run

    def _source_name(self, fetcher: Fetcher) -> str:
        """Name of the source in the record of runs; the loopback address of a data set built here changes."""
        if self._demo is not None:
            return "demo"
        return f"text in {self._settings.text}" if self._trains_own_text else fetcher.source.description

    def _publish_run(self, run: LocalRun, found: FoundRun | NoRun) -> None:
        publish_run_status(self._publisher, run.offer, found, self._identity.wallet_id, is_demo=self._demo is not None)


def _place_of(fetcher: Fetcher) -> str:
    """Location of the data for an invitation; "" if only the nodes of the run send them."""
    source = fetcher.source
    return "" if isinstance(source, NodesOnly) else source.description


def _check_memory(room: HardwareBudget, demo: DemoOptions | None) -> None:
    """Raises TooLittleMemoryError if no model fits the memory. Called before data are fetched or built."""
    if demo is None:
        propose(room, FIRST_MERGE_ID)
    else:
        pins = GenesisPins("", 1, None, "", FIRST_MERGE_ID)  # no data yet: smallest possible vocabulary
        windows_of(run_parameters(propose_demo(FIRST_MERGE_ID, demo.stages), pins, name="demo"), room, None)


class NodeWork:
    """The work of a node after PyTorch is loaded, used once per start: build the parts, train, close them."""

    def __init__(self, place: ProcessContext, beginning: StartContext) -> None:
        self._place = place
        self._beginning = beginning

    async def run(self) -> None:
        """Start up and train. A stop during the start-up cancels it; nothing was trained yet, so nothing is lost."""
        place, beginning = self._place, self._beginning
        publisher, peer_network, startup = beginning.publisher, beginning.peer_network, beginning.startup
        settings, requested_pause = place.configuration.settings, beginning.requested_pause
        sharing = DataSharing(peer_network, open_data_store(settings))
        peer_network.networking.attach(sharing.live)
        assembly = Assembly(
            settings=settings,
            wallet=place.wallet,
            identity=peer_network.identity,
            publisher=publisher,
            startup=startup,
            memory=beginning.memory,
            finder=peer_network.finder,
            named=partial(self._named, sharing.data_store),
            enter=self._enter,
            sharing=sharing,
            metered=peer_network.metered,
            demo=place.demo,
            holds_layers=not place.is_trainer,
            site=beginning.site,
        )
        training = StageTraining(
            lambda: place.configuration.settings,
            peer_network.identity,
            publisher,
            startup,
            requested_pause=requested_pause,
            is_demo=place.demo is not None,
        )

        async def begin() -> RunningNode:
            if place.is_trainer:
                ground = await assembly.lay_to_drive()
                return begin_driving(
                    ground, settings, peer_network.identity, publisher, startup, requested_pause=requested_pause
                )
            ground, stages = await assembly.lay()
            new = [stage for stage in stages if not training.has_checkpoint(ground, stage)]
            await self._founder(ground).found_first(new, is_shared=self._is_shared(ground.run))
            return await training.begin(ground, stages)

        life = TrainingLife(
            training,
            beginning.loop,
            place.stop,
            publisher,
            lambda node: Observer(node, peer_network, publisher, place.counters),
            None if place.demo is None else place.demo.steps,
        )
        try:
            await life.run(begin, partial(self._companions, training))
        finally:  # shielded: a cancelled node must close its parts too
            with anyio.CancelScope(shield=True):
                await assembly.close()

    async def _named(self, data_store: DataStore) -> FoundRun | None:
        """Wait for the run, and download while an organiser lets this node wait for its place."""
        if not self._place.begins_with_run:
            return None
        peer_network = self._beginning.peer_network
        early = QueuedDownload(
            self._place.configuration.settings, peer_network, data_store, self._beginning.memory.tier_mb
        )
        found = await accompanied(self._beginning.arrival.found, early.run)
        await anyio.to_thread.run_sync(early.settle, found.offer, peer_network.admitted_layers)
        return found

    def _companions(self, training: StageTraining, ground: NodeContext) -> list[Companion]:
        """Tasks that run next to the training and survive a change of stages."""
        companions: list[Companion] = [
            partial(self._further_nodes, ground),
            self._beginning.peer_network.exchange.watch_stored,
            self._founder(ground).run,
            HolderMonitor(ground.swarm).run,
            ground.swarm.leave_before_sleep,
            ground.watch.run,
            StageSafety(ground.swarm, partial(training.has_checkpoint, ground)).run,
        ]
        if training.copies is not None:
            companions.append(training.copies.run)
        return companions

    def _founder(self, ground: NodeContext) -> Founder:
        """The task that founds the stages of a run of this wallet."""
        demo = self._place.demo
        stored = StoredFoundations(self._place.configuration.settings.data_dir)
        first_seats = 1 if demo is None or demo.stages > 1 else demo.nodes
        return Founder(ground.swarm, self._place.wallet, stored, first_seats)

    def _enter(self, run: LocalRun, genesis: str, windows: Sequence[StageRange]) -> StageChooser:
        """Make this node a member of the run. Its layers are chosen afterwards."""
        peer_network, board, demo = self._beginning.peer_network, self._place.board, self._place.demo
        is_shared = self._is_shared(run)
        swarm = peer_network.serve(run.offer, board.current, is_shared=is_shared, genesis=genesis, windows=windows)
        peer_network.networking.attach(partial(publish_stages, swarm, self._beginning.publisher, board.current))
        return StageChooser(
            swarm, peer_network.networking, is_first=demo is not None, admitted=peer_network.admitted_layers
        )

    def _is_shared(self, run: LocalRun) -> bool:
        """Whether other nodes may train the run."""
        demo = self._place.demo
        return run.is_joined or (demo is not None and demo.nodes > 1)

    async def _further_nodes(self, ground: NodeContext) -> None:
        """Run the other nodes of `demo --nodes N`, which join the first node's run."""
        demo, settings = self._place.demo, self._place.configuration.settings
        if demo is None or demo.nodes < 2:
            return
        network = await self._beginning.peer_network.networking.up()
        peer = network.transport.addresses()[0]
        shared = FurtherNodes(
            invitation=write_demo_invitation(settings.data_dir, self._place.wallet, ground.run.offer, peer, demo.nodes),
            genesis=ground.fetcher.source.description,
            max_stages=demo.stages_a_node,
            spare_stages=demo.spare_stages_a_node,
            max_storage=settings.max_storage,
            is_training=settings.training,
        )
        swarm = LocalSwarm(settings.data_dir, demo.nodes, ground.threads)
        await swarm.run(shared)
