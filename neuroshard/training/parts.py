"""Parts of a trainer: the stages that a node holds, its driver and its text generator."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.group_rounds import GroupRounds
from neuroshard.pipeline.driver import Feed
from neuroshard.pipeline.executor import StageExecutor
from neuroshard.pipeline.routing import Routing
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.training.held_out_vote import HeldOutVote
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.stage_checkpoint import Saver
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


@dataclass(frozen=True)
class StageParts:
    """One stage that a node holds. All stages of a node share one compute thread."""

    index: int  # number of the stage in the run
    service: StageServer
    outer: OuterSync
    saver: Saver | None = None  # None: no checkpoints, for measurements
    group: GroupRounds | None = None  # rounds with other replicas; None: this node is alone
    vote: HeldOutVote | None = None  # votes on the aggregates of the rounds

    @property
    def executor(self) -> StageExecutor:
        """Executor of the stage's server."""
        return self.service.executor


@dataclass(frozen=True)
class TrainerParts:
    """Parts of a trainer."""

    parameters: RunParameters
    stages: tuple[StageParts, ...]  # in the order of their layers
    driving: DriverParts | None = None  # None: other nodes drive this node's layers
    generator: TextGenerator | None = None
