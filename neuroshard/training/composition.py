"""Builds the loops of a trainer from its parts: one per stage, or one for a driver without stages, and the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from neuroshard.pipeline.control import Control
from neuroshard.pipeline.driver import DataWait, Driver, DriverOptions, FirstStageLimits, InFlightLedger, Pace
from neuroshard.pipeline.microbatch_call import FlowRecord
from neuroshard.training.drive_loop import DriveLoop
from neuroshard.training.evaluator import EvaluationSchedule
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.record import TrainingRecord
from neuroshard.training.stage_loop import StageLoop, StageTrainer


@dataclass(frozen=True)
class LoopContext:
    """What all loops of a trainer share."""

    control: Control
    wall_clock: Callable[[], float]  # seconds since the epoch
    monotonic: Callable[[], float]
    changed: Callable[[], None]  # told every change of a loop's state


@dataclass(frozen=True)
class ComposedDriver:
    """What a node that drives has for it."""

    driver: Driver
    journal: InFlightLedger
    watch: EvaluationSchedule
    waiting: DataWait


@dataclass(frozen=True)
class Composition:
    """The loops of a trainer. The primary one is that of the first layers, or of the driving where no stage is held."""

    primary: StageLoop | DriveLoop
    stages: tuple[StageLoop, ...]
    drive: ComposedDriver | None


def compose(parts: TrainerParts, records: Sequence[TrainingRecord], shared: LoopContext) -> Composition:
    """The loops, with a record for each. Raises ValueError for parts that do not go together."""
    driving, pace = parts.driving, Pace(shared.monotonic)
    if driving is None:
        if not parts.stages:
            raise ValueError("a trainer needs a stage, or something to drive")
        stages = _stage_loops(parts, records, shared, pace)
        return Composition(stages[0], stages, None)
    waiting, batch_size = DataWait(pace), parts.parameters.batch_size
    watch = EvaluationSchedule(
        driving, batch_size, control=shared.control, pace=pace, waiting=waiting, wall_clock=shared.wall_clock
    )
    flow = FlowRecord(driving.routing.stage_count, monotonic=shared.monotonic, wall_clock=shared.wall_clock)
    drive_of = partial(_drive, driving, batch_size, watch=watch, waiting=waiting, flow=flow)
    if not parts.stages:
        (record,) = records
        loop = DriveLoop(
            parts.parameters,
            record,
            watch,
            shared.control,
            pace=pace,
            wall_clock=shared.wall_clock,
            changed=shared.changed,
        )
        return Composition(loop, (), drive_of(loop.room, loop.journal, lambda: loop.steps))
    if parts.stages[0].index != 0:
        raise ValueError("a node that holds stages drives only with the first one")
    journal = InFlightLedger()
    stages = _stage_loops(parts, records, shared, pace, (journal, watch))
    first = stages[0]
    return Composition(first, stages, drive_of(parts.stages[0].service.intake, journal, lambda: first.steps))


def _stage_loops(
    parts: TrainerParts,
    records: Sequence[TrainingRecord],
    shared: LoopContext,
    pace: Pace,
    driven: tuple[InFlightLedger, EvaluationSchedule] | tuple[None, None] = (None, None),
) -> tuple[StageLoop, ...]:
    """`pace`, and what the node drives, belong to the first stage."""
    loops: list[StageLoop] = []
    for held, record in zip(parts.stages, records, strict=True):
        journal, watch = (None, None) if loops else driven
        stage = StageTrainer(
            held,
            partial(parts.in_force, held),
            record,
            control=shared.control,
            pace=Pace(shared.monotonic) if loops else pace,
            wall_clock=shared.wall_clock,
            journal=journal,
            watch=watch,
        )
        before = loops[-1] if loops else None
        loops.append(StageLoop(stage, shared.control, before=before, changed=shared.changed))
    return tuple(loops)


def _drive(
    driving: DriverParts,
    batch_size: int,
    room: FirstStageLimits,
    journal: InFlightLedger,
    steps: Callable[[], int],
    *,
    watch: EvaluationSchedule,
    waiting: DataWait,
    flow: FlowRecord,
) -> ComposedDriver:
    driver = Driver(
        driving.node_id,
        DriverOptions(batch_size, driving.in_flight, driving.first_session),
        routing=driving.routing,
        feed=driving.feed,
        room=room,
        journal=journal,
        waiting=waiting,
        flow=flow,
        next_step=lambda: steps() + 1,
    )
    return ComposedDriver(driver, journal, watch, waiting)
