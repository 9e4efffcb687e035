"""The holders of each stage of a run, the replicas of a stage, and the layers without a holder. Pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.model.architecture import StagePlan
from neuroshard.types import MAX_LAYERS, LayerRange, NodeId, Role, RunId, WalletId


class StageRange(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
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
        """The range for people, who count from 1: "stage 2", "stages 2 to 3"."""
        first, last = self.start + 1, self.stop
        return f"stage {first}" if first == last else f"stages {first} to {last}"

    def covers(self, other: StageRange) -> bool:
        """Return whether every stage of the other range is in this one."""
        return self.start <= other.start and other.stop <= self.stop

    def roles(self, stage_count: int) -> tuple[Role, ...]:
        """Return the roles of a node with these stages: the first one drives, the last one validates, others work."""
        return LayerRange(self.start, self.stop).roles(stage_count)

    def layers(self, plan: StagePlan) -> LayerRange:
        """Return the layers of these stages. Raises ValueError for stages that the plan does not have."""
        if self.stop > len(plan):
            raise ValueError(f"stages {self.start}..{self.stop} of a plan with {len(plan)} stages")
        return LayerRange(plan[self.start].start, plan[self.stop - 1].stop)


def stages_of(layers: LayerRange, plan: StagePlan) -> StageRange | None:
    """Return the stages that consist of these layers, or None if the layers begin or end within a stage."""
    starts = {stage.start: number for number, stage in enumerate(plan)}
    stops = {stage.stop: number + 1 for number, stage in enumerate(plan)}
    if layers.start not in starts or layers.stop not in stops:
        return None
    return StageRange(starts[layers.start], stops[layers.stop])


@dataclass(frozen=True)
class StageHolder:
    """One node and the stages that it holds or prepares to hold.

    Leave out nodes that prepare for longer than a download may take, because others rely on them.
    """

    node_id: NodeId
    wallet_id: WalletId
    stages: StageRange
    is_ready: bool = True  # it can work; before that it fetches weights, and loses nothing by moving
    windows: tuple[StageRange, ...] = ()  # the longest known runs that it can hold; (): any of the present length


@dataclass(frozen=True)
class StageCoverage:
    """The stages of a run and the nodes that hold them. A node counts once, with its last entry."""

    run_id: RunId
    stage_count: int
    holders: tuple[StageHolder, ...] = ()

    def __post_init__(self) -> None:
        by_node = {holder.node_id: holder for holder in self.holders if holder.stages.stop <= self.stage_count}
        object.__setattr__(self, "holders", tuple(by_node[node] for node in sorted(by_node)))

    @classmethod
    def of(cls, run_id: RunId, stage_count: int, holders: Iterable[StageHolder]) -> StageCoverage:
        """Return the coverage by these nodes, without those that name stages that the plan does not have."""
        return cls(run_id, stage_count, tuple(holders))

    def without(self, node_id: NodeId) -> StageCoverage:
        """Return the coverage without this node."""
        return StageCoverage(self.run_id, self.stage_count, tuple(h for h in self.holders if h.node_id != node_id))

    def with_holder(self, holder: StageHolder) -> StageCoverage:
        """Return the coverage with this node at the given stages, in place of its earlier entry."""
        return StageCoverage(self.run_id, self.stage_count, (*self.holders, holder))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Number of nodes that hold each stage or prepare to."""
        return self._count(self.holders)

    @cached_property
    def ready_replicas(self) -> tuple[int, ...]:
        """Number of nodes that can work on each stage."""
        return self._count(holder for holder in self.holders if holder.is_ready)

    @property
    def empty(self) -> tuple[int, ...]:
        """Stages that no node holds or prepares to hold."""
        return tuple(stage for stage, count in enumerate(self.replicas) if count == 0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages that no node can work on now; training stops without them."""
        return tuple(stage for stage, count in enumerate(self.ready_replicas) if count == 0)

    def replicas_of(self, stage: int) -> tuple[NodeId, ...]:
        """Return the nodes that can work on a stage now."""
        return tuple(holder.node_id for holder in self.holders if holder.is_ready and stage in holder.stages)

    def _count(self, holders: Iterable[StageHolder]) -> tuple[int, ...]:
        counts = Counter(stage for holder in holders for stage in holder.stages)
        return tuple(counts[stage] for stage in range(self.stage_count))


def missing_layers(coverage: StageCoverage, plan: StagePlan) -> tuple[LayerRange, ...]:
    """Return the layers that no node can work on now, with neighbouring stages joined."""
    return layers_of(coverage.missing, plan)


def layers_of(stages: Iterable[int], plan: StagePlan) -> tuple[LayerRange, ...]:
    """Return the layers of stages that are given in ascending order; neighbours are joined to one range."""
    ranges: list[LayerRange] = []
    for stage in stages:
        layers = plan[stage]
        if ranges and ranges[-1].stop == layers.start:
            layers = LayerRange(ranges.pop().start, layers.stop)
        ranges.append(layers)
    return tuple(ranges)


def missing_sentence(missing: Iterable[LayerRange], what: str = "missing") -> str:
    """Return a sentence about layers, counted from 1, that are missing or as `what` says; "" if there are none."""
    layers = tuple(missing)
    if not layers:
        return ""
    *before, last = [layers_text(item) for item in layers]
    text = f"{', '.join(before)} and {last}" if before else last
    if len(layers) == 1 and len(layers[0]) == 1:
        return f"Layer {text} is {what}."
    return f"Layers {text} are {what}."


def layers_text(layers: LayerRange) -> str:
    """Return the layers as people count them, from 1: "3" or "3-5"."""
    first, last = layers.start + 1, layers.stop
    return str(first) if first == last else f"{first}-{last}"
