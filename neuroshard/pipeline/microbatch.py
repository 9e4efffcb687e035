"""Key of a microbatch, and the errors with which a stage refuses one; each error says where the driver may retry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from neuroshard.errors import NeuroShardError
from neuroshard.types import NodeId


@dataclass(frozen=True)
class MicrobatchKey:
    """One microbatch on its whole way; every stage does the work of a key at most once."""

    driver: NodeId
    session: int  # a driver's sessions rise, also from one start to the next; one that was closed stays closed
    microbatch: int


class Retry(StrEnum):
    """What a driver may do after a refusal."""

    HERE = "here"  # the same stage, a little later; a backward pass begins with the forward pass again
    ELSEWHERE = "elsewhere"  # another replica of the stage
    NEVER = "never"  # the request itself is wrong


class StageError(NeuroShardError):
    """A stage that did not do what it was asked for; nothing was accumulated."""

    retry: ClassVar[Retry] = Retry.HERE


class StageBusyError(StageError):
    """The stage makes its step, or has no room for another microbatch now."""


class StagePausedError(StageBusyError):
    """The stage is whole and does nothing until its owner says so; no fault of it."""

    retry = Retry.ELSEWHERE


class AcceleratorFullError(StageBusyError):
    """The accelerator has no memory left: another program has it, or the stage needs more than was planned."""

    def __init__(self) -> None:
        super().__init__("The accelerator has no memory left.", "Close what else uses it.")


class UnknownMicrobatchError(StageError):
    """A microbatch without its forward pass here, or one that was given up because it stayed open too long."""


class StageGoneError(StageError):
    """The stage ends or cannot be reached."""

    retry = Retry.ELSEWHERE


class RefusedTensorError(StageError):
    """Inputs, labels or gradients of a wrong shape or type, or with values that are not numbers."""

    retry = Retry.NEVER


class DisputedTensorError(StageError):
    """A peer refuses a tensor: that is wrong, or the peer is. The next replica's word decides."""

    retry = Retry.ELSEWHERE


class UnwantedTensorError(StageError):
    """A tensor that was refused twice, so that it is at fault and not those who refused it."""

    retry = Retry.NEVER


class SpoiltMicrobatchError(StageError):
    """A microbatch whose loss or gradient came out as no number: the stage's step will be skipped."""

    retry = Retry.NEVER


class UnreadTextError(StageError):
    """A text whose beginning this stage has not read with its present weights: it must be read from there again."""


class ClosedSessionError(StageError):
    """A session that its driver has closed, or that was idle for too long: the driver must begin a new one."""

    retry = Retry.NEVER
