"""What a node tells of its data beside its own feed: what is new at the source, and what the swarm holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from neuroshard.data.assignment import copies_by_cell, covered_shard_count
from neuroshard.data.source_monitor import SourceMonitor
from neuroshard.membership.swarm_view import GlobalView
from neuroshard.node.society import Society
from neuroshard.status.data import DataCoverage, DataStatus
from neuroshard.types import NodeId, ShardRange

COVERAGE_SECONDS = 2.0  # between two; adding up the reports of a thousand nodes takes some milliseconds


class DataView:
    """Completes the status of the data."""

    def __init__(
        self,
        watch: SourceMonitor,
        society: Society,
        total_shards: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._society = society
        self._total_shards = total_shards
        self._clock = clock
        self._coverage: DataCoverage | None = None
        self._looked_at = float("-inf")

    def completed(self, data: DataStatus) -> DataStatus:
        """The status with what is known here."""
        participant, now = self._society.participant, self._clock()
        if participant is not None and now - self._looked_at >= COVERAGE_SECONDS:
            membership = participant.membership
            self._coverage = coverage_of(membership.view, membership.node_id, data.shared, self._total_shards)
            self._looked_at = now
        return replace(data, refresh=self._watch.status, coverage=self._coverage)


def coverage_of(view: GlobalView, node_id: NodeId, own: Sequence[ShardRange], total_shards: int) -> DataCoverage:
    """Which shards the nodes of a run have: `own` are those of this node now, the others' are in their reports."""
    others = (member.report.cached for node, member in view.members.items() if node != node_id)
    held = [ranges for ranges in (own, *others) if ranges]
    return DataCoverage(len(held), covered_shard_count(held, total_shards), copies_by_cell(held, total_shards))
