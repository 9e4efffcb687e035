"""History in the snapshot: the work of this computer over time, and sample texts of the model at earlier steps.

The size is bounded, whatever the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkDone:
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
    points: tuple[WorkDone, ...] = ()


@dataclass(frozen=True)
class WorkHistoryStatus:
    """All of it, of every run that this data folder has served."""

    total: WorkDone | None = None  # `start` is when it began; None: nothing was done yet
    day: WorkSpan = WorkSpan(300.0)
    week: WorkSpan = WorkSpan(3_600.0)
    all: WorkSpan = WorkSpan(600.0)


@dataclass(frozen=True)
class TextSample:
    """What it wrote at one moment, always choosing the likeliest token."""

    step: int  # when it began to write
    last_step: int  # when it had written everything: training goes on meanwhile
    time: float  # seconds since the epoch
    seconds: float  # that the writing took
    texts: tuple[str, ...]  # one for each prompt, without it


@dataclass(frozen=True)
class SamplesStatus:
    """Samples of the run, oldest first."""

    prompts: tuple[str, ...] = ()
    samples: tuple[TextSample, ...] = ()
    next_step: int | None = None  # the next one is due then; None: none is
    explanation: str = ""  # why none are written; "" where they are
