"""What this computer gave to training over time: frozen values for the snapshot. Bounded, whatever the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What was done in a stretch of time."""

    start: float  # seconds since the epoch
    tokens: int = 0
    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    training_seconds: float = 0.0
    loss: float | None = None  # nats a token, mean over the tokens; None where none was told


@dataclass(frozen=True)
class WorkSpan:
    """A span of time in stretches of equal width, oldest first; stretches without anything are left out."""

    width_seconds: float
    points: tuple[Work, ...] = ()


@dataclass(frozen=True)
class ContributionStatus:
    """All of it, of every run that this data folder has served."""

    total: Work | None = None  # `start` is when it began; None: nothing was done yet
    day: WorkSpan = WorkSpan(300.0)
    week: WorkSpan = WorkSpan(3_600.0)
    all: WorkSpan = WorkSpan(600.0)
