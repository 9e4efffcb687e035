"""What the rounds of one stage of a run are about, and the round of a node that meets nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import anyio.to_thread
from torch import Tensor

from neuroshard.aggregation import Refusal, aggregator_config, aggregator_name
from neuroshard.aggregation.sums import dot_product
from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.model.tensor_schema import TensorSchema
from neuroshard.swarm.certified.roster import Roster, Step
from neuroshard.training.outer_sync import Abandoned, Agreed
from neuroshard.training.rounds.vote_book import KEPT_STEPS
from neuroshard.training.strategy import Exchanged, exchanged_at, part_at, parts_of, sequences_to_round
from neuroshard.types import RunId


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
    """See Exchange; the round of a node that meets nobody, which has nothing to agree on with itself.

    Nothing travels, so no codec loses anything. What the gates of a group refuse whatever the others send comes to
    nothing here, too.
    """
    del outer_step
    square = await anyio.to_thread.run_sync(dot_product, contribution, contribution)
    if isfinite(square) and square > 0:
        return Agreed(contribution, 1)
    refusal = Refusal.ZERO if square == 0 else Refusal.NOT_FINITE
    return Abandoned(f"no contribution was accepted: {refusal}")
