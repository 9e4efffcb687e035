"""Terms and outcomes of the rounds of one stage of a run, and the round of a node without peers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

import anyio.to_thread
from torch import Tensor

from neuroshard.aggregation import RejectionReason, aggregator_config, aggregator_name
from neuroshard.aggregation.slices import dot_product
from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.roster import Roster, Step
from neuroshard.consensus.sync_strategies import Exchanged, exchanged_at, part_at, parts_of, sequences_to_round
from neuroshard.consensus.vote_log import KEPT_STEPS
from neuroshard.model.weights import TensorSchema
from neuroshard.types import RunId


@dataclass(frozen=True)
class Agreed:
    """A round that completed."""

    aggregate: Tensor  # (k,)
    members: int  # this node included
    sent: Tensor | None = None  # (k,), the own contribution as the others decoded it; None: nothing is lost, or refused
    late_for: Tensor | None = None  # (k,), the own contribution of earlier that is in it, when training went on since
    is_without_own: bool = False  # it was agreed on without this node, whose work waits for the next round
    sequences: int | None = None  # that a member trained on since the round before; None: as many as this node
    offered: int | None = None  # sequences whose work `late_for` holds; None: all of them


@dataclass(frozen=True)
class Abandoned:
    """A round that completed nowhere."""

    reason: str
    is_soon_again: bool = False  # what was counted towards it still counts


@dataclass(frozen=True)
class UnderWay:
    """A round that goes on beside the next inner steps; another exchange tells how it has ended."""


Outcome: TypeAlias = Agreed | Abandoned | UnderWay


RunRound: TypeAlias = Callable[[Tensor, int], Awaitable[Outcome]]
"""Runs the round of one outer step with the group: takes the own contribution (k,) and the outer step."""


@dataclass(frozen=True)
class StageRounds:
    """What all rounds of one stage have in common."""

    run_id: RunId
    stage: int
    schema: TensorSchema
    parameters: OuterOptimization
    versions: Callable[[int], OuterOptimization] | None = None  # by outer step; None: `parameters` hold all the time

    def step(self, outer_step: int, root: str, voters: Roster, *, is_open: bool) -> Step:
        """The certified round that ends this outer step, from the state of this root."""
        parameters = self.parameters_at(outer_step)
        codec, aggregator = make_codec(parameters.codec).name, aggregator_name(aggregator_config(parameters))
        terms = f"{codec} {aggregator} {self._vector(outer_step)}"
        return Step(self.run_id, self.stage, outer_step, root, terms, voters, is_open)

    def exchanged_at(self, outer_step: int) -> Exchanged:
        """What is exchanged in the round that ends this outer step."""
        return exchanged_at(self.parameters_at(outer_step), self.schema, outer_step)

    def part_at(self, outer_step: int) -> str:
        """The same, for people."""
        return part_at(self.parameters_at(outer_step), self.schema, outer_step)

    def sequences_before(self, outer_step: int, sequences_per_step: int, members: int) -> int:
        """Once so many members have done so many sequences together, the round that ends this outer step is due."""
        return sequences_to_round(self.parameters_at(outer_step), self.schema, outer_step, sequences_per_step, members)

    def kept_steps(self, outer_step: int) -> int:
        """How many steps' ends are kept from this one on: as many bytes as those of KEPT_STEPS whole aggregates."""
        return KEPT_STEPS * parts_of(self.parameters_at(outer_step))

    def _vector(self, outer_step: int) -> str:
        """Names what contributions are: the schema, and the strategy's terms where these are not all of it."""
        return f"{self.schema.sha256} {self.exchanged_at(outer_step).terms}".rstrip()

    def parameters_at(self, outer_step: int) -> OuterOptimization:
        """Those that hold for the round that ends this outer step."""
        return self.parameters if self.versions is None else self.versions(outer_step)


async def lone_exchange(contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
    """See RunRound; the round of a node that meets nobody, which has nothing to agree on with itself.

    Nothing travels, so no codec loses anything. What the gates of a group refuse whatever the others send comes to
    nothing here, too.
    """
    del outer_step
    square = await anyio.to_thread.run_sync(dot_product, contribution, contribution)
    if isfinite(square) and square > 0:
        return Agreed(contribution, 1)
    refusal = RejectionReason.ZERO if square == 0 else RejectionReason.NOT_FINITE
    return Abandoned(f"no contribution was accepted: {refusal}")
