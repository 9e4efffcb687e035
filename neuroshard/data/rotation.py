"""When to leave a shard before its windows are used up: a pure rule over recent losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from neuroshard.types import JsonValue, ShardId


class RotationReason(StrEnum):
    """Why a node went on to another shard."""

    EXHAUSTED = "exhausted"  # every window was used
    MEMORISED = "memorised"  # losses are flat and almost zero
    OVERFITTED = "overfitted"  # better on this shard than on held-out data, by more than the margin
    UNUSABLE = "unusable"  # missing or damaged after several attempts

    @property
    def explanation(self) -> str:
        """The reason in words."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    RotationReason.EXHAUSTED: "all windows of the shard were used",
    RotationReason.MEMORISED: "the losses became flat and almost zero: the shard is memorised",
    RotationReason.OVERFITTED: "the loss on the shard became much better than on held-out data",
    RotationReason.UNUSABLE: "the shard is missing or damaged at its source",
}


@dataclass(frozen=True)
class Rotation:
    """A node's change to another shard. Losses cannot be recomputed by others, so peers take this on its signature."""

    shard: ShardId  # read from now on
    first_step: int  # the first step that uses it
    reason: RotationReason  # why the shard before it was left

    def to_json(self) -> dict[str, JsonValue]:
        """The value to sign."""
        return {"shard": self.shard, "first_step": self.first_step, "reason": self.reason.value}


@dataclass(frozen=True)
class RotationRule:
    """Thresholds of an early rotation (DESIGN 3.4); losses in nats a token."""

    losses: int = 20  # how many recent losses are looked at
    memorised_variance: float = 0.02
    memorised_mean: float = 0.05
    held_out_margin: float = 1.0


DEFAULT_ROTATION_RULE = RotationRule()


def plateau_reason(
    losses: Sequence[float], held_out_loss: float | None, rule: RotationRule = DEFAULT_ROTATION_RULE
) -> RotationReason | None:
    """Whether the training losses noted on the current shard ask for the next one, and why.

    Fewer than `rule.losses` losses never do, so that one lucky step moves nobody. Non-finite losses never do either:
    comparisons with them are false.
    """
    recent = losses[-rule.losses :]
    if len(recent) < rule.losses:
        return None
    mean = sum(recent) / len(recent)
    variance = sum((loss - mean) ** 2 for loss in recent) / len(recent)
    if variance < rule.memorised_variance and mean < rule.memorised_mean:
        return RotationReason.MEMORISED
    if held_out_loss is not None and held_out_loss - mean > rule.held_out_margin:
        return RotationReason.OVERFITTED
    return None
