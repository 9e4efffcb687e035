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
from neuroshard.consensus.sync_strategies import Exchanged, exchanged_at, part_at, parts_of
from neuroshard.consensus.vote_log import KEPT_STEPS
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.outer import CertifiedWork
from neuroshard.types import RunId


@dataclass(frozen=True)
class Agreed:
    """The outcome of a round that completed."""

    aggregate: Tensor  # (k,)
    members: int  # including this node
    # (k,), this node's contribution as the others decoded it; None if it is exact or was refused
    sent: Tensor | None = None
    # (k,), this node's contribution in the aggregate, if training continued since it was made
    late_for: Tensor | None = None
    is_without_own: bool = False  # completed without this node, whose work waits for the next round
    work: CertifiedWork | None = None  # as the certificate states; None: without one, the work of this node counts
    offered: int | None = None  # sequences whose work is in `late_for`; None: all of them


@dataclass(frozen=True)
class Abandoned:
    """The outcome of a round that did not complete."""

    reason: str
    is_soon_again: bool = False  # what was counted towards it still counts


@dataclass(frozen=True)
class UnderWay:
    """The round continues during the next inner steps; a later exchange returns its outcome."""


Outcome: TypeAlias = Agreed | Abandoned | UnderWay


RunRound: TypeAlias = Callable[[Tensor, int], Awaitable[Outcome]]
"""Runs the round of one outer step with the group: takes the own contribution (k,) and the outer step."""


@dataclass(frozen=True)
class StageRounds:
    """The properties that all rounds of one stage share."""

    run_id: RunId
    stage: int
    schema: TensorSchema
    parameters: OuterOptimization
    versions: Callable[[int], OuterOptimization] | None = None  # by outer step; None: `parameters` apply throughout

    def step(self, outer_step: int, root: str, voters: Roster, *, is_open: bool) -> Step:
        """The certified round that completes this outer step, from the state with this root."""
        parameters = self.parameters_at(outer_step)
        codec, aggregator = make_codec(parameters.codec).name, aggregator_name(aggregator_config(parameters))
        terms = f"{codec} {aggregator} {self._vector(outer_step)}"
        return Step(self.run_id, self.stage, outer_step, root, terms, voters, is_open)

    def exchanged_at(self, outer_step: int) -> Exchanged:
        """The exchange of the round that completes this outer step."""
        return exchanged_at(self.parameters_at(outer_step), self.schema, outer_step)

    def part_at(self, outer_step: int) -> str:
        """The same as a description for people."""
        return part_at(self.parameters_at(outer_step), self.schema, outer_step)

    def kept_steps(self, outer_step: int) -> int:
        """Number of ended steps to keep from this one on: as many bytes as KEPT_STEPS whole aggregates."""
        return KEPT_STEPS * parts_of(self.parameters_at(outer_step))

    def _vector(self, outer_step: int) -> str:
        """A name for the format of contributions: the schema, and the strategy's terms where they restrict it."""
        return f"{self.schema.sha256} {self.exchanged_at(outer_step).terms}".rstrip()

    def parameters_at(self, outer_step: int) -> OuterOptimization:
        """The parameters of the round that completes this outer step."""
        return self.parameters if self.versions is None else self.versions(outer_step)


async def lone_exchange(contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
    """Run the round of a node without peers, which has no agreement to reach; implements RunRound.

    Nothing travels, so no codec loses anything. A contribution that the gates of a group always refuse is refused
    here as well.
    """
    del outer_step
    square = await anyio.to_thread.run_sync(dot_product, contribution, contribution)
    if isfinite(square) and square > 0:
        return Agreed(contribution, 1)
    refusal = RejectionReason.ZERO if square == 0 else RejectionReason.NOT_FINITE
    return Abandoned(f"no contribution was accepted: {refusal}")
