"""Binds the swarm's sync round to one stage of a run, for a group of one as for several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from neuroshard.aggregation import aggregator_config
from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.model.tensor_schema import TensorSchema
from neuroshard.swarm.certified.roster import Roster, Step
from neuroshard.swarm.group import Group, RoundDescriptor, aggregator_name
from neuroshard.swarm.outcome import Aborted, Completed
from neuroshard.swarm.round import Messenger, NobodyElse, run_round
from neuroshard.training.outer_sync import Abandoned, Agreed, Exchange
from neuroshard.training.rounds.vote_book import KEPT_STEPS
from neuroshard.training.strategy import Exchanged, exchanged_at, part_at, parts_of, sequences_to_round
from neuroshard.types import NodeId, RunId

ROUND_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class StageRounds:
    """What all rounds of one stage have in common."""

    run_id: RunId
    stage: int
    schema: TensorSchema
    parameters: OuterOptimization
    versions: Callable[[int], OuterOptimization] | None = None  # by outer step; None: `parameters` hold all the time

    def descriptor(self, outer_step: int, view: int, aggregator: str) -> RoundDescriptor:
        """Of the round that ends this outer step; `view` counts those of it that were abandoned."""
        codec, vector = make_codec(self.parameters_at(outer_step).codec), self._vector(outer_step)
        return RoundDescriptor(self.run_id, self.stage, outer_step, codec.name, aggregator, vector, view)

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


def group_exchange(
    messenger: Messenger,
    rounds: StageRounds,
    group: Callable[[], Group],
    deadline_seconds: float = ROUND_DEADLINE_SECONDS,
) -> Exchange:
    """Rounds with whoever `group` names when one begins. Aborted rounds of an outer step are told apart by a view."""
    views: dict[int, int] = {}

    async def exchange(contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
        parameters = rounds.parameters_at(outer_step)
        config, codec = aggregator_config(parameters), make_codec(parameters.codec)
        view = views.get(outer_step, 0)
        views.clear()
        outcome = await run_round(
            messenger,
            rounds.descriptor(outer_step, view, aggregator_name(config)),
            group(),
            contribution,
            aggregator=config,
            codec=codec,
            deadline_seconds=deadline_seconds,
        )
        match outcome:
            case Completed(aggregate=aggregate, members=members):
                return Agreed(aggregate, len(members))
            case Aborted(reason=reason):
                views[outer_step] = view + 1
                return Abandoned(reason)

    return exchange


def lone_exchange(node_id: NodeId, rounds: StageRounds) -> Exchange:
    """The rounds of a node that knows nobody: the same code, and no messages."""
    return group_exchange(NobodyElse(), rounds, lambda: Group.alone(node_id))
