"""Holds and trains stages of the run: everything that is built again when this node moves to other stages."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from neuroshard.config.settings import Settings
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source_monitor import SourceMonitor
from neuroshard.data.tokenizer import Tokenizer
from neuroshard.exchange.data_files import DataStore
from neuroshard.host.computer import peak_megabytes, resident_megabytes
from neuroshard.host.matmul_speed import PeakSpeed, peak_speed
from neuroshard.host.resources import Device, ResourceSampler
from neuroshard.identity import NodeIdentity
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import parameter_count
from neuroshard.node.joining import Joining
from neuroshard.node.own_stages import StageWork, best_load, device_plan, megabytes_for, note_stages, stage_work
from neuroshard.node.run_arrival import CHECKPOINT, FIRST_STEP
from neuroshard.node.sample_texts import SampleTexts, sample_writer_of
from neuroshard.node.site_ranks import follow_plan
from neuroshard.node.stage import StageHome, bring_up_stage, checkpoint_policy, storage_limits
from neuroshard.node.stage_copies import StageCopies
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.training_records import RecordSaver, RotationLog
from neuroshard.pipeline.compilation import Compilation, compilation_of
from neuroshard.pipeline.control import Control, RequestedPause
from neuroshard.pipeline.executor import ComputeThread, Precision
from neuroshard.pipeline.routing import ChoiceInTurn, FixedRouting, SwarmRouting, replica_choice
from neuroshard.pipeline.sessions import microbatches_in_flight
from neuroshard.pipeline.stage_client import LocalStageClient
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.runs.data_opening import OpenedData
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.status.board import Publisher, StartupProgress
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.snapshot import ModelStatus
from neuroshard.training.drive_store import DriveStore, WriteAheadFeed
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.site.site import Site
from neuroshard.training.stage_checkpoint import steps_behind
from neuroshard.training.stage_replica import StageReplica
from neuroshard.training.text_generation import (
    InferenceSession,
    LocalInferenceSession,
    SwarmInferenceSession,
    TextGenerator,
)
from neuroshard.training.trainer import Trainer
from neuroshard.types import Architecture, DataPosition, NodeId
from neuroshard.waiting import first_of


def text_generator(
    architecture: Architecture,
    tokenizer: Tokenizer,
    swarm: StageSwarm,
    compute: ComputeThread,
    held: Sequence[StageServer],
) -> TextGenerator:
    """Build a text generator: local if this node holds all stages, otherwise through the swarm.

    `held` are the servers of this node's stages in the order of their layers.
    """
    if len(held) == len(swarm.plan):
        begin = partial(LocalInferenceSession, compute, [service.texts for service in held], swarm.node_id)
        return TextGenerator(architecture, tokenizer, begin)
    sessions = count(1)
    routing = SwarmRouting(len(swarm.plan), swarm.workers, swarm.hop, ChoiceInTurn(swarm.node_id), swarm.missing)

    def begin_in_swarm() -> InferenceSession:
        return SwarmInferenceSession(routing, next(sessions), swarm.missing)

    return TextGenerator(architecture, tokenizer, begin_in_swarm)


@dataclass(frozen=True)
class NodeContext:
    """Objects that stay when this node moves to other stages."""

    run: LocalRun
    data: OpenedData
    fetcher: Fetcher
    compute: ComputeThread
    device: Device
    threads: int
    room: HardwareBudget
    memory: MemoryStatus
    swarm: StageSwarm
    data_store: DataStore  # the data on this computer, also served to other nodes
    watch: SourceMonitor  # watches the source for newer data
    windows: tuple[StageRange, ...]  # the longest sequences of stages that fit this computer
    site: Site | None = None  # None: this process computes on one device

    @property
    def width(self) -> int:
        """Number of ranks that compute the stages."""
        return 1 if self.site is None else self.site.width


@dataclass(frozen=True)
class RunningNode:
    """Objects that exist while the node trains one set of stages."""

    ground: NodeContext
    stages: StageRange | None  # None: a trainer holds none
    trainer: Trainer
    feed: DataFeed
    lives: tuple[StageReplica, ...]
    memory: MemoryStatus
    sampler: ResourceSampler
    rotations: RotationLog
    startup: StartupProgress
    samples: SampleTexts
    compilation: Compilation | None = None  # of the blocks of all stages; None for a trainer
    peak: PeakSpeed | None = None  # of the device; None for a trainer, which computes nothing there
    keeper: RecordSaver | None = None  # only for a trainer, whose record is in no checkpoint

    @property
    def is_driving(self) -> bool:
        """Whether this node takes data and sends them through the stages."""
        return self.trainer.parts.driving is not None

    async def must_follow(self) -> StageRange:
        """Wait until other replicas of a stage continue from another state; return the stages to start again."""
        if self.stages is None:
            raise ValueError("a node without stages follows nobody")
        await first_of(*(live.must_follow for live in self.lives))
        return self.stages

    def apply_settings(self, settings: Settings) -> None:
        """Apply the changed settings that can take effect while training: limits on storage and checkpoints."""
        self.feed.limit_storage(settings.max_storage * 1_000_000)
        for live in self.lives:
            live.keeper.change_limits(
                checkpoint_policy(settings, len(self.lives)), storage_limits(settings, len(self.lives))
            )


class StageTraining:
    """Builds the parts that hold and train stages, again for each set of stages."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        identity: NodeIdentity,
        publisher: Publisher,
        startup: StartupProgress,
        *,
        requested_pause: RequestedPause,
        is_demo: bool,
    ) -> None:
        """`settings` returns the present settings; `requested_pause` applies to all trainers."""
        self._present_settings = settings
        self._requested_pause = requested_pause
        self._identity = identity
        self._publisher = publisher
        self._startup = startup
        self._is_demo = is_demo
        self._has_begun = False  # whether stages were started before in this process
        self._compilation: Compilation | None = None  # one for all stages; None until the device is known
        self.copies: StageCopies | None = None  # of stages with one other holder; None until the run is known

    @property
    def _settings(self) -> Settings:
        return self._present_settings()

    async def begin(self, ground: NodeContext, stages: StageRange) -> RunningNode:
        """Build the parts that hold and train these stages. Raises StorageError, CheckpointError."""
        run, swarm = ground.run, ground.swarm
        await self._find_copies(ground)
        memory = self._publish_layers(ground, stages)
        swarm.release()
        # The parts of the former stages refer to each other, so only the collector frees their weights. This must
        # happen before the new stages are built: both together may not fit the memory.
        gc.collect()
        with self._startup.stage(CHECKPOINT):
            swarm.go_to(None)  # the move has ended: this node reports the new stages as its own
            control = Control(self._requested_pause)
            lives = await self._bring_up_all(ground, stages, control)
            self._publisher.warn(*note_stages(self._settings.data_dir, self._identity, run, stages))
        peak = await ground.compute.run(partial(peak_speed, ground.device, lives[0].executor.precision.dtype))
        self._has_begun = True
        self._publisher.warn(*steps_behind(lives))
        for live in lives:
            self._publisher.warn(*live.warnings)
            swarm.host(live)
        drives = DriveStore(self._settings.data_dir, self._identity.wallet_id, self._identity.node_id, run.run_id)
        feed = self._feed(ground, drives.start_after(lives[0].record))
        trainer = self._trainer(ground, lives, feed, drives, control)
        if self._requested_pause.holds:
            self._startup.complete()
        else:
            self._startup.report(FIRST_STEP, "")
        return RunningNode(
            ground=ground,
            stages=stages,
            trainer=trainer,
            feed=feed,
            lives=tuple(lives),
            memory=memory,
            sampler=ResourceSampler(ground.device, self._settings.data_dir, ground.threads),
            rotations=RotationLog(self._settings.data_dir, run.run_id, self._identity),
            startup=self._startup,
            samples=SampleTexts(
                self._settings.data_dir,
                run.run_id,
                self._publisher,
                sample_writer_of(trainer, is_whole=len(stages) == len(swarm.plan)),
            ),
            compilation=self._compilation,
            peak=peak,
        )

    def has_checkpoint(self, ground: NodeContext, index: int) -> bool:
        """Return whether this disk has a checkpoint of a stage."""
        home = StageHome.of(
            self._settings, self._identity, ground.run, layers=ground.swarm.plan[index], threads=ground.threads
        )
        return any(home.store.folder.glob("step-*.json"))

    async def _find_copies(self, ground: NodeContext) -> None:
        """Load the copies of other nodes' stages that an earlier start kept; only the first call does so."""
        if self.copies is None:
            architecture = ground.run.parameters.architecture
            self.copies = StageCopies(ground.swarm, self._present_settings, architecture)
            await self.copies.load()

    async def _bring_up_all(self, ground: NodeContext, stages: StageRange, control: Control) -> list[StageReplica]:
        """Build or restore all stages. They compute in one precision, except those with a checkpoint in another."""
        lives = list[StageReplica]()
        plan = device_plan(ground.run.parameters, stages, ground.room)
        self._compilation = self._compilation or compilation_of(
            self._settings.compile, ground.device.torch_device(), has_memory=plan.compiles
        )
        load = best_load(ground.run.parameters, stages, ground.room)
        if ground.site is not None:
            follow_plan(ground.site, ground.run.parameters, plan)
        for position, index in enumerate(stages):
            report_percent = partial(_report_percent, ground.swarm, position, len(stages))
            report_percent(0)
            layers = ground.swarm.plan[index]
            home = StageHome.of(
                self._settings, self._identity, ground.run, layers=layers, threads=ground.threads, stages=len(stages)
            )
            precision = lives[0].service.executor.precision if lives else None
            work = stage_work(
                ground.run.parameters, layers, load, width=ground.width, moments_on_host=plan.moments_on_host
            )
            lives.append(
                await self._bring_up(
                    ground, index, home, work, precision, control=control, report_percent=report_percent
                )
            )
        return lives

    async def _bring_up(
        self,
        ground: NodeContext,
        index: int,
        home: StageHome,
        work: StageWork,
        precision: Precision | None,
        *,
        control: Control,
        report_percent: Callable[[int], None],
    ) -> StageReplica:
        """Build a stage from the state that it must continue from; wait while other nodes have but do not send it."""
        run, swarm = ground.run, ground.swarm
        report = partial(self._startup.report, CHECKPOINT)
        joining = Joining(
            swarm,
            home.identity,
            home.store,
            report,
            run.is_joined,
            may_catch_up=not self._has_begun,  # later stages are new here, or catching up has failed
            report_percent=report_percent,
        )
        while True:
            must_restore = await joining.prepare()
            live = await bring_up_stage(
                compute=ground.compute,
                home=home,
                run=run,
                swarm=swarm,
                index=index,
                device=ground.device,
                work=work,
                control=control,
                precision=precision,
                compilation=self._compilation,
                site=ground.site,
            )
            if live.is_restored or not must_restore:
                return live
            self._publisher.warn(*live.warnings)  # the stored state was damaged
            await ground.compute.run(live.keeper.close)

    def _publish_layers(self, ground: NodeContext, stages: StageRange) -> MemoryStatus:
        """Publish the layers that this node holds and the memory that they need."""
        parameters, swarm = ground.run.parameters, ground.swarm
        need = megabytes_for(parameters, stages, ground.room)
        memory = replace(ground.memory, need_mb=need, resident_mb=resident_megabytes(), peak_mb=peak_megabytes())
        architecture, layers = parameters.architecture, stages.layers(swarm.plan)
        roles = layers.roles(architecture.layer_count)
        self._publisher.change(
            memory=memory, model=ModelStatus(architecture, parameter_count(architecture), layers, roles)
        )
        return memory

    def _feed(self, ground: NodeContext, start: tuple[DataPosition | None, NodeId | None]) -> DataFeed:
        run = ground.run
        feed = DataFeed(
            ground.data.genesis,
            ground.data_store.cache,
            run_id=run.offer.data_run_id,
            node_id=self._identity.node_id,
            sequence_length=run.parameters.architecture.sequence_length,
            vocabulary_size=run.parameters.genesis.next_merge_id,
            start=start[0],
            start_node=start[1],
            is_demo=self._is_demo,
        )
        feed.limit_storage(self._settings.max_storage * 1_000_000)  # it may have changed while there was no feed
        return feed

    def _trainer(
        self, ground: NodeContext, lives: list[StageReplica], feed: DataFeed, drives: DriveStore, control: Control
    ) -> Trainer:
        run, swarm = ground.run, ground.swarm
        services = [live.service for live in lives]
        tokenizer = Tokenizer(ground.data.table)
        parts = TrainerParts(
            parameters=run.parameters,
            stages=tuple(lives),
            driving=self._driving(run, swarm, lives, feed, drives) if lives[0].index == 0 else None,
            generator=text_generator(run.parameters.architecture, tokenizer, swarm, ground.compute, services),
        )
        return Trainer(parts, control=control)

    def _driving(
        self, run: LocalRun, swarm: StageSwarm, lives: list[StageReplica], feed: DataFeed, drives: DriveStore
    ) -> DriverParts:
        """Build the driver: routing is fixed for a model in one stage, otherwise it finds the holders of each stage.

        The data position is stored before data are sent to other nodes. After a kill this node's stage returns to a
        checkpoint but theirs do not, and without the stored position they would train on the same data twice.
        """
        node_id, stage_count = self._identity.node_id, len(swarm.plan)
        width = lives[0].executor.width
        if stage_count == 1:
            routing = FixedRouting((LocalStageClient(lives[0].service, node_id),))
            return DriverParts(node_id, feed, routing, in_flight=width, ranks=width)
        choice = replica_choice(run.parameters.routing, node_id, swarm.lane_root)
        swarm_routing = SwarmRouting(stage_count, swarm.workers, swarm.hop, choice, swarm.missing)
        of_step = run.parameters.sequences_per_step // run.parameters.batch_size
        most = microbatches_in_flight(stage_count) * width
        in_flight = max(1, min(most, of_step, lives[0].service.open_of_driver))
        write_ahead = WriteAheadFeed(feed, drives.note_position, swarm.sends_to_others)
        return DriverParts(node_id, write_ahead, swarm_routing, in_flight, drives.first_session(time.time()), width)


def _report_percent(swarm: StageSwarm, done: int, stages: int, percent: int) -> None:
    """Update this node's progress: `done` of its `stages` are complete, and the next one is at `percent`."""
    swarm.note_ready((100 * done + percent) // stages)
