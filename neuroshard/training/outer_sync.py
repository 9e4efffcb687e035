"""Inner steps, then one round on the vector of the sync strategy. A node without peers runs a round of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import assert_never

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from neuroshard.config.run_parameters import OuterOptimization, RunParameters, StrategyName
from neuroshard.consensus.sync_strategies import (
    Abandoned,
    Agreed,
    OuterStep,
    RunRound,
    Strategy,
    grows_interval,
    part_at,
    sequences_to_round,
    steps_between_rounds,
    strategy_at,
)
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.outer import MOST_CANDIDATES, CertifiedWork, LineProgress, OuterState
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.arithmetic import Executor
from neuroshard.pipeline.executor import ComputeThread, Priority, StepResult
from neuroshard.state.outer_state import OuterProgress, round_is_due, state_root
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.stage_tensors import without_values
from neuroshard.status.snapshot import DilocoStatus
from neuroshard.waiting import Signal

_LOG = logging.getLogger(__name__)

BRANCH_WARMUP_STEPS = 20  # inner steps of a branch: its moments begin at zero

_PARTS: Mapping[StrategyName, str] = {  # what a round was about, where it was not about all weights
    "diloco": "",
    "streaming": " and a quarter of the weights",
    "sparta": " and a twentieth of the weights",
    "averaging": " and a gradient",
}


def keeps_weights(agreed: Agreed, parameters: OuterOptimization) -> bool:
    """Whether a completed round keeps the weights and moves the anchor to them. Only a lone node may do this.

    A lone Nesterov step overshoots: it extrapolates beyond weights that no other node has corrected.
    """
    if agreed.is_certified or agreed.members > 1:
        return False
    match parameters.lone_outer:
        case "keep":
            return True
        case "apply":
            return False
        case _:
            assert_never(parameters.lone_outer)


def included_work(agreed: Agreed, strategy: Strategy, residual: Tensor | None) -> Tensor | None:
    """Part of this node's own work (k,) that the aggregate includes; None for all of it.

    `residual` (d,) is the part of the previous contribution that the contribution `late_for` included.
    """
    if agreed.is_without_own:
        return torch.zeros(strategy.length)
    return None if agreed.late_for is None else strategy.included(agreed.late_for, residual)


class OuterSync:
    """Owns the outer state of one stage and changes it in one place, when a round has completed."""

    def __init__(
        self,
        *,
        compute: ComputeThread,
        executor: Executor,
        versions: Callable[[int], RunParameters],
        state: OuterState,
        residual: Tensor | None = None,
        progress: OuterProgress | None = None,
        branched_at: int | None = None,
    ) -> None:
        """`versions` returns the version of the run's parameters that applies at an outer step.

        `branched_at` is the certified number of sequences at which the line began with new moments.
        """
        self._compute = compute
        self._executor = executor
        self._schema = TensorSchema.of(executor.model)
        self._versions = versions
        self._branched_at = branched_at
        self.state = state  # read it anywhere; only `replace_state` changes its values
        self._changes = 0  # of the state's values; dropping them does not count
        self._root_of: int | None = None  # value of `_changes` for which the root was computed
        self.state_changed = Signal()
        self.residual = residual  # (d,), codec loss of the last contribution; replaced, never changed in place
        self.progress = progress or OuterProgress()
        self.is_dropped = False  # whether only a checkpoint has the state

    def replace_state(self, state: OuterState) -> None:
        """Continue from a state with other values, and report the change."""
        self.state = state
        self._changes += 1
        self.state_changed.notify()

    @property
    def parameters(self) -> RunParameters:
        """Version of the run's parameters that applies at the present outer step."""
        return self._versions(self.state.outer_step)

    @property
    def strategy(self) -> OuterStep:
        """Strategy of the present outer step."""
        return strategy_at(self.parameters.outer, self._schema, self.state.outer_step, self.certified_steps)

    @property
    def steps_with_the_group(self) -> bool:
        """Whether gradients wait for a step of all replicas. Then no gradient of old weights may enter the next one."""
        return False

    def measured_candidates(self) -> int:
        """Number of candidates for the next outer step that the seats measure; 1 if none of them measures any."""
        count = len(self.strategy.candidates)
        return count if count > 1 and self.state.line.needs_choice else 1

    @property
    def certified_steps(self) -> int:
        """Inner steps per member, as the line's certificates state."""
        return self.state.line.sequences // self.parameters.sequences_per_step

    @property
    def scheduled_sequences(self) -> int:
        """The count that the learning-rate schedule uses: the progress of the line, not this node's share."""
        return self.state.line.sequences + self.progress.since_round

    async def inner_step(self, executor: Executor, learning_rate: float, max_norm: float, tokens: int) -> StepResult:
        """Apply the gradients of this number of tokens. A step that is not finite changes nothing."""
        return await self._compute.run(partial(executor.step, learning_rate, max_norm, tokens))

    def after_step(self, sequences: int) -> None:
        """Count an inner step of this number of sequences."""
        progress = self.progress
        self.progress = replace(
            progress,
            inner_steps=progress.inner_steps + 1,
            sequences=progress.sequences + sequences,
            since_round=progress.since_round + sequences,
        )

    def learning_rate(self) -> float:
        """Learning rate of the next step that moves weights, from the group's total progress and not this node's."""
        parameters, sequences = self.parameters, self.scheduled_sequences
        rate = learning_rate_at(sequences // parameters.sequences_per_step, parameters.inner)
        if self._branched_at is None:
            return rate
        steps = max(0, sequences - self._branched_at) // parameters.sequences_per_step
        return rate * min(1.0, (steps + 1) / BRANCH_WARMUP_STEPS)

    def sequences_due(self, members: int) -> int:
        """Sequences that this number of members must train together before the next round is due."""
        run = self.parameters
        return sequences_to_round(run.outer, self._schema, self.state, run.sequences_per_step, members)

    def is_due(self, seconds_since_round: float) -> bool:
        """Whether a round of this node alone must run before the next inner step."""
        return round_is_due(
            counted_sequences=self.progress.sequences,
            enough_sequences=self.sequences_due(1),
            elapsed_seconds=seconds_since_round,
            max_round_seconds=self.parameters.outer.max_round_seconds,
        )

    async def run_round(self, exchange: RunRound, now: float) -> bool:
        """Run one round by this exchange between two inner steps. Returns whether it completed.

        An aborted round changes nothing. Training continues, and the work becomes part of the next contribution. The
        next round is due as late as after a success, unless the exchange reports that it follows soon.

        A round that continues during the next inner steps changes nothing yet. A later call takes its result. `now` is
        in seconds since the epoch.
        """
        before = self.state
        local = await self._compute.run(self._executor.vector, Priority.SMALL)
        # a version that arrives during the round waits for the next one
        parameters = self.parameters.outer
        strategy = strategy_at(parameters, self._schema, before.outer_step, self.certified_steps)
        contribution = await anyio.to_thread.run_sync(strategy.contribution, before, local, self.residual)
        agreed = await exchange(contribution, before.outer_step)
        if isinstance(agreed, Abandoned):
            self.note_abandoned(agreed)
        if not isinstance(agreed, Agreed):  # or it is under way
            return False
        with anyio.CancelScope(shield=True):  # the other members have committed, so this node must too
            carried = residual = self.residual
            if not agreed.is_without_own:
                encoded = contribution if agreed.late_for is None else agreed.late_for
                residual = await anyio.to_thread.run_sync(strategy.next_residual, carried, encoded, agreed.sent)
                del encoded
            del contribution  # frees memory for the next state
            weights = lead = None
            if keeps_weights(agreed, parameters):
                residual = carried  # the weights do not include it: a node that joins must get it
                after = await anyio.to_thread.run_sync(strategy.kept_state, before, local)
            else:
                choice = before.line.after(agreed.work or CertifiedWork(0)).choice
                if agreed.members == 1 and not agreed.is_certified:
                    choice = MOST_CANDIDATES - 1  # a node that applies its steps alone measures nothing
                after = await anyio.to_thread.run_sync(strategy.next_state, before, agreed.aggregate, choice)
                step = strategy.candidates[min(choice, len(strategy.candidates) - 1)]
                if agreed.members > 1 and strategy.makes_weights_equal and step.learning_rate == 1:
                    lead = step.momentum
                if agreed.offered is not None and self._counted_since(agreed)[1] == 0:
                    agreed = replace(agreed, late_for=None)  # no work came after the contribution
                included = await anyio.to_thread.run_sync(included_work, agreed, strategy, carried)
                weights = await anyio.to_thread.run_sync(strategy.next_weights, local, before, after, included)
            await self._commit(weights, after, residual, agreed, now, lead=lead)
        return True

    async def root_after(self, aggregate: Tensor, outer_step: int, work: CertifiedWork) -> str:
        """Hex root of the state after this aggregate (k,) of several members with this work.

        Returns "" if the state is of another step, or not in memory.
        """
        state, strategy = self.state, self.strategy
        if self.is_dropped or state.outer_step != outer_step:
            return ""
        line = self._line_after(work)
        return await anyio.to_thread.run_sync(
            lambda: state_root(replace(strategy.next_state(state, aggregate, line.choice), line=line))
        )

    async def keep_root(self) -> None:
        """Compute the root of every new state on another thread while training continues, until cancelled."""
        seen = self.state_changed.count
        while True:
            await self.state_changed.wait(after=seen)
            seen = self.state_changed.count
            await self.update_root()

    async def finish_root(self) -> None:
        """Compute the root of a new state if `keep_root` was cancelled before it did so."""
        if self._changes:
            await self.update_root()

    async def update_root(self) -> None:
        """Compute the root of the present state on another thread, unless it is known."""
        state, changes = self.state, self._changes
        if self._root_of == changes or self.is_dropped:
            return
        root = await anyio.to_thread.run_sync(state_root, state)
        # The state may have changed meanwhile. The root of an older state must not be stored for the new one.
        if self._changes == changes:
            self._root_of = changes
            self.progress = replace(self.progress, state_root=root)

    def drop_tensors(self) -> None:
        """Free the memory of a state that a checkpoint contains. It reads as NaN until `restore`."""
        state = self.state
        self.state = replace(state, anchor=without_values(state.anchor), velocity=without_values(state.velocity))
        self.residual, self.is_dropped = None, True

    def note_abandoned(self, outcome: Abandoned) -> None:
        """Count an abandoned round. Training continues."""
        _LOG.warning("Round abandoned, training continues: %s", outcome.reason)
        progress = self.progress
        counted = (progress.inner_steps, progress.sequences) if outcome.is_soon_again else (0, 0)
        self.progress = replace(
            progress,
            inner_steps=counted[0],
            sequences=counted[1],
            failed=progress.failed + 1,
            last_failure=outcome.reason,
        )

    def restore(self, state: OuterState, residual: Tensor | None, progress: OuterProgress) -> None:
        """Replace the state by that of a checkpoint."""
        self.replace_state(state)
        self.residual, self.progress = residual, progress
        self.is_dropped = False

    def exact_root(self) -> str:
        """Root of the present weights while they equal those that the group agreed on; "" after they have changed."""
        progress, before = self.progress, self.state.outer_step - 1
        if progress.members == 1 or progress.inner_steps > 0 or before < 0:
            return ""
        strategy = strategy_at(self._versions(before).outer, self._schema, before, 0)  # its momentum does not matter
        return progress.state_root if strategy.makes_weights_equal else ""

    def own_status(self) -> ReplicaStatus:
        """Status of this state among the replicas, without the inner steps and without what the rounds know."""
        progress = self.progress
        return ReplicaStatus(
            is_live=True,
            steps=0,
            outer_step=self.state.outer_step,
            root=progress.state_root,
            sequences=progress.sequences,
            wallet_rounds=progress.wallet_rounds,
        )

    def status(self) -> DilocoStatus:
        """Status of the outer steps for the dashboard."""
        progress, parameters = self.progress, self.parameters.outer
        return DilocoStatus(
            inner_step=progress.inner_steps,
            inner_steps_total=self._interval(progress.members),
            outer_steps=self.state.outer_step,
            last_sync=progress.last_sync,
            members=progress.members,
            lone_outer=parameters.lone_outer,
            strategy=parameters.strategy,
            part=part_at(parameters, self._schema, self.state.outer_step),
            codec=parameters.codec,
            explanation=self._explanation(),
            state_root=progress.state_root,
            certified_root=progress.state_root,
            successful_syncs=progress.successful,
            failed_syncs=progress.failed,
        )

    def _explanation(self) -> str:
        progress, parameters = self.progress, self.parameters.outer
        failure = f" The last round was abandoned: {progress.last_failure}." if progress.last_failure else ""
        if progress.members > 1:
            interval = f" {words}" if (words := self._interval_words()) else ""
            return f"The last round had {progress.members} members{_PARTS[parameters.strategy]}.{interval}{failure}"
        if parameters.lone_outer == "keep":
            return f"Alone: outer steps move the anchor only; there is nobody to synchronise with.{failure}"
        return f"Alone: outer steps apply Nesterov momentum to this node's own progress.{failure}"

    def _interval(self, members: int) -> int:
        """Inner steps between two rounds of this number of members."""
        run = self.parameters
        return steps_between_rounds(run.outer, self.state.line, run.sequences_per_step, members)

    def _interval_words(self) -> str:
        """The present interval and its reason; "" for a strategy with an interval of its own."""
        run, parameters, members = self.parameters, self.parameters.outer, self.progress.members
        if not grows_interval(parameters):
            return ""
        interval, longest = self._interval(members), self._interval(1)
        every = "Every inner step ends" if interval == 1 else f"Every {interval:,} inner steps end"
        on_a_fast_line = replace(self.state.line, durations=())
        if interval > steps_between_rounds(parameters, on_a_fast_line, run.sequences_per_step, members):
            return f"{every} with a round: an exchange may take at most {parameters.round_share:.0%} of the time."
        if interval == longest:
            return f"{every} with a round, the run's longest interval."
        steps = f"{self.certified_steps:,} certified steps"
        return f"{every} with a round. The interval grows with the run's {steps}, up to {longest:,}."

    async def _commit(
        self,
        weights: Tensor | None,
        after: OuterState,
        residual: Tensor | None,
        agreed: Agreed,
        now: float,
        *,
        lead: float | None = None,
    ) -> None:
        members, (inner_steps, sequences) = agreed.members, self._counted_since(agreed)
        # Load the weights first, the only part that awaits. After it, state, residual and progress change together.
        if weights is not None:
            await self._compute.run(partial(self._executor.load_vector, weights), Priority.SMALL)
        since_round = 0 if agreed.is_without_own else sequences
        work = agreed.work or CertifiedWork(self.progress.since_round - since_round)
        outer_step = after.outer_step if agreed.completes is None else agreed.completes + 1
        self.replace_state(replace(after, outer_step=outer_step, line=self._line_after(work)))
        self.residual = residual
        self.progress = OuterProgress(
            inner_steps=inner_steps,
            sequences=sequences,
            successful=self.progress.successful + (members > 1),
            failed=self.progress.failed,
            members=members,
            last_sync=now,
            wallet_rounds=self.progress.wallet_rounds + (members if members > 1 else 0),
            since_round=since_round,
            lead=lead,
        )

    def _line_after(self, work: CertifiedWork) -> LineProgress:
        """The line's progress after a round with this work from the present state."""
        return self.state.line.after(work)

    def _counted_since(self, agreed: Agreed) -> tuple[int, int]:
        """Inner steps and sequences whose work is not in any contribution yet."""
        progress = self.progress
        if agreed.is_without_own:
            return progress.inner_steps, progress.sequences
        if agreed.late_for is None or agreed.offered is None:
            return 0, 0
        since = max(0, progress.sequences - agreed.offered)
        return ceil(progress.inner_steps * since / max(1, progress.sequences)), since
