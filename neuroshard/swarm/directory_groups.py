"""Where nodes of a run are found in the directory: one namespace for every few stages, all of them asked in turn. Pure.

Who does not know yet how many stages a run has finds the nodes of its first group, and by them the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.model.stage_plan import StagePlan
from neuroshard.types import LayerRange, RunId

STAGES_OF_GROUP = 8
GROUPS_OF_LOOK = 4  # that a node asks at a time
MOST_GROUPS_OF_NODE = 16  # in which one node can be found; a keeper takes few records of one node


def directory_namespace(run_id: RunId, group: int = 0) -> str:
    """Where the nodes of one group of a run are found."""
    return f"{run_id}/{group}"


@dataclass(frozen=True)
class DirectoryGroups:
    """The groups of one run; a run of few stages has one."""

    run_id: RunId
    plan: StagePlan

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-len(self.plan) // STAGES_OF_GROUP)

    def of(self, layers: LayerRange | None) -> tuple[str, ...]:
        """The namespaces in which a node with these layers is to be found: without any, in the first."""
        stages = (stage for stage, held in enumerate(self.plan) if layers is not None and _overlap(held, layers))
        groups = sorted({stage // STAGES_OF_GROUP for stage in stages})[:MOST_GROUPS_OF_NODE]
        return tuple(directory_namespace(self.run_id, group) for group in groups or (0,))

    def asked(self, look: int) -> tuple[str, ...]:
        """The namespaces to ask in one of a node's looks, 0, 1, 2, ...: a few, so that each has its turn."""
        groups = range(look * GROUPS_OF_LOOK, look * GROUPS_OF_LOOK + min(GROUPS_OF_LOOK, self.count))
        return tuple(directory_namespace(self.run_id, group % self.count) for group in groups)


def _overlap(a: LayerRange, b: LayerRange) -> bool:
    return a.start < b.stop and b.start < a.stop
