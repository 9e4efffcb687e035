"""The terms of a stage's rounds, their outcomes, and the outer step of each sync strategy. Pure.

A strategy object applies to one outer step of one stage. Its contribution is a vector (k,) of its own length; the
round itself does not interpret it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias, assert_never

import torch
from torch import Tensor

from neuroshard.aggregation import aggregator_config, aggregator_name
from neuroshard.compression import is_sparse, make_codec, next_residual
from neuroshard.config.run_parameters import InnerOptimization, OuterOptimization, RunParameters
from neuroshard.consensus.chain import ChainLedger, Standing, Step
from neuroshard.consensus.gradient_averaging import AveragingPhase, averaging_kept_length, factor_plan, first_state
from neuroshard.consensus.round_messages import Value
from neuroshard.consensus.vote_log import KEPT_STEPS, MOST_KEPT_STEPS
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.inner_optimizer import EagerAdamW, zero_moments
from neuroshard.optim.outer import (
    PLAIN_MEAN,
    SPARTA_SLICES,
    STREAMED_FRAGMENTS,
    CertifiedWork,
    Fragment,
    LineProgress,
    Nesterov,
    OuterState,
    candidates_at,
    fresh_outer_state,
    interval_at,
    interval_of_many,
    layered_fragment,
    nesterov_outer_step,
    strided_slice,
)
from neuroshard.state.stage_tensors import stage_tensors
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.types import Architecture, LayerRange, RunId, WalletId


def snapshot_layout(
    architecture: Architecture,
    layers: LayerRange,
    outer: OuterOptimization | None = None,
    inner: InnerOptimization | None = None,
) -> TensorLayout:
    """The layout of a stage's checkpoint in a run with this strategy and optimizer; None for the defaults."""
    with torch.device("meta"):
        model = StageModel(architecture, layers)
    optimizer = EagerAdamW(model.parameters())
    for parameter, moments in zero_moments(model, inner or InnerOptimization()).items():
        optimizer.state[parameter] = moments
    schema = TensorSchema.of(model)
    sizes = schema.total_size, kept_length(outer or OuterOptimization(), schema)
    anchor, kept = (torch.empty(size) for size in sizes)  # their memory is never touched
    return TensorLayout.of(stage_tensors(model, optimizer, OuterState(anchor, kept, 0)))


SPARTA_STEPS = 20  # between two rounds


class Exchanged(Protocol):
    """The vector that the members of a round exchange."""

    @property
    def terms(self) -> str:
        """The exchanged part as a part of the step's name; "" for the whole vector as a pseudo-gradient."""
        ...

    @property
    def length(self) -> int:
        """Length k of a contribution and of the aggregate."""
        ...


class OuterStep(Exchanged, Protocol):
    """One outer step of a stage whose vector has d numbers. No argument is changed in place."""

    @property
    def makes_weights_equal(self) -> bool:
        """Whether all replicas have the anchor as their weights after the step, until they train on."""
        ...

    @property
    def candidates(self) -> Sequence[Nesterov]:
        """The steps among which the seats choose by measurement, the plain mean first; or the only one."""
        ...

    def next_state(self, state: OuterState, aggregate: Tensor, choice: int) -> OuterState:
        """The state that an aggregate (k,) leads to with this choice: the same bytes on every replica."""
        ...

    def mean(self, state: OuterState, aggregate: Tensor) -> Tensor:
        """The weights (d,) that an aggregate (k,) represents by itself, without the outer step's momentum."""
        ...

    def next_weights(self, local: Tensor, before: OuterState, after: OuterState, included: Tensor | None) -> Tensor:
        """The weights (d,) after the step: a' + (w_now - w_sent), in the exchanged part.

        `included` (k,) is the distance from the old anchor of the work in the aggregate; None: up to `local`.
        """
        ...


class Strategy(OuterStep, Protocol):
    """An outer step after which each replica trains on from its own weights."""

    def contribution(self, state: OuterState, local: Tensor, residual: Tensor | None) -> Tensor:
        """The contribution (k,), from the weights (d,) and the codec's earlier error (d,)."""
        ...

    def kept_state(self, state: OuterState, local: Tensor) -> OuterState:
        """The state after a step of a lone node that keeps its weights (d,): the anchor moves there."""
        ...

    def included(self, contribution: Tensor, residual: Tensor | None) -> Tensor:
        """The distance covered by the work in a contribution (k,), without the residual (d,) that it carried."""
        ...

    def next_residual(self, residual: Tensor | None, contribution: Tensor, decoded: Tensor | None) -> Tensor | None:
        """The residual (d,) after a contribution (k,) was decoded by the others; None for none.

        `decoded` is None if the codec is exact, or the contribution was refused.
        """
        ...


@dataclass(frozen=True)
class FragmentStep:
    """DiLoCo's outer step on a fragment: on the whole vector, or streamed (Douillard et al. 2025).

    SPARTA's step is the same with the plain mean as the only candidate: the slice becomes the replicas' average.
    """

    fragment: Fragment
    candidates: tuple[Nesterov, ...] = (PLAIN_MEAN,)
    decay: float = 1.0  # of the codec's error
    terms: str = ""

    @property
    def length(self) -> int:
        return self.fragment.size

    @property
    def makes_weights_equal(self) -> bool:
        return self.fragment.is_whole

    def contribution(self, state: OuterState, local: Tensor, residual: Tensor | None) -> Tensor:
        """The pseudo-gradient anchor - local, plus the residual."""
        part = self.fragment.of
        moved = torch.sub(part(state.anchor), part(local))
        return moved if residual is None else torch.add(moved, part(residual))

    def next_state(self, state: OuterState, aggregate: Tensor, choice: int) -> OuterState:
        """The state after the chosen step, or the last candidate: there may be fewer than when it was chosen."""
        part, step = self.fragment.of, self.candidates[min(choice, len(self.candidates) - 1)]
        before = replace(state, anchor=part(state.anchor), velocity=part(state.velocity))
        after = nesterov_outer_step(before, aggregate, step.learning_rate, step.momentum)
        return replace(
            after,
            anchor=self.fragment.replaced(state.anchor, after.anchor),
            velocity=self.fragment.replaced(state.velocity, after.velocity),
        )

    def kept_state(self, state: OuterState, local: Tensor) -> OuterState:
        anchor = self.fragment.replaced(state.anchor, self.fragment.of(local))
        return replace(state, anchor=anchor, outer_step=state.outer_step + 1)

    def mean(self, state: OuterState, aggregate: Tensor) -> Tensor:
        return self.fragment.replaced(state.anchor, torch.sub(self.fragment.of(state.anchor), aggregate))

    def next_weights(self, local: Tensor, before: OuterState, after: OuterState, included: Tensor | None) -> Tensor:
        """The weights after the step; those of other fragments stay."""
        part = self.fragment.of
        agreed = part(after.anchor)
        if included is not None:
            agreed = agreed + (part(local) - (part(before.anchor) - included))
        return self.fragment.replaced(local, agreed)

    def included(self, contribution: Tensor, residual: Tensor | None) -> Tensor:
        return contribution if residual is None else contribution - self.fragment.of(residual)

    def next_residual(self, residual: Tensor | None, contribution: Tensor, decoded: Tensor | None) -> Tensor | None:
        """The residual after the step; that of other fragments waits for their turn."""
        lost = next_residual(contribution, decoded, self.decay)
        if self.fragment.is_whole or (lost is None and residual is None):
            return lost
        if lost is None:
            lost = torch.zeros(self.length)
        return self.fragment.replaced(torch.zeros(self.fragment.length) if residual is None else residual, lost)


@lru_cache(maxsize=4)  # called for every answer of a stage
def strategy_at(parameters: OuterOptimization, schema: TensorSchema, outer_step: int, certified_steps: int) -> Strategy:
    """The strategy of one outer step of a stage whose replicas train their own weights.

    `certified_steps` are the line's inner steps per member, from which the candidates follow. Raises ValueError for a
    stage with fewer numbers than fragments, and for gradient averaging.
    """
    length, codec = schema.total_size, make_codec(parameters.codec)
    # numbers that a sparse codec holds back would count in the velocity and in the residual
    momentum = 0.0 if is_sparse(codec) else parameters.momentum
    is_measured = parameters.choice == "measured"
    candidates = candidates_at(certified_steps, parameters.learning_rate, momentum, measured=is_measured)
    match parameters.strategy:
        case "diloco":
            return FragmentStep(Fragment.whole(length), candidates, codec.residual_decay)
        case "streaming":
            index = outer_step % STREAMED_FRAGMENTS
            fragment, terms = layered_fragment(length, schema.layers, index), f"streaming {index}/{STREAMED_FRAGMENTS}"
            return FragmentStep(fragment, candidates, codec.residual_decay, terms)
        case "sparta":
            index = outer_step % SPARTA_SLICES
            terms = f"sparta {index}/{SPARTA_SLICES}"
            return FragmentStep(strided_slice(length, index), decay=codec.residual_decay, terms=terms)
        case "averaging":
            raise ValueError("replicas that average their gradients do not train apart: see GradientAveraging")
        case _:
            assert_never(parameters.strategy)


def certified_lead(value: Value, line: LineProgress, parameters: RunParameters, schema: TensorSchema) -> float | None:
    """Velocities between the anchor that a value leads to and the mean of its members' weights, see `replica_mean`.

    `line` is that of the state after the value, `parameters` are those of its outer step. None: the value is
    not a mean of all weights, so the anchor is the best model that it proves.
    """
    if value.round_id is None or len(value.members) < 2 or parameters.outer.strategy == "averaging":
        return None
    certified_steps = max(0, line.sequences - value.sequences) // parameters.sequences_per_step
    strategy = strategy_at(parameters.outer, schema, value.outer_step - 1, certified_steps)
    step = strategy.candidates[min(line.choice, len(strategy.candidates) - 1)]
    return step.momentum if strategy.makes_weights_equal and step.learning_rate == 1 else None


def parts_of(parameters: OuterOptimization) -> int:
    """Number of outer steps after which every part of the vector has had its turn."""
    match parameters.strategy:
        case "diloco":
            return 1
        case "streaming":
            return STREAMED_FRAGMENTS
        case "sparta":
            return SPARTA_SLICES
        case "averaging":  # the two phases of a gradient
            return 2
        case _:
            assert_never(parameters.strategy)


def part_at(parameters: OuterOptimization, schema: TensorSchema, outer_step: int) -> str:
    """The part of a stage's state in one outer step, for people."""
    match parameters.strategy:
        case "diloco":
            return "all weights"
        case "streaming":
            return f"quarter {outer_step % STREAMED_FRAGMENTS + 1} of {STREAMED_FRAGMENTS}"
        case "sparta":
            return f"slice {outer_step % SPARTA_SLICES + 1} of {SPARTA_SLICES}"
        case "averaging":
            return AveragingPhase.at(factor_plan(parameters, schema), outer_step).words
        case _:
            assert_never(parameters.strategy)


def sequences_to_round(
    parameters: OuterOptimization, schema: TensorSchema, state: OuterState, sequences_per_step: int, members: int
) -> int:
    """Sequences that this number of members must train together before the round from this state is due."""
    if parameters.strategy == "averaging":  # a second phase follows the first one at once
        is_second = AveragingPhase.at(factor_plan(parameters, schema), state.outer_step).is_second
        return 1 if is_second else parameters.averaged_sequences
    return steps_between_rounds(parameters, state.line, sequences_per_step, members) * sequences_per_step * members


def kept_length(parameters: OuterOptimization, schema: TensorSchema) -> int:
    """Number of values in the outer state of a stage in addition to the anchor."""
    if parameters.strategy == "averaging":
        return averaging_kept_length(factor_plan(parameters, schema))
    return schema.total_size


def first_outer_state(parameters: OuterOptimization, schema: TensorSchema, anchor: Tensor) -> OuterState:
    """The state of a stage before its first round, from these weights (d,)."""
    if parameters.strategy == "averaging":
        return first_state(factor_plan(parameters, schema), anchor)
    return fresh_outer_state(anchor)


def grows_interval(parameters: OuterOptimization) -> bool:
    """Whether rounds of several members begin with short intervals."""
    return parameters.interval == "growing" and parameters.strategy in {"diloco", "streaming"}


def steps_between_rounds(
    parameters: OuterOptimization, line: LineProgress, sequences_per_step: int, members: int
) -> int:
    """Inner steps after which the next round of this number of members is due; for one member, the longest interval.

    More than four members meet more often. On slow connections rounds are rarer, so that an exchange takes at most
    `round_share` of the time.
    """
    interval, least = parameters.inner_steps, 1
    if members > 1 and grows_interval(parameters):
        interval = interval_of_many(interval_at(line.sequences // sequences_per_step, interval), members)
        least = line.least_interval(sequences_per_step, parameters.round_share, parameters.max_round_seconds)
    match parameters.strategy:
        case "diloco":
            return max(interval, least)
        case "streaming":  # each fragment has its turn after the interval
            return max(1, interval // parts_of(parameters), least)
        case "sparta":
            return min(SPARTA_STEPS, parameters.inner_steps)
        case "averaging":  # the number follows from `averaged_sequences`
            return 1
        case _:
            assert_never(parameters.strategy)


# Terms and outcomes of the rounds


@dataclass(frozen=True)
class Agreed:
    """The outcome of a round that completed."""

    aggregate: Tensor  # (k,)
    members: int  # including this node
    # (k,), this node's contribution as the others decoded it; None if it is exact or was refused
    sent: Tensor | None = None
    # (k,), this node's contribution in the aggregate, if training continued since it was made
    late_for: Tensor | None = None
    is_certified: bool = False  # by the committee: all members take the certified state
    is_without_own: bool = False  # completed without this node, whose work waits for the next round
    work: CertifiedWork | None = None  # as the certificate states; None: without one, the work of this node counts
    offered: int | None = None  # sequences whose work is in `late_for`; None: all of them
    completes: int | None = None  # number of the outer step; None: the one that follows this replica's state


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
    versions: Callable[[int], RunParameters] | None = None  # by outer step; None: `parameters` apply throughout

    def step(self, outer_step: int, root: str, standing: Standing, ledger: ChainLedger, owner: WalletId) -> Step:
        """The height that completes this outer step, from the state with this root."""
        parameters = self.parameters_at(outer_step)
        codec, aggregator = make_codec(parameters.codec).name, aggregator_name(aggregator_config(parameters))
        # the format of contributions: the schema, and the strategy's terms where they restrict it
        vector = f"{self.schema.sha256} {self.exchanged_at(outer_step).terms}".rstrip()
        terms = f"{codec} {aggregator} {vector}"
        return Step(self.run_id, self.stage, outer_step, root, terms, standing, ledger, owner)

    def exchanged_at(self, outer_step: int) -> Exchanged:
        """The exchange of the round that completes this outer step."""
        parameters = self.parameters_at(outer_step)
        if parameters.strategy == "averaging":
            return AveragingPhase.at(factor_plan(parameters, self.schema), outer_step)
        return strategy_at(parameters, self.schema, outer_step, 0)  # whatever the momentum, the exchange is the same

    def kept_steps(self, outer_step: int, saved: int) -> int:
        """Number of ended steps to keep from this one on: as many bytes as KEPT_STEPS whole aggregates.

        Those since the newest checkpoint, of outer step `saved`, are kept as well. So if all members are killed at
        once, each of them reaches the newest state from its own disk.
        """
        since = min(outer_step + 1 - saved, MOST_KEPT_STEPS)
        return max(KEPT_STEPS * parts_of(self.parameters_at(outer_step)), since)

    def parameters_at(self, outer_step: int) -> OuterOptimization:
        """The parameters of the round that completes this outer step."""
        return self.parameters if self.versions is None else self.versions(outer_step).outer
