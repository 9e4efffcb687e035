"""Where members bring their contributions to, and all get the aggregate that a round would agree on."""

from __future__ import annotations

import anyio
from torch import Tensor

from neuroshard.consensus.effects import Judge, MakeStatistics, Reduce
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.stage_rounds import Agreed, StageRounds


class MeetingPlace:
    """For one round after the other, each with the same number of members that did the same work."""

    def __init__(self, rounds: StageRounds, members: int) -> None:
        self._rounds = rounds
        self._members = members
        self._brought = list[Tensor]()
        self._met = anyio.Event()
        self._aggregate: Tensor | None = None

    async def exchange(self, contribution: Tensor, outer_step: int) -> Agreed:
        """See Exchange: waits for the others."""
        self._brought.append(contribution)
        met = self._met
        if len(self._brought) == self._members:
            self._aggregate = self._aggregated(outer_step)
            self._brought, self._met = [], anyio.Event()
            met.set()
        await met.wait()
        assert self._aggregate is not None
        return Agreed(self._aggregate, self._members)

    def _aggregated(self, outer_step: int) -> Tensor:
        length = self._rounds.exchanged_at(outer_step).length
        work = RoundWork.of(self._rounds.parameters_at(outer_step), length)
        parts = [work.encoded(contribution) for contribution in self._brought]
        rows = {index: [part[index] for part in parts] for index in range(work.plan.count)}
        statistics = list(work.statistics(MakeStatistics("round", rows)).values())
        judged = work.judged(Judge("round", statistics, frozenset(), [1] * self._members))
        assert judged.reduction is not None, judged.abort_reason
        reduced = work.reduced(Reduce("round", rows, judged.reduction))
        return work.decoded([reduced[index] for index in range(work.plan.count)])
