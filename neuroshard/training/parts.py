"""Parts of a trainer: the stages that a node holds, its driver and its text generator."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.pipeline.driver import Feed
from neuroshard.pipeline.routing import Routing
from neuroshard.training.stage_replica import StageReplica
from neuroshard.training.text_generation import TextGenerator
from neuroshard.types import NodeId


@dataclass(frozen=True)
class DriverParts:
    """Parts of a driver. A lone node's routing has one LocalStageClient, around the node's own stage server."""

    node_id: NodeId
    feed: Feed
    routing: Routing
    in_flight: int = 1  # microbatches in flight at the same time
    first_session: int = 1  # above those of earlier starts, which other nodes may remember as closed
    ranks: int = 1  # of the first stage: a step is cut into at least that many microbatches, if it has the sequences


@dataclass(frozen=True)
class TrainerParts:
    """Parts of a trainer."""

    parameters: RunParameters
    stages: tuple[StageReplica, ...]  # in the order of their layers
    driving: DriverParts | None = None  # None: other nodes drive this node's layers
    generator: TextGenerator | None = None
