"""Where a stage is in its training, as frozen values: what a checkpoint keeps beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

from neuroshard.data.rotation import RotationRule
from neuroshard.training.executor import StepResult
from neuroshard.training.non_finite import NonFinitePolicy
from neuroshard.types import DataPosition

EMA_MEMORY = 0.95
INITIAL_STEPS = 10  # their mean is what "initial loss" means
NOTED_LOSSES = RotationRule().losses


@dataclass(frozen=True)
class NotedLoss:
    """What was told to the data feed after one step; a resumed feed is told it again, so that it rotates alike."""

    step: int
    train_loss: float
    held_out_loss: float | None


@dataclass(frozen=True)
class Progress:
    """Counts of one stage; every step makes a new one."""

    steps: int = 0  # applied inner steps
    tokens: int = 0
    sequences: int = 0
    loss: float | None = None  # of the last applied step, nats a token
    loss_ema: float | None = None
    initial_loss: float | None = None  # mean of the first steps
    grad_norm: float | None = None
    position: DataPosition | None = None  # first window that no step has used
    noted: tuple[NotedLoss, ...] = ()  # on the present shard, newest last
    non_finite: NonFinitePolicy = field(default_factory=NonFinitePolicy)

    def at_position(self, position: DataPosition) -> Progress:
        """After batches up to `position` were taken for a step; a change of shard ends its noted losses."""
        moved = self.position is None or position.order != self.position.order
        return replace(self, position=position, noted=() if moved else self.noted)

    def after_step(self, result: StepResult, loss: float | None, tokens: int, sequences: int) -> Progress:
        """After an optimizer step on these tokens: one that was skipped counts as skipped and nothing else.

        The loss is None where this node has neither measured nor been told it.
        """
        if not result.finite:
            return self.skipped()
        return replace(self.after_driving(loss, tokens, sequences), grad_norm=result.grad_norm)

    def skipped(self) -> Progress:
        """After a step that gave no numbers."""
        return replace(self, non_finite=self.non_finite.after_step(self.steps + 1, finite=False))

    def after_driving(self, loss: float | None, tokens: int, sequences: int) -> Progress:
        """After a step's worth of data, wherever the step was made."""
        return replace(
            self,
            steps=self.steps + 1,
            tokens=self.tokens + tokens,
            sequences=self.sequences + sequences,
            loss=loss,
            loss_ema=self._loss_ema_with(loss),
            initial_loss=self._initial_loss_with(loss),
            non_finite=self.non_finite.after_step(self.steps + 1, finite=True),
        )

    def with_noted(self, noted: NotedLoss) -> Progress:
        """After the feed was told a loss."""
        return replace(self, noted=(*self.noted, noted)[-NOTED_LOSSES:])

    def _loss_ema_with(self, loss: float | None) -> float | None:
        if loss is None or self.loss_ema is None:
            return self.loss_ema if loss is None else loss
        return EMA_MEMORY * self.loss_ema + (1 - EMA_MEMORY) * loss

    def _initial_loss_with(self, loss: float | None) -> float | None:
        if loss is None or self.steps >= INITIAL_STEPS:
            return self.initial_loss
        return ((self.initial_loss or 0.0) * self.steps + loss) / (self.steps + 1)


@dataclass(frozen=True)
class Speed:
    """Smoothed pace of the steps, over the time spent on them (pauses do not count)."""

    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    observed: int = 0

    def after_step(self, seconds: float, tokens: int) -> Speed:
        """The pace after one more step; each of the last ten weighs about a tenth."""
        if seconds <= 0 or not isfinite(seconds):
            return self
        weight = max(0.1, 1 / (self.observed + 1))
        step_seconds = self.step_seconds + weight * (seconds - self.step_seconds)
        average_tokens = self.tokens_per_second * self.step_seconds
        tokens_a_step = average_tokens + weight * (tokens - average_tokens)
        return Speed(tokens_a_step / step_seconds, step_seconds, self.observed + 1)
