"""Builds the loops of a trainer from its parts: one for each stage, or the drive loop of a node without stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from neuroshard.pipeline.chain_call import ChainEdges
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.driver import DataWait, Driver, DriverOptions, FirstStageLimits, InFlightLedger, Pace
from neuroshard.pipeline.microbatch_call import FlowRecord
from neuroshard.pipeline.stage_protocol import largest_rounding, wire_precisions
from neuroshard.training.drive_loop import DriveLoop
from neuroshard.training.evaluator import Evaluator
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.record import TrainingRecord
from neuroshard.training.stage_loop import StageLoop


@dataclass(frozen=True)
class LoopContext:
    """Values that all loops of a trainer share."""

    control: Control
    wall_clock: Callable[[], float]  # seconds since the epoch
    monotonic: Callable[[], float]
    changed: Callable[[], None]  # called after every change of a loop's state


@dataclass(frozen=True)
class ComposedDriver:
    """Driver of a node with its ledger, evaluator and data wait."""

    driver: Driver
    ledger: InFlightLedger
    evaluator: Evaluator
    waiting: DataWait


@dataclass(frozen=True)
class Composition:
    """Loops of a trainer. The primary loop is that of the first layers, or the drive loop if no stage is held."""

    primary: StageLoop | DriveLoop
    stages: tuple[StageLoop, ...]
    drive: ComposedDriver | None


def compose(parts: TrainerParts, record: TrainingRecord, shared: LoopContext) -> Composition:
    """Create the loops. Raises ValueError for parts that do not fit together.

    `record` is that of a trainer without stages.
    """
    driving, pace = parts.driving, Pace(shared.monotonic)
    if driving is None:
        if not parts.stages:
            raise ValueError("a trainer needs a stage, or something to drive")
        stages = _stage_loops(parts, shared, pace)
        return Composition(stages[0], stages, None)
    waiting, batch_size = DataWait(pace), parts.parameters.batch_size
    evaluator = Evaluator(
        driving, batch_size, control=shared.control, pace=pace, waiting=waiting, wall_clock=shared.wall_clock
    )
    if not parts.stages:
        loop = DriveLoop(
            parts.parameters,
            record,
            evaluator,
            shared.control,
            pace=pace,
            wall_clock=shared.wall_clock,
            changed=shared.changed,
        )
        drive = ComposedDriver(
            _driver(parts, driving, shared, room=loop.room, ledger=loop.ledger, waiting=waiting),
            loop.ledger,
            evaluator,
            waiting,
        )
        return Composition(loop, (), drive)
    if parts.stages[0].index != 0:
        raise ValueError("a node that holds stages drives only with the first one")
    ledger = InFlightLedger()
    stages = _stage_loops(parts, shared, pace, ledger=ledger, evaluator=evaluator)
    driver = _driver(parts, driving, shared, room=parts.stages[0].service.intake, ledger=ledger, waiting=waiting)
    return Composition(stages[0], stages, ComposedDriver(driver, ledger, evaluator, waiting))


def _stage_loops(
    parts: TrainerParts,
    shared: LoopContext,
    pace: Pace,
    *,
    ledger: InFlightLedger | None = None,
    evaluator: Evaluator | None = None,
) -> tuple[StageLoop, ...]:
    """Create a loop per stage; `pace`, `ledger` and `evaluator` belong to the first one."""
    loops: list[StageLoop] = []
    for held in parts.stages:
        is_first = not loops
        loops.append(
            StageLoop(
                held,
                control=shared.control,
                pace=pace if is_first else Pace(shared.monotonic),
                wall_clock=shared.wall_clock,
                ledger=ledger if is_first else None,
                evaluator=evaluator if is_first else None,
                before=None if is_first else loops[-1],
                changed=shared.changed,
            )
        )
    return tuple(loops)


def _driver(
    parts: TrainerParts,
    driving: DriverParts,
    shared: LoopContext,
    *,
    room: FirstStageLimits,
    ledger: InFlightLedger,
    waiting: DataWait,
) -> Driver:
    parameters = parts.parameters
    is_chained = parameters.data_plane == "chain" and driving.routing.stage_count > 1
    edges = ChainEdges(wire_precisions(parameters)[0], shared.monotonic) if is_chained else None
    return Driver(
        driving.node_id,
        DriverOptions(
            min(parameters.batch_size, -(-parameters.sequences_per_step // driving.ranks)),
            driving.in_flight,
            driving.first_session,
            largest_rounding(parameters),
            edges,
        ),
        routing=driving.routing,
        feed=driving.feed,
        room=room,
        ledger=ledger,
        waiting=waiting,
        flow=FlowRecord(
            driving.routing.stage_count,
            monotonic=shared.monotonic,
            wall_clock=shared.wall_clock,
            star_edges=(lambda: ()) if edges is None else edges.stars,
        ),
    )
