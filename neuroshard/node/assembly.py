"""Builds the running parts of a node, stage by stage, each visible in the dashboard; takes them down in reverse."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
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
from neuroshard.node.placing import Placing, megabytes_for, windows_of
from neuroshard.node.probe import Device, choose_device, matmul_flops_per_second
from neuroshard.node.proposal import Room, propose, propose_demo, run_parameters
from neuroshard.node.publisher import Publisher, StartupProgress
from neuroshard.node.resources import ResourceSampler, peak_megabytes, resident_megabytes
from neuroshard.node.rotation_log import RotationLog
from neuroshard.node.run_choice import FoundRun, RunFinder, RunOrigin, explanation
from neuroshard.node.stage import LiveStage, bring_up_stage, checkpoint_policy, kept_stages, storage_limits
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.tasks import accompanied
from neuroshard.status.snapshot import DataStatus, MemoryStatus, ModelStatus, NodeState, RunStatus
from neuroshard.swarm.run_offer import RunOffer
from neuroshard.swarm.stage_coverage import StageRange
from neuroshard.training.compute import ComputeThread
from neuroshard.training.generation import TextGenerator
from neuroshard.training.loop import Trainer
from neuroshard.training.model_chain import ModelChain
from neuroshard.training.parts import Driving, TrainerParts
from neuroshard.training.pipeline import LocalHop
from neuroshard.training.routing import FixedRouting
from neuroshard.training.swarm_routing import InTurn, SwarmRouting

log = logging.getLogger(__name__)

HARDWARE = "Measuring this computer"
DEMO_DATA = "Building the demo data"
RUN = "Finding the run"
DATA = "Opening the training data"
MODEL = "Building the model"
CHECKPOINT = "Looking for a checkpoint"
FIRST_STEP = "Making the first step"
WAITING_LOOK_SECONDS = 0.5
MOST_IN_FLIGHT = 8  # microbatches of one driver


@dataclass(frozen=True)
class Ground:
    """What stays when this node goes on to other stages."""

    run: OwnRun
    data: OpenedData
    fetcher: Fetcher
    compute: ComputeThread
    device: Device
    threads: int
    room: Room
    memory: MemoryStatus
    swarm: StageSwarm
    windows: tuple[StageRange, ...]  # of stages that this computer holds


@dataclass(frozen=True)
class RunningNode:
    """The parts that live while the node trains."""

    ground: Ground
    stages: StageRange
    trainer: Trainer
    feed: DataFeed
    lives: tuple[LiveStage, ...]
    cache: ShardCache
    memory: MemoryStatus
    sampler: ResourceSampler
    rotations: RotationLog
    startup: StartupProgress

    def apply_settings(self, settings: Settings) -> None:
        """Let changed settings hold that can hold at once."""
        self.cache.limit_bytes = settings.max_storage * 1_000_000
        for live in self.lives:
            live.stage.keeper.store.limits = storage_limits(settings)
            live.stage.keeper.change_policy(checkpoint_policy(settings))


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
        enter: Callable[[OwnRun], Placing],
        demo: DemoOptions | None,
    ) -> None:
        self._settings = configuration.settings
        self._wallet = wallet
        self._identity = identity
        self._publisher = publisher
        self._finder = finder
        self._enter = enter
        self._demo = demo
        self._closing = AsyncExitStack()
        first = (HARDWARE,) if demo is None else (HARDWARE, DEMO_DATA)
        named = (RUN,) if self._settings.run else ()
        self._startup = StartupProgress(publisher, (*first, *named, DATA, MODEL, CHECKPOINT, FIRST_STEP))

    async def build(self) -> RunningNode:
        """All parts, ready to train. Raises NeuroShardError when something cannot be used.

        `enter` is called once the run is known: it makes this node a part of the run's swarm.
        """
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
            windows = windows_of(run.parameters, room, self._settings.max_stages)
            self._announce(run, found)
            placing = self._enter(run)
            if run.parameters.stage_count > 1:
                self._startup.tell(MODEL, "Asking the others which layers they hold.")
            stages = await placing.choose(windows, kept_stages(self._settings.data_dir, self._identity, run))
        ground = Ground(run, data, fetcher, compute, device, threads, room, memory, placing.swarm, windows)
        return await self.train_stages(ground, stages)

    async def train_stages(self, ground: Ground, stages: StageRange) -> RunningNode:
        """The parts that hold and train these stages. Raises StorageError, CheckpointError."""
        run, swarm = ground.run, ground.swarm
        with self._startup.stage(CHECKPOINT):
            lives = [
                await bring_up_stage(
                    compute=ground.compute,
                    settings=self._settings,
                    identity=self._identity,
                    run=run,
                    index=index,
                    layers=swarm.plan[index],
                    device=ground.device,
                    threads=ground.threads,
                )
                for index in stages
            ]
        for live in lives:
            self._publisher.warn(*live.stage.warnings)
            swarm.hold(live.parts.index, live.parts.service, live.parts.outer.exact_root)
        feed, cache = self._feed(ground.data, run, lives[0])
        trainer = self._trainer(ground, lives, feed)
        memory = self._tell_layers(ground, stages)
        if not self._settings.training:
            trainer.pause(reason="Started without training: resume to train.")
            self._startup.complete()
        else:
            self._startup.tell(FIRST_STEP, "")
        return RunningNode(
            ground=ground,
            stages=stages,
            trainer=trainer,
            feed=feed,
            lives=tuple(lives),
            cache=cache,
            memory=memory,
            sampler=ResourceSampler(ground.device, self._settings.data_dir, ground.threads),
            rotations=RotationLog(self._settings.data_dir, run.run_id, self._identity),
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
            proposal = propose_demo(vocabulary, self._demo.stages) if self._demo else propose(room, vocabulary)
            pins = data.genesis.pins(data.table.next_merge_id)
            parameters = run_parameters(proposal, pins, name="own", inner_steps=wanted)
            windows_of(parameters, room, None)
            run = runs.create(parameters)
            log.info("A new run of your own begins: %s.", run.run_id[:16])
        elif wanted is not None and wanted != run.parameters.outer.inner_steps:
            self._publisher.warn(
                f"This run was created with {run.parameters.outer.inner_steps} inner steps; "
                f"inner_steps = {wanted} holds only for a new run, in another data folder."
            )
        runs.remember_source(source, run)
        return run

    def _announce(self, run: OwnRun, found: FoundRun | None) -> None:
        """Publish what the run is; which layers this node holds comes later."""
        architecture = run.parameters.architecture
        self._publisher.change(
            model=ModelStatus(architecture, parameter_count(architecture), None, ()),
            run=RunStatus(
                run_id=run.run_id,
                is_own=run.offer.owner == self._identity.wallet_id,
                is_demo=self._demo is not None,
                explanation=explanation(*self._origin(found)),
            ),
        )

    def _tell_layers(self, ground: Ground, stages: StageRange) -> MemoryStatus:
        """Publish which layers this node holds, and what they need."""
        parameters, swarm = ground.run.parameters, ground.swarm
        need = megabytes_for(parameters, stages, ground.room)
        memory = replace(ground.memory, need_mb=need, resident_mb=resident_megabytes(), peak_mb=peak_megabytes())
        architecture, layers = parameters.architecture, stages.layers(swarm.plan)
        roles = layers.roles(architecture.layer_count)
        self._publisher.change(
            memory=memory, model=ModelStatus(architecture, parameter_count(architecture), layers, roles)
        )
        return memory

    def _origin(self, found: FoundRun | None) -> tuple[RunOrigin, RunOffer | None]:
        if found is not None:
            return found.origin, found.offer
        return (RunOrigin.DEMO if self._demo else RunOrigin.OWN), None

    def _feed(self, data: OpenedData, run: OwnRun, live: LiveStage) -> tuple[DataFeed, ShardCache]:
        cache = ShardCache(
            self._settings.data_dir / "data_cache",
            limit_bytes=self._settings.max_storage * 1_000_000,
            vocabulary_size=run.parameters.architecture.vocabulary_size,
        )
        feed = DataFeed(
            data.genesis,
            cache,
            run_id=run.run_id,
            node_id=self._identity.node_id,
            sequence_length=run.parameters.architecture.sequence_length,
            start=live.stage.record.progress.position,
            start_node=live.stage.record.node_id,
            is_demo=self._demo is not None,
        )
        return feed, cache

    def _trainer(self, ground: Ground, lives: list[LiveStage], feed: DataFeed) -> Trainer:
        run, swarm = ground.run, ground.swarm
        chain = ModelChain([live.stage.executor.model for live in lives])
        parts = TrainerParts(
            parameters=run.parameters,
            stages=tuple(live.parts for live in lives),
            driving=self._driving(run, swarm, lives, feed) if lives[0].parts.index == 0 else None,
            generator=TextGenerator(ground.compute, chain, Tokenizer(ground.data.table)) if chain.is_whole else None,
        )
        return Trainer(parts, [live.stage.record for live in lives])

    def _driving(self, run: OwnRun, swarm: StageSwarm, lives: list[LiveStage], feed: DataFeed) -> Driving:
        """A lone node's routing is fixed; among several nodes it looks for whoever holds a stage."""
        node_id, stage_count = self._identity.node_id, len(swarm.plan)
        if stage_count == 1:
            return Driving(node_id, feed, FixedRouting((LocalHop(lives[0].parts.service, node_id),)))
        routing = SwarmRouting(stage_count, swarm.workers, swarm.hop, InTurn(), swarm.missing)
        in_flight = max(1, min(MOST_IN_FLIGHT, run.parameters.sequences_per_step // run.parameters.batch_size))
        return Driving(node_id, feed, routing, in_flight, first_session=int(time.time()))
