"""How long a stage's service waits for others, how much it keeps for them, and what it counts. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from neuroshard.training.sessions import SessionLimits
from neuroshard.training.stage_texts import TextLimits


class Hold(StrEnum):
    """Why a stage takes no more microbatches for a while, or for good."""

    ROUND = "round"
    PAUSE = "pause"
    END = "end"


@dataclass(frozen=True)
class ServiceLimits:
    """How long others are waited for, and how much they may keep here."""

    sessions: SessionLimits = field(default_factory=SessionLimits)
    texts: TextLimits = field(default_factory=TextLimits)
    wait_seconds: float = 10.0  # a new microbatch waits so long for the step to end, then it is refused
    waiting: int = 32  # more than that are refused at once
    drain_seconds: float = 30.0  # open microbatches may end so long after the intake is closed, then they are given up
    pause_seconds: float = 0.5  # the same for a pause: whoever sits at the computer has it to themselves at once
    leave_seconds: float = 10.0  # the same when the node ends, which must leave time for a final checkpoint
    look_seconds: float = 15.0  # how often idle sessions are looked for

    def patience(self, hold: Hold) -> float:
        """Seconds that open microbatches have to end."""
        match hold:
            case Hold.ROUND:
                return self.drain_seconds
            case Hold.PAUSE:
                return self.pause_seconds
            case Hold.END:
                return self.leave_seconds
            case _:
                assert_never(hold)


@dataclass(frozen=True)
class ServiceCounts:
    """What happened here since the start."""

    microbatches: int = 0  # accumulated
    repeated: int = 0  # asked for again and answered from memory
    given_up: int = 0  # opened but never accumulated
    recomputed: int = 0  # of the accumulated ones: forward passes that were computed twice

    def plus(
        self, *, microbatches: int = 0, repeated: int = 0, given_up: int = 0, recomputed: int = 0
    ) -> ServiceCounts:
        """With so many more."""
        return ServiceCounts(
            self.microbatches + microbatches,
            self.repeated + repeated,
            self.given_up + given_up,
            self.recomputed + recomputed,
        )
