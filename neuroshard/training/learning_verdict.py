"""Is the model really learning? A pure verdict from held-out evaluations, the training curve and the node's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

from neuroshard.data.held_out_losses import Evaluation, PairedDifference, comparable_mean, paired_difference
from neuroshard.status.snapshot import LearningVerdict, LossPoint, LossTrend, VerificationStatus
from neuroshard.training.record import successive_noise

STANDARD_ERRORS = 4.0
MIN_IMPROVEMENT = 0.02  # nats per token; less is not visible to a reader, and rounding can shift all sequences together
DIVERGENCE_MARGIN = 0.3  # nats per token above the best
DIVERGENCE_GAIN_SHARE = 0.25  # of the gain so far, if that is more than the margin
STALL_EVALUATIONS = 4  # without a significant gain since the first of them
TREND_POINTS = 100  # of the curve: the newer half is compared with the older one
MIN_TREND_POINTS = 16
TREND_ERRORS = 3.0
WORSE_MARGIN = 0.05


@dataclass(frozen=True)
class Evidence:
    """Evidence for the verdict on a run."""

    evaluations: Sequence[Evaluation] = ()  # oldest first; the first is the baseline
    recent: Sequence[LossPoint] = ()  # newest points of the curve, oldest first
    initial_loss: float | None = None  # training loss of the first steps
    is_training: bool = True
    state_reason: str = ""  # reason why the node does not train
    learning_rate: float | None = None
    last_non_finite_step: int | None = None
    is_measured_here: bool = True  # False: the drivers of the model measure it


def verify(evidence: Evidence) -> VerificationStatus:
    """Decide whether the model learns: two successive evaluations beat the first by over 4 paired standard errors.

    Divergence ends the verified state. So does a non-finite loss: evaluations up to that step no longer count. A pause
    does not, because the learned weights stay.
    """
    trend = loss_trend(evidence.recent)
    diverged = _divergence(evidence)
    if diverged is not None:
        return VerificationStatus(
            False, LearningVerdict.DIVERGED, diverged, _DIVERGED_ACTION, LossTrend.NEEDS_ATTENTION
        )
    verified = _is_verified(evidence)
    if not evidence.is_training:
        return _not_training(evidence, verified, trend)
    if verified:
        return VerificationStatus(True, LearningVerdict.VERIFIED, _verified_reason(evidence), "Nothing to do.", trend)
    return _undecided(evidence, trend)


def loss_trend(points: Sequence[LossPoint]) -> LossTrend:
    """Direction of the training loss: difference of two neighbouring halves in units of its standard error."""
    losses = [point.loss for point in points[-TREND_POINTS:]]
    if len(losses) < MIN_TREND_POINTS:
        return LossTrend.INSUFFICIENT_DATA
    half = len(losses) // 2
    older, newer = losses[-2 * half : -half], losses[-half:]
    change = sum(newer) / half - sum(older) / half
    error = successive_noise(losses) * sqrt(2 / half)
    if change < -TREND_ERRORS * error:
        return LossTrend.IMPROVING
    if change > TREND_ERRORS * error and change > WORSE_MARGIN:
        return LossTrend.NEEDS_ATTENTION
    return LossTrend.STABLE


def _counting(evidence: Evidence) -> list[Evaluation]:
    """Evaluations after the baseline and after the last non-finite step."""
    after = evidence.last_non_finite_step
    return [e for e in evidence.evaluations[1:] if after is None or e.step > after]


def _passes(evidence: Evidence, evaluation: Evaluation) -> bool:
    difference = paired_difference(evidence.evaluations[0].losses, evaluation.losses)
    return difference.exceeds(STANDARD_ERRORS, MIN_IMPROVEMENT)


def _is_verified(evidence: Evidence) -> bool:
    last_two = _counting(evidence)[-2:]
    return len(last_two) == 2 and all(_passes(evidence, evaluation) for evaluation in last_two)


def _divergence(evidence: Evidence) -> str | None:
    """Reason why the run counts as diverged; None while the losses are near the best held-out loss."""
    if not evidence.evaluations:
        return None
    baseline = evidence.evaluations[0]
    mean_of = partial(comparable_mean, baseline)
    best = min(evidence.evaluations, key=mean_of)
    margin = max(DIVERGENCE_MARGIN, DIVERGENCE_GAIN_SHARE * (baseline.mean - mean_of(best)))
    last = evidence.evaluations[-1]
    last_mean = mean_of(last)
    if paired_difference(last.losses, best.losses).exceeds(STANDARD_ERRORS, margin):
        return f"The held-out loss rose from {mean_of(best):.2f} to {last_mean:.2f}: the model is getting worse."
    recent = [point.loss for point in evidence.recent[-MIN_TREND_POINTS:] if point.step > last.step]
    if len(recent) < MIN_TREND_POINTS:
        return None
    mean, error = sum(recent) / len(recent), successive_noise(recent) / sqrt(len(recent))
    ceiling = max(last_mean, evidence.initial_loss or last_mean) if last is baseline else last_mean
    if mean > ceiling + margin + STANDARD_ERRORS * error and loss_trend(evidence.recent) is not LossTrend.IMPROVING:
        return f"The training loss rose to {mean:.2f}, above the last held-out loss of {last_mean:.2f}."
    return None


_DIVERGED_ACTION = "Lower the learning rate or go back to an earlier checkpoint (`neuroshard checkpoint list`)."


def _not_training(evidence: Evidence, verified: bool, trend: LossTrend) -> VerificationStatus:
    reason = evidence.state_reason or "Training is not running."
    if verified:
        reason += " Before that, learning was verified on held-out text."
    return VerificationStatus(
        verified, LearningVerdict.NOT_TRAINING, reason, "Resume training to continue learning.", trend
    )


def _verified_reason(evidence: Evidence) -> str:
    difference, first = _since_start(evidence), evidence.evaluations[0]
    return (
        f"On text it never trains on, the loss fell from {first.mean:.2f} to "
        f"{comparable_mean(first, evidence.evaluations[-1]):.2f} nats per token: {difference.mean:.2f} "
        f"± {difference.standard_error:.2f} better than at the start, in two evaluations running."
    )


def _since_start(evidence: Evidence) -> PairedDifference:
    return paired_difference(evidence.evaluations[0].losses, evidence.evaluations[-1].losses)


def _undecided(evidence: Evidence, trend: LossTrend) -> VerificationStatus:
    counting = _counting(evidence)
    if evidence.last_non_finite_step is not None and len(counting) < 2:
        step = evidence.last_non_finite_step
        reason = f"A step gave a value that is not a number (step {step}); learning must be shown again."
        return VerificationStatus(
            False, LearningVerdict.INSUFFICIENT_DATA, reason, "Wait for two more evaluations.", trend
        )
    if not counting:
        reason = (
            "The model was measured once on held-out text; a second measurement follows when it has trained a while."
        )
        if not evidence.is_measured_here:
            reason = "The nodes that feed text to the model measure it on held-out text: see their dashboards."
        elif not evidence.evaluations:
            reason = "The model was not measured on held-out text yet."
        return VerificationStatus(False, LearningVerdict.INSUFFICIENT_DATA, reason, "Nothing to do: wait.", trend)
    if _passes(evidence, counting[-1]):
        reason = f"The held-out loss is {_since_start(evidence).mean:.2f} nats per token better than at the start."
        return VerificationStatus(
            False, LearningVerdict.IMPROVING, reason, "Wait for the next evaluation to confirm it.", trend
        )
    if len(counting) < STALL_EVALUATIONS:
        reason = "The held-out loss has not changed by more than chance yet."
        return VerificationStatus(False, LearningVerdict.INSUFFICIENT_DATA, reason, "Nothing to do: wait.", trend)
    return _stalled(evidence, trend)


def _stalled(evidence: Evidence, trend: LossTrend) -> VerificationStatus:
    reason = f"After {len(evidence.evaluations) - 1} evaluations the held-out loss is no better than at the start."
    action = "Check the learning rate and the data; a larger learning rate may help."
    if evidence.learning_rate == 0:
        reason += " The learning rate is 0, so nothing can be learned."
        action = "Set a learning rate above 0."
    return VerificationStatus(False, LearningVerdict.STALLED, reason, action, trend)
