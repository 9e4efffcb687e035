"""Who knows of whom in a swarm whose clocks differ: signed reports, taken in by the node's own rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import anyio
from msgspec.structs import replace
from replica_world import IDENTITIES, RUN

from neuroshard.membership.claim_intake import REPORT_RULES, ClaimCache, ClaimIntake, Statement, signed_report
from neuroshard.membership.reports import TrainingReport
from neuroshard.types import NodeId
from tests.swarm.claim_samples import REPORT

KEPT_SECONDS = 60.0  # a silent node is known


class HeardReports:
    """What the nodes of one swarm have heard from each other."""

    def __init__(self) -> None:
        self._cache = ClaimCache(REPORT_RULES)
        self._intakes: dict[NodeId, ClaimIntake[TrainingReport]] = {}
        self._heard: dict[NodeId, dict[NodeId, float]] = {}  # when, by listener and speaker
        self._clocks: dict[NodeId, Callable[[], float]] = {}
        self._told = 0

    def begin(self, node: NodeId, now: Callable[[], float]) -> None:
        """A node starts; `now` is its clock, in seconds since 1970."""
        self._clocks[node] = now
        self._intakes[node] = ClaimIntake(REPORT_RULES, RUN, now, self._cache)
        self._heard[node] = {}

    def tell(self, nodes: Iterable[NodeId]) -> None:
        """All of these report, and hear each other."""
        listeners = sorted(nodes)
        for speaker in listeners:
            self._told += 1
            report = replace(REPORT, run_id=RUN, sequence=self._told)
            said = signed_report(IDENTITIES[speaker], report, self._clocks[speaker]())
            for listener in listeners:
                if listener != speaker and isinstance(self._intakes[listener].take(said, speaker), Statement):
                    self._heard[listener][speaker] = anyio.current_time()

    def known(self, listener: NodeId, there: Collection[NodeId]) -> list[NodeId]:
        """Those of them whom a node has heard lately."""
        since = anyio.current_time() - KEPT_SECONDS
        return sorted(node for node, at in self._heard[listener].items() if node in there and at >= since)
