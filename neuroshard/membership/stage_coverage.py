"""The holders of each stage of a run, the replicas of a stage, and the layers without a holder. Pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from neuroshard.model.architecture import StagePlan
from neuroshard.types import MAX_LAYERS, LayerRange, NodeId, Role, RunId, WalletId


@dataclass(frozen=True, order=True)
class StageRange:
    """Stages start, start + 1, ... stop - 1 of a plan. The bounds apply to ranges that peers send."""

    start: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]  # a stage has at least one layer
    stop: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a range of stages needs 0 <= start < stop, got {self.start}..{self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, stage: object) -> bool:
        return isinstance(stage, int) and self.start <= stage < self.stop

    @property
    def words(self) -> str:
        """For people, who count from 1: "stage 2", "stages 2 to 3"."""
        first, last = self.start + 1, self.stop
        return f"stage {first}" if first == last else f"stages {first} to {last}"

    def covers(self, other: StageRange) -> bool:
        """Whether every stage of the other range is one of these."""
        return self.start <= other.start and other.stop <= self.stop

    def roles(self, stage_count: int) -> tuple[Role, ...]:
        """Roles of a node with these stages: the first one drives, the last one validates, between them one works."""
        return LayerRange(self.start, self.stop).roles(stage_count)

    def layers(self, plan: StagePlan) -> LayerRange:
        """The layers of these stages. Raises ValueError for stages that the plan does not have."""
        if self.stop > len(plan):
            raise ValueError(f"stages {self.start}..{self.stop} of a plan with {len(plan)} stages")
        return LayerRange(plan[self.start].start, plan[self.stop - 1].stop)


def stages_of(layers: LayerRange, plan: StagePlan) -> StageRange | None:
    """The stages that these layers are; None when they begin or end within a stage."""
    starts = {stage.start: number for number, stage in enumerate(plan)}
    stops = {stage.stop: number + 1 for number, stage in enumerate(plan)}
    if layers.start not in starts or layers.stop not in stops:
        return None
    return StageRange(starts[layers.start], stops[layers.stop])


@dataclass(frozen=True)
class StageHolder:
    """One node and the stages it holds or gets ready to hold.

    Leave out nodes that get ready for longer than a download may take: others count on them.
    """

    node_id: NodeId
    wallet_id: WalletId
    stages: StageRange
    is_ready: bool = True  # it can work; until then it fetches weights, and nothing is lost when it goes elsewhere
    windows: tuple[StageRange, ...] = ()  # the longest runs that it can hold, as far as known; (): any as long as now


@dataclass(frozen=True)
class StageCoverage:
    """The stages of a run and who holds them; a node counts once, with what was said of it last."""

    run_id: RunId
    stage_count: int
    holders: tuple[StageHolder, ...] = ()

    def __post_init__(self) -> None:
        by_node = {holder.node_id: holder for holder in self.holders if holder.stages.stop <= self.stage_count}
        object.__setattr__(self, "holders", tuple(by_node[node] for node in sorted(by_node)))

    @classmethod
    def of(cls, run_id: RunId, stage_count: int, holders: Iterable[StageHolder]) -> StageCoverage:
        """Coverage by these nodes; one that names stages which the plan does not have is left out."""
        return cls(run_id, stage_count, tuple(holders))

    def without(self, node_id: NodeId) -> StageCoverage:
        """The coverage as it is without this node."""
        return StageCoverage(self.run_id, self.stage_count, tuple(h for h in self.holders if h.node_id != node_id))

    def with_holder(self, holder: StageHolder) -> StageCoverage:
        """The coverage with this node where it says that it is."""
        return StageCoverage(self.run_id, self.stage_count, (*self.holders, holder))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """How many nodes hold each stage, those that get ready for it among them."""
        return self._count(self.holders)

    @cached_property
    def ready_replicas(self) -> tuple[int, ...]:
        """How many nodes can work on each stage."""
        return self._count(holder for holder in self.holders if holder.is_ready)

    @property
    def empty(self) -> tuple[int, ...]:
        """Stages that nobody holds or gets ready for: somebody must be found for them."""
        return tuple(stage for stage, count in enumerate(self.replicas) if count == 0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages that nobody can work on now: without them nothing is trained."""
        return tuple(stage for stage, count in enumerate(self.ready_replicas) if count == 0)

    def replicas_of(self, stage: int) -> tuple[NodeId, ...]:
        """The nodes that can work on a stage."""
        return tuple(holder.node_id for holder in self.holders if holder.is_ready and stage in holder.stages)

    def _count(self, holders: Iterable[StageHolder]) -> tuple[int, ...]:
        counts = Counter(stage for holder in holders for stage in holder.stages)
        return tuple(counts[stage] for stage in range(self.stage_count))


def missing_layers(coverage: StageCoverage, plan: StagePlan) -> tuple[LayerRange, ...]:
    """The layers that nobody can work on now, neighbouring stages as one range."""
    return layers_of(coverage.missing, plan)


def layers_of(stages: Iterable[int], plan: StagePlan) -> tuple[LayerRange, ...]:
    """The layers of these stages, given in order; neighbours as one range."""
    ranges: list[LayerRange] = []
    for stage in stages:
        layers = plan[stage]
        if ranges and ranges[-1].stop == layers.start:
            layers = LayerRange(ranges.pop().start, layers.stop)
        ranges.append(layers)
    return tuple(ranges)


def missing_sentence(missing: Iterable[LayerRange], what: str = "missing") -> str:
    """What to tell people of layers that are missing, or whatever `what` says, counted from 1; "" when none are."""
    layers = tuple(missing)
    if not layers:
        return ""
    *before, last = [layers_text(item) for item in layers]
    text = f"{', '.join(before)} and {last}" if before else last
    if len(layers) == 1 and len(layers[0]) == 1:
        return f"Layer {text} is {what}."
    return f"Layers {text} are {what}."


def layers_text(layers: LayerRange) -> str:
    """Layers as people count them, from 1."""
    first, last = layers.start + 1, layers.stop
    return str(first) if first == last else f"{first}-{last}"
