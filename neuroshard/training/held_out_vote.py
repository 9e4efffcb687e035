"""A member's measurements of an aggregate on held-out data: its vote, and its choice of the outer step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, isfinite

import anyio.to_thread
import torch
from torch import Tensor

from neuroshard.consensus.sync_strategies import OuterStep
from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import (
    PINNED_SEQUENCES,
    chosen_candidate,
    nats_per_token,
    paired_difference,
)
from neuroshard.optim.outer import OuterState, replica_mean
from neuroshard.pipeline.arithmetic import Executor
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import AcceleratorFullError, AcceleratorLostError, SiteFailedError
from neuroshard.training.outer_sync import OuterSync

_LOG = logging.getLogger(__name__)

_REMEMBERED_STATES = 4


@dataclass(frozen=True)
class VoteRule:
    """Limits on the cost of a vote, and the threshold for a no."""

    sequences: int = PINNED_SEQUENCES  # the first ones of the pinned sequences
    least_sequences: int = 8  # fewer are not significant
    seconds: float = 5.0  # compute time per state; the sequences measured by then count
    standard_errors: float = 4.0  # paired standard errors by which the loss must be worse
    # times its cost that a measurement counts for the aggregates after it; 0: each one is measured
    rest: float = 0.0
    early_rest: float = 0.0  # the same after each of the first measurements
    early_measurements: int = 3  # as many as a verdict on learning takes, and one to spare


# Rounds of a new run come after two inner steps, and a measurement takes as long as several of them. Friends have no
# reason to lie, so it may wait there. A run that is open to strangers measures every aggregate.
AMONG_FRIENDS = VoteRule(rest=50.0, early_rest=1.0)


class HeldOutVote:
    """Votes on the aggregates of one stage by their held-out loss.

    It evaluates on the device of the stage's weights in jobs of one microbatch, so that training never waits for more.
    Only a node with the whole model can measure a state. The stages of a pipeline object only to values that are not
    finite.
    """

    def __init__(
        self,
        compute: ComputeThread,
        executor: Executor,
        outer: OuterSync,
        batch_size: int,
        rule: VoteRule | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.explanation = "No aggregate was checked yet."  # reason of the newest vote
        self._held_out: HeldOut | None = None  # the pinned sequences; None until they are loaded
        self._for_choice: Tensor | None = None  # others (n, t + 1), that no loss in a report is measured on
        self._compute = compute
        self._executor = executor
        self._outer = outer
        self._batch_size = batch_size
        self._rule = rule or VoteRule()
        self._clock = clock  # seconds
        self._measured_at: float | None = None  # end of the last measurement
        self._measurements = 0  # since this object was made
        self._cost = 0.0  # seconds of compute of that measurement
        self._losses: dict[str, tuple[float, ...]] = {}  # nats per token of each sequence, by state root

    def pin(self, held_out: HeldOut, for_choice: Tensor | None = None) -> None:
        """Set the sequences on which votes are measured, and those for choices."""
        self._held_out, self._for_choice = held_out, for_choice

    @property
    def mean_losses(self) -> tuple[float, ...]:
        """Losses of the mean of the members' weights in the last round, if this node measured it; otherwise ()."""
        return self._losses.get(f"before {self._outer.progress.state_root}", ())

    async def measured_mean(self) -> tuple[float, ...] | None:
        """Return `mean_losses` on all pinned sequences, however long that takes; () while they cannot be measured.

        Returns None if there is no such mean, or if the last round was abandoned, so that it becomes old.
        """
        state, progress, held_out = self._outer.state, self._outer.progress, self._held_out
        if held_out is None or self._obstacle(held_out.sequences):
            return None
        if progress.lead is None or progress.last_failure:
            return None
        if len(self.mean_losses) == len(held_out.sequences):
            return self.mean_losses
        if self._outer.is_dropped or not progress.state_root:
            return ()
        mean = await anyio.to_thread.run_sync(replica_mean, state.anchor, state.velocity, progress.lead)
        losses, _ = await self._measured(mean, held_out.sequences, 1.0, inf)
        self._losses[f"before {progress.state_root}"] = losses
        return losses

    async def choice(self, aggregate: Tensor) -> int:
        """Place of the candidate for the outer step with an aggregate (k,) that this member chooses.

        It is measured like the vote, but each time. Without a loss it is the plain mean.
        """
        outer, rows, run = self._outer, self._for_choice, anyio.to_thread.run_sync
        before, strategy = outer.state, outer.strategy
        if outer.is_dropped or rows is None or len(aggregate) != strategy.length or self._obstacle(rows):
            return 0
        share, local = strategy.length / len(before.anchor), before.anchor
        if not strategy.makes_weights_equal:
            local = await self._own_weights()
            if local is None:
                return 0
        losses = list[tuple[float, ...]]()
        for place in range(len(strategy.candidates)):
            after = await run(strategy.next_state, before, aggregate, place)
            weights = await run(strategy.next_weights, local, before, after, None)
            del after
            losses.append((await self._measured(weights, rows, share))[0])
        chosen = chosen_candidate(losses, self._rule.least_sequences)
        means = ", ".join("none" if not each else f"{sum(each) / len(each):.4f}" for each in losses)
        step = strategy.candidates[chosen]
        _LOG.info("Chose learning rate %g and momentum %g by the losses %s.", step.learning_rate, step.momentum, means)
        return chosen

    async def objection(self, aggregate: Tensor, next_root: str, choice: int | None = None) -> str:
        """Objection to an aggregate (k,) that leads from the present state to this root; "" for no objection.

        The vote compares the mean of the members' weights without the outer step's momentum. Momentum can carry the
        next anchor past its target for some rounds. No member causes this, and the vote would reject it repeatedly.
        The next anchor itself, by the measured `choice` or the last one, must be finite.
        """
        outer = self._outer
        before, root, strategy = outer.state, outer.progress.state_root, outer.strategy
        if outer.is_dropped:  # since the root was computed; the aggregate is not to blame
            return self._voted("not measured, because the node is paused", is_no=False)
        if len(aggregate) != strategy.length:
            return self._voted("it is of another step", is_no=True)
        choice = before.line.choice if choice is None else choice
        after = await anyio.to_thread.run_sync(strategy.next_state, before, aggregate, choice)
        lowest, highest = await anyio.to_thread.run_sync(torch.aminmax, after.anchor)  # NaN if any number is NaN
        if not (isfinite(lowest) and isfinite(highest)):
            return self._voted("the weights it leads to are not finite", is_no=True)
        if after.anchor is before.anchor:
            return self._voted("the weights stay", is_no=False)
        obstacle = self._obstacle(None if self._held_out is None else self._held_out.sequences)
        obstacle = obstacle or ("not measured, because the last measurement is recent" if self._rests else "")
        if obstacle:
            return self._voted(obstacle, is_no=False)
        del after  # as large as the weights
        return await self._compared(aggregate, before, strategy, (root, f"before {next_root}"))

    async def _compared(
        self, aggregate: Tensor, before: OuterState, strategy: OuterStep, names: tuple[str, str]
    ) -> str:
        """Measure both states and return the objection; `names` are the cache names of the states before and after.

        In a round about a part of the weights, both values of this part are measured within this node's own weights.
        The anchor's other parts may be much older and fit neither of them.
        """
        share, local, self._cost = strategy.length / len(before.anchor), before.anchor, 0.0
        run = anyio.to_thread.run_sync
        if not strategy.makes_weights_equal:
            local = await self._own_weights()
            if local is None:
                return self._voted("not measured, because the accelerator has failed", is_no=False)
            self._losses = {}  # they belong to weights that have changed
        losses_before = await self._losses_of(
            await run(strategy.next_weights, local, before, before, None), names[0], share
        )
        mean = replace(before, anchor=await run(strategy.mean, before, aggregate))
        after = await run(strategy.next_weights, local, before, mean, None)
        del mean, local
        losses_after = await self._losses_of(after, names[1], share)
        self._measured_at = self._clock()
        self._measurements += 1
        return self._judged(losses_before, losses_after)

    async def _own_weights(self) -> Tensor | None:
        """The weights (d,) of this node's model; None if its device or a rank has failed, which the loop reports."""
        try:
            return await self._compute.run(self._executor.vector)
        except (AcceleratorLostError, SiteFailedError):
            return None

    def _obstacle(self, rows: Tensor | None) -> str:
        """Reason why the loss of sequences cannot be measured here; "" if it can."""
        model = self._executor.model
        if not (model.is_first and model.is_last):
            return "not measured, because this node holds a part of the model only"
        if rows is None or len(rows) < self._rule.least_sequences:
            return "not measured, because the held-out sequences are not here"
        return ""

    @property
    def _rests(self) -> bool:
        """Whether the last measurement is too recent, for its cost, to be repeated."""
        if self._measured_at is None:
            return False
        times = self._rule.early_rest if self._measurements < self._rule.early_measurements else self._rule.rest
        return self._clock() - self._measured_at < times * self._cost

    async def _losses_of(self, weights: Tensor, root: str, share: float) -> tuple[float, ...]:
        """Losses of the sequences that there is time for; those of a known state come from the cache.

        A state without a root ("") is always measured, because the next such state may be another one.
        """
        known, held_out = self._losses.get(root), self._held_out
        if known is not None or held_out is None:
            return known or ()
        losses, seconds = await self._measured(weights, held_out.sequences, share)
        self._cost += seconds
        if root and losses:
            self._losses = dict([*self._losses.items(), (root, losses)][-_REMEMBERED_STATES:])
        return losses

    async def _measured(
        self, weights: Tensor, sequences: Tensor, share: float, most_seconds: float | None = None
    ) -> tuple[tuple[float, ...], float]:
        """Losses of the first sequences (n, t + 1) with weights (d,), as many as there is time for, and the seconds.

        The time is `most_seconds`, by default that of the rule.

        A round about a share of the weights measures that share of the sequences, because there are more such rounds.
        """
        losses, seconds, rule = list[float](), 0.0, self._rule
        sequences = sequences[: max(rule.least_sequences, ceil(share * rule.sequences))]
        for start in range(0, len(sequences), self._batch_size):
            rows = sequences[start : start + self._batch_size]
            if seconds >= (rule.seconds if most_seconds is None else most_seconds):
                break
            try:
                measured = await self._compute.run(partial(self._summed, weights, rows))
            except (AcceleratorFullError, AcceleratorLostError, SiteFailedError):
                measured = None
            if measured is None:
                return (), seconds
            losses += nats_per_token(measured[0], rows.shape[1] - 1)
            seconds += measured[1]
        return tuple(losses), seconds

    def _summed(self, weights: Tensor, rows: Tensor) -> tuple[Tensor, float] | None:
        """Summed losses (b,) of sequences (b, t + 1) with weights (d,), and the seconds; None if suspended."""
        executor, began = self._executor, time.perf_counter()
        if executor.is_suspended:
            return None
        with executor.other_weights(weights):
            return executor.infer(rows[:, :-1], rows[:, 1:]).cpu(), time.perf_counter() - began

    def _judged(self, before: tuple[float, ...], after: tuple[float, ...]) -> str:
        count, rule = min(len(before), len(after)), self._rule
        if count < rule.least_sequences:
            return self._voted(f"not measured, because there was time for only {count} sequences", is_no=False)
        before, after = before[:count], after[:count]
        was_finite = all(map(isfinite, before))
        if not all(map(isfinite, after)):
            return self._voted("the held-out loss is not a number", is_no=was_finite)
        worse = paired_difference(after, before)  # positive when the loss rose
        words = (
            f"held-out loss {sum(before) / count:.4f} before, {sum(after) / count:.4f} after on {count} sequences, "
            f"standard error {worse.standard_error:.4f}"
        )
        return self._voted(words, is_no=was_finite and worse.exceeds(rule.standard_errors, 0.0))

    def _voted(self, words: str, *, is_no: bool) -> str:
        before, self.explanation = self.explanation, f"{'Voted no' if is_no else 'No objection'}: {words}."
        if is_no:
            _LOG.warning("%s", self.explanation)
        elif self.explanation != before:  # a node that cannot measure says so once, not in every round
            _LOG.info("%s", self.explanation)
        return words if is_no else ""
