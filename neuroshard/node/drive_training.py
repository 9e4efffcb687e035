"""Builds and keeps the parts of a trainer: a node that drives the run's stages and holds none of its layers."""

from __future__ import annotations

import time
from dataclasses import replace

from neuroshard.config.run_parameters import RunParameters
from neuroshard.config.settings import Settings
from neuroshard.data.feed import DataFeed
from neuroshard.data.tokenizer import Tokenizer
from neuroshard.errors import TooLittleMemoryError
from neuroshard.host.computer import peak_megabytes, resident_megabytes
from neuroshard.host.resources import ResourceSampler
from neuroshard.identity import NodeIdentity
from neuroshard.model.architecture import parameter_count
from neuroshard.model.memory_limit import least_limit_mb, planned_bytes
from neuroshard.model.memory_need import MEGABYTE, driving_bytes
from neuroshard.node.run_arrival import FIRST_STEP
from neuroshard.node.sample_texts import SampleTexts, sample_writer_of
from neuroshard.node.stage_training import NodeContext, RunningNode, text_generator
from neuroshard.node.training_records import RecordSaver, RotationLog
from neuroshard.pipeline.control import Control, RequestedPause
from neuroshard.pipeline.routing import SwarmRouting, replica_choice
from neuroshard.pipeline.sessions import microbatches_in_flight
from neuroshard.status.board import Publisher, StartupProgress
from neuroshard.status.snapshot import ModelStatus
from neuroshard.training.drive_store import DriveStore, WriteAheadFeed
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.record import TrainingRecord
from neuroshard.training.trainer import Trainer
from neuroshard.types import Role


def begin_driving(
    ground: NodeContext,
    settings: Settings,
    identity: NodeIdentity,
    publisher: Publisher,
    startup: StartupProgress,
    *,
    requested_pause: RequestedPause,
) -> RunningNode:
    """Build the parts of a trainer. Raises StorageError, and TooLittleMemoryError if one microbatch does not fit."""
    parameters, architecture = ground.run.parameters, ground.run.parameters.architecture
    in_flight = fitting_microbatches(parameters, ground.memory.limit_mb)
    work = driving_bytes(architecture, parameters.batch_size, parameters.stage_count, in_flight)
    need = -(-planned_bytes(work, ground.memory.limit_mb) // MEGABYTE)
    memory = replace(ground.memory, need_mb=need, resident_mb=resident_megabytes(), peak_mb=peak_megabytes())
    model = ModelStatus(architecture, parameter_count(architecture), None, (Role.DRIVER,))
    publisher.change(memory=memory, model=model)
    store = DriveStore(settings.data_dir, identity.wallet_id, identity.node_id, ground.run.run_id)
    record = store.load()
    feed = _feed(ground, identity, record)
    choice = replica_choice(parameters.routing, identity.node_id, ground.swarm.lane_root)
    routing = SwarmRouting(parameters.stage_count, ground.swarm.workers, ground.swarm.hop, choice, ground.swarm.missing)
    write_ahead = WriteAheadFeed(feed, store.note_position)
    driving = DriverParts(
        identity.node_id, write_ahead, routing, in_flight, first_session=store.first_session(time.time())
    )
    generator = text_generator(architecture, Tokenizer(ground.data.table), ground.swarm, ground.compute, ())
    trainer = Trainer(TrainerParts(parameters, (), driving, generator), record, control=Control(requested_pause))
    if requested_pause.holds:
        startup.complete()
    else:
        startup.report(FIRST_STEP, "")
    return RunningNode(
        ground=ground,
        stages=None,
        trainer=trainer,
        feed=feed,
        lives=(),
        memory=memory,
        sampler=ResourceSampler(ground.device, settings.data_dir, ground.threads),
        rotations=RotationLog(settings.data_dir, ground.run.run_id, identity),
        startup=startup,
        samples=SampleTexts(settings.data_dir, ground.run.run_id, publisher, sample_writer_of(trainer, is_whole=False)),
        keeper=RecordSaver(store, trainer),
    )


def fitting_microbatches(parameters: RunParameters, limit_mb: int) -> int:
    """Number of microbatches that a trainer keeps in flight: those of one step, or as many as the memory allows.

    Raises TooLittleMemoryError with the MB needed if one microbatch does not fit.
    """
    wanted = microbatches_in_flight(parameters.stage_count)
    most = max(1, min(wanted, parameters.sequences_per_step // parameters.batch_size))
    needs = [
        least_limit_mb(driving_bytes(parameters.architecture, parameters.batch_size, parameters.stage_count, count))
        for count in range(1, most + 1)
    ]
    if limit_mb < needs[0]:
        raise TooLittleMemoryError(
            f"Driving this run needs {needs[0]:,} MB of memory here, but only {limit_mb:,} MB may be used.",
            f"Allow {needs[0]:,} MB with --memory.",
        )
    return sum(need <= limit_mb for need in needs)


def _feed(ground: NodeContext, identity: NodeIdentity, record: TrainingRecord) -> DataFeed:
    parameters = ground.run.parameters
    return DataFeed(
        ground.data.genesis,
        ground.data_store.cache,
        run_id=ground.run.offer.data_run_id,
        node_id=identity.node_id,
        sequence_length=parameters.architecture.sequence_length,
        vocabulary_size=parameters.genesis.next_merge_id,
        start=record.progress.position,
        start_node=record.node_id,
    )
