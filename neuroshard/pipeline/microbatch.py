"""Key of a microbatch, and the errors with which a stage refuses one; each error says where the driver may retry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from neuroshard.errors import NeuroShardError
from neuroshard.types import NodeId


@dataclass(frozen=True)
class MicrobatchKey:
    """Identity of one microbatch in all stages. Every stage does the work of a key at most once."""

    driver: NodeId
    session: int  # rises within a driver, also across its starts; a closed session stays closed
    microbatch: int


class Retry(StrEnum):
    """Where a driver may send a request again after a refusal."""

    HERE = "here"  # the same stage after a short wait; a backward pass starts again with the forward pass
    ELSEWHERE = "elsewhere"  # another replica of the stage
    NEVER = "never"  # the request itself is wrong


class StageError(NeuroShardError):
    """A stage did not do the requested work, and nothing was accumulated."""

    retry: ClassVar[Retry] = Retry.HERE


class StageBusyError(StageError):
    """The stage is making its step, or has no room for another microbatch now."""


class StagePausedError(StageBusyError):
    """The stage works correctly but is paused by its owner. The pause is not the stage's fault."""

    retry = Retry.ELSEWHERE


class NotHandedYetError(StageBusyError):
    """The neighbour has not handed the tensor of this pass over so far. Its stage may still be at work."""


class AcceleratorFullError(StageBusyError):
    """The accelerator has no free memory: another program uses it, or the stage needs more than planned."""

    def __init__(self) -> None:
        super().__init__("The accelerator has no memory left.", "Close other programs that use it.")


class AcceleratorLostError(StagePausedError):
    """The accelerator no longer works: it is gone, or its driver refuses this process from now on."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"{device} no longer works: {reason}.",
            "Start NeuroShard again: training resumes from the last checkpoint. If this returns, restart the computer, "
            "update the driver, or set the device to cpu.",
        )


class SiteFailedError(StagePausedError):
    """A rank of this node's site has ended or does not answer. The gradients of the present step are incomplete."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}.", "The node starts its ranks again.")
        self.reason = reason  # without a full stop, such as "rank 1 ended: signal 9"


class UnknownMicrobatchError(StageError):
    """The stage has no forward pass of the microbatch, or has given it up because it stayed open for too long."""


class StageGoneError(StageError):
    """The stage is ending or cannot be reached."""

    retry = Retry.ELSEWHERE


class RefusedTensorError(StageError):
    """Inputs, labels or gradients have a wrong shape or type, or values that are not finite."""

    retry = Retry.NEVER


class DisputedTensorError(StageError):
    """A peer has refused a tensor: either the tensor or the peer is wrong. The answer of the next replica decides."""

    retry = Retry.ELSEWHERE


class UnwantedTensorError(StageError):
    """Two replicas have refused a tensor, so the tensor is wrong and not the replicas."""

    retry = Retry.NEVER


class LostGradientError(StageError):
    """The only node that had a gradient is gone. Another node's pass could count the microbatch twice."""

    retry = Retry.NEVER


class SpoiltMicrobatchError(StageError):
    """The loss or gradient of a microbatch is not finite. The stage's step will be skipped."""

    retry = Retry.NEVER


class UnreadTextError(StageError):
    """The stage has not read the start of the text with its present weights. The text must be read again from there."""


class ClosedSessionError(StageError):
    """The driver has closed the session, or it was idle for too long. The driver must begin a new one."""

    retry = Retry.NEVER
