"""Builds the running parts of a node, stage by stage, each visible in the dashboard; takes them down in reverse."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread

from neuroshard.config.settings import Settings
from neuroshard.data.cache import ShardCache
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import open_source
from neuroshard.data.tokenizer import FIRST_MERGE_ID, Tokenizer
from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity, Wallet
from neuroshard.model.family import parameter_count
from neuroshard.model.memory_limit import available_mb, probe_memory, tier_mb
from neuroshard.node.configuration import Configuration
from neuroshard.node.cores import default_threads
from neuroshard.node.data_opening import OpenedData, largest_tokenizer_bytes, open_data, open_joined_data
from neuroshard.node.demo import DemoData, DemoOptions
from neuroshard.node.own_run import OwnRun, OwnRuns
from neuroshard.node.probe import Device, choose_device, matmul_flops_per_second
from neuroshard.node.proposal import Room, check_fit, propose, propose_demo, run_parameters
from neuroshard.node.publisher import Publisher, StartupProgress
from neuroshard.node.resources import ResourceSampler, peak_megabytes, resident_megabytes
from neuroshard.node.rotation_log import RotationLog
from neuroshard.node.run_choice import FoundRun, RunFinder, RunOrigin, explanation
from neuroshard.node.stage import LiveStage, bring_up_stage, checkpoint_policy, storage_limits
from neuroshard.node.tasks import accompanied
from neuroshard.status.snapshot import DataStatus, MemoryStatus, ModelStatus, NodeState, RunStatus
from neuroshard.swarm.run_offer import RunOffer
from neuroshard.training.compute import ComputeThread
from neuroshard.training.generation import TextGenerator
from neuroshard.training.loop import Trainer
from neuroshard.training.parts import Driving, TrainerParts
from neuroshard.training.pipeline import LocalHop
from neuroshard.training.routing import FixedRouting
from neuroshard.types import LayerRange

log = logging.getLogger(__name__)

HARDWARE = "Measuring this computer"
DEMO_DATA = "Building the demo data"
RUN = "Finding the run"
DATA = "Opening the training data"
MODEL = "Building the model"
CHECKPOINT = "Looking for a checkpoint"
FIRST_STEP = "Making the first step"
WAITING_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class RunningNode:
    """The parts that live while the node trains."""

    run: OwnRun
    trainer: Trainer
    feed: DataFeed
    live: LiveStage
    fetcher: Fetcher
    cache: ShardCache
    device: Device
    threads: int
    memory: MemoryStatus
    sampler: ResourceSampler
    rotations: RotationLog
    startup: StartupProgress

    def apply_settings(self, settings: Settings) -> None:
        """Let changed settings hold that can hold at once."""
        self.cache.limit_bytes = settings.max_storage * 1_000_000
        self.live.stage.keeper.store.limits = storage_limits(settings)
        self.live.stage.keeper.change_policy(checkpoint_policy(settings))


class Assembly:
    """Builds a node once. `close` ends whatever was built, also when building failed half-way."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        wallet: Wallet,
        identity: NodeIdentity,
        publisher: Publisher,
        finder: RunFinder,
        demo: DemoOptions | None,
    ) -> None:
        self._settings = configuration.settings
        self._wallet = wallet
        self._identity = identity
        self._publisher = publisher
        self._finder = finder
        self._demo = demo
        self._closing = AsyncExitStack()
        first = (HARDWARE,) if demo is None else (HARDWARE, DEMO_DATA)
        named = (RUN,) if self._settings.run else ()
        self._startup = StartupProgress(publisher, (*first, *named, DATA, MODEL, CHECKPOINT, FIRST_STEP))

    async def build(self) -> RunningNode:
        """All parts, ready to train. Raises NeuroShardError when something cannot be used."""
        identity = self._identity
        with self._startup.stage(HARDWARE):
            device = choose_device(self._settings.device)
            threads = self._settings.cpu_threads or default_threads()
            compute = self._compute_thread(threads)
            room, memory = await self._measure(compute, device)
            if self._demo is None:
                propose(room, FIRST_MERGE_ID)  # memory too small for any model is told before anything is fetched
        location = self._settings.genesis if self._demo is None else await self._demo_source(self._demo)
        runs = OwnRuns(self._settings.data_dir, self._wallet)
        named = await self._named_run()
        with self._startup.stage(DATA):
            fetcher = Fetcher(open_source(location))
            self._closing.push_async_callback(fetcher.source.aclose)
            data, found = await self._open_data(fetcher, runs, room, named)
        with self._startup.stage(MODEL):
            run = self._choose_run(data, room, runs, "demo" if self._demo else fetcher.source.description)
            memory = self._announce(run, found, room, memory)
        with self._startup.stage(CHECKPOINT):
            layers = LayerRange(0, run.parameters.architecture.layer_count)
            live = await bring_up_stage(
                compute=compute,
                settings=self._settings,
                identity=identity,
                run=run,
                index=0,
                layers=layers,
                device=device,
                threads=threads,
            )
        self._publisher.warn(*live.stage.warnings)
        feed, cache = self._feed(data, run, identity, live)
        trainer = self._trainer(run, compute, live, feed, Tokenizer(data.table))
        if not self._settings.training:
            trainer.pause(reason="Started without training: resume to train.")
            self._startup.complete()
        else:
            self._startup.tell(FIRST_STEP, "")
        return RunningNode(
            run=run,
            trainer=trainer,
            feed=feed,
            live=live,
            fetcher=fetcher,
            cache=cache,
            device=device,
            threads=threads,
            memory=memory,
            sampler=ResourceSampler(device, self._settings.data_dir, threads),
            rotations=RotationLog(self._settings.data_dir, run.run_id, identity),
            startup=self._startup,
        )

    async def close(self) -> None:
        """End threads, files and connections."""
        await self._closing.aclose()

    def _compute_thread(self, threads: int) -> ComputeThread:
        compute = ComputeThread(threads)
        self._closing.callback(compute.close)
        return compute

    async def _measure(self, compute: ComputeThread, device: Device) -> tuple[Room, MemoryStatus]:
        probe = probe_memory()
        limit = available_mb(probe, self._settings.memory)
        speed = await compute.run(partial(matmul_flops_per_second, device.torch_device()))
        device_tier = None if device.memory_mb is None else tier_mb(device.memory_mb)
        source = "--memory" if limit == self._settings.memory else "this computer's memory, less a reserve"
        memory = MemoryStatus(
            tier_mb=tier_mb(limit),
            limit_mb=limit,
            limit_source=source,
            need_mb=0,
            resident_mb=resident_megabytes(),
            peak_mb=peak_megabytes(),
        )
        self._publisher.change(memory=memory)
        return Room(memory.tier_mb, device.kind, device_tier, speed), memory

    async def _demo_source(self, options: DemoOptions) -> str:
        """Build the embedded data and serve it on loopback, so that the demo takes the way of every other node."""
        data = DemoData(self._settings.data_dir, options, self._wallet)
        with self._startup.stage(DEMO_DATA):

            def progress(stage: str, fraction: float) -> None:
                anyio.from_thread.run_sync(self._startup.tell, DEMO_DATA, stage, fraction)

            built = await anyio.to_thread.run_sync(data.build, progress, abandon_on_cancel=True)
            self._closing.callback(data.close)
            log.info(
                "%s %s tokens of %s.",
                "Reusing" if built.is_reused else "Built",
                f"{built.report.tokens:,}",
                built.report.source,
            )
            return data.serve()

    async def _named_run(self) -> FoundRun | None:
        """The run given with --run; while nobody knows it, the status says so."""
        if self._settings.run is None:
            return None
        with self._startup.stage(RUN):

            def tell(reason: str) -> None:
                self._startup.tell(RUN, reason)
                self._publisher.state(NodeState.STARTING, reason)

            return await self._finder.named(tell)

    async def _open_data(
        self, fetcher: Fetcher, runs: OwnRuns, room: Room, named: FoundRun | None
    ) -> tuple[OpenedData, FoundRun | None]:
        """Open the data set of a run to join, or of a run of one's own; what is waited for stands in the status."""
        store = self._settings.data_dir / "data_cache" / "descriptions"
        limit = largest_tokenizer_bytes(room.tier_mb)

        async def opened() -> tuple[OpenedData, FoundRun | None]:
            if named is not None:
                return await open_joined_data(fetcher, store, OwnRun.of(named.offer, is_joined=True), limit), named
            data = await open_data(fetcher, store, runs, limit)
            found = None if self._demo else await self._finder.suggested(fetcher, data.genesis)
            if found is None:
                return data, None
            try:
                return await open_joined_data(fetcher, store, OwnRun.of(found.offer, is_joined=True), limit), found
            except DataError as error:
                self._publisher.warn(f"The run {found.offer.run_id[:16]} was found but not joined: {error}")
                return data, None

        return await accompanied(opened, partial(self._tell_waiting, fetcher))

    async def _tell_waiting(self, fetcher: Fetcher) -> None:
        while True:
            await anyio.sleep(WAITING_LOOK_SECONDS)
            waiting = [item for item in fetcher.active() if item.retry_at is not None]
            description = fetcher.source.description
            for item in waiting:
                reason = f"Waiting for {description}: {item.error} Trying again by itself."
                self._startup.tell(DATA, reason)
                status = DataStatus(description, verified=False, explanation=reason, downloads=fetcher.active())
                self._publisher.change(state=NodeState.WAITING_FOR_DATA, state_reason=reason, data=status)

    def _choose_run(self, data: OpenedData, room: Room, runs: OwnRuns, source: str) -> OwnRun:
        """The run that this data had before, or a new one from what this computer can do."""
        run = data.run
        wanted = self._settings.inner_steps
        if run is not None and run.is_joined:
            return run
        if run is None:
            vocabulary = data.table.next_merge_id
            proposal = propose_demo(vocabulary) if self._demo else propose(room, vocabulary)
            pins = data.genesis.pins(data.table.next_merge_id)
            parameters = run_parameters(proposal, pins, name="own", inner_steps=wanted)
            check_fit(parameters, room)
            run = runs.create(parameters)
            log.info("A new run of your own begins: %s.", run.run_id[:16])
        elif wanted is not None and wanted != run.parameters.outer.inner_steps:
            self._publisher.warn(
                f"This run was created with {run.parameters.outer.inner_steps} inner steps; "
                f"inner_steps = {wanted} holds only for a new run, in another data folder."
            )
        runs.remember_source(source, run)
        return run

    def _announce(self, run: OwnRun, found: FoundRun | None, room: Room, memory: MemoryStatus) -> MemoryStatus:
        """Check that the run fits and publish what it is."""
        architecture = run.parameters.architecture
        layers = LayerRange(0, architecture.layer_count)
        need = check_fit(run.parameters, room)
        memory = MemoryStatus(
            tier_mb=memory.tier_mb,
            limit_mb=memory.limit_mb,
            limit_source=memory.limit_source,
            need_mb=need,
            resident_mb=resident_megabytes(),
            peak_mb=peak_megabytes(),
        )
        self._publisher.change(
            memory=memory,
            model=ModelStatus(architecture, parameter_count(architecture), layers, layers.roles(len(layers))),
            run=RunStatus(
                run_id=run.run_id,
                is_own=run.offer.owner == self._identity.wallet_id,
                is_demo=self._demo is not None,
                explanation=explanation(*self._origin(found)),
            ),
        )
        return memory

    def _origin(self, found: FoundRun | None) -> tuple[RunOrigin, RunOffer | None]:
        if found is not None:
            return found.origin, found.offer
        return (RunOrigin.DEMO if self._demo else RunOrigin.OWN), None

    def _feed(
        self, data: OpenedData, run: OwnRun, identity: NodeIdentity, live: LiveStage
    ) -> tuple[DataFeed, ShardCache]:
        cache = ShardCache(
            self._settings.data_dir / "data_cache",
            limit_bytes=self._settings.max_storage * 1_000_000,
            vocabulary_size=run.parameters.architecture.vocabulary_size,
        )
        feed = DataFeed(
            data.genesis,
            cache,
            run_id=run.run_id,
            node_id=identity.node_id,
            sequence_length=run.parameters.architecture.sequence_length,
            start=live.stage.record.progress.position,
            start_node=live.stage.record.node_id,
            is_demo=self._demo is not None,
        )
        return feed, cache

    def _trainer(
        self, run: OwnRun, compute: ComputeThread, live: LiveStage, feed: DataFeed, tokenizer: Tokenizer
    ) -> Trainer:
        parts = TrainerParts(
            parameters=run.parameters,
            stages=(live.parts,),
            driving=Driving(self._identity.node_id, feed, FixedRouting((LocalHop(live.parts.service),))),
            generator=TextGenerator(compute, live.stage.executor.model, tokenizer),
        )
        return Trainer(parts, live.stage.record)
