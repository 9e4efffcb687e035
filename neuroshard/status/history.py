"""History in the snapshot: work over time, sample texts of the model at earlier steps, and the newest events.

Its size is bounded. This module must not load PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from neuroshard.status.values import Number, about


@dataclass(frozen=True)
class WorkDone:
    """Work of this computer in one period."""

    start: Annotated[float, about("begin of the period", "s since 1970")]
    tokens: Annotated[int, about("tokens that this computer trained on", "tokens")] = 0
    steps: Annotated[int, about("learning steps of this computer")] = 0
    bytes_sent: Annotated[int, about(unit="bytes")] = 0
    bytes_received: Annotated[int, about(unit="bytes")] = 0
    training_seconds: Annotated[float, about("time in which this computer trained", "s")] = 0.0
    loss: Annotated[Number | None, about("mean over the tokens; null: no loss was reported", "nats/token")] = None


@dataclass(frozen=True)
class WorkSpan:
    """A span of time in periods of equal width, oldest first. Periods without work are left out."""

    width_seconds: float
    points: tuple[WorkDone, ...] = ()


@dataclass(frozen=True)
class WorkHistoryStatus:
    """Work for every run that this data folder has served."""

    total: WorkDone | None = None  # `start` is the beginning of the record; None: no work yet
    day: WorkSpan = WorkSpan(300.0)
    week: WorkSpan = WorkSpan(3_600.0)
    all: WorkSpan = WorkSpan(600.0)


@dataclass(frozen=True)
class TextSample:
    """Texts that the model wrote at one step, always with the likeliest token."""

    step: Annotated[int, about("step at which writing began")]
    last_step: Annotated[int, about("step at which writing ended; training continues meanwhile")]
    time: Annotated[float, about(unit="s since 1970")]
    seconds: Annotated[float, about("duration of the writing", "s")]
    texts: Annotated[tuple[str, ...], about("one for each prompt, without the prompt")]


@dataclass(frozen=True)
class SamplesStatus:
    """Texts of the model in training at sparse steps of the run, oldest first."""

    prompts: tuple[str, ...] = ()
    samples: tuple[TextSample, ...] = ()
    next_step: Annotated[int | None, about("step of the next sample; null: none will be written")] = None
    explanation: Annotated[str, about("reason why none are written; empty where they are")] = ""


class FeedTone(StrEnum):
    """Meaning of an event for the owner."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class FeedEvent:
    """One event of the node or its run, in a sentence."""

    time: Annotated[float, about("time at which it happened or began", "s since 1970")]
    tone: FeedTone
    sentence: str
    subject: Annotated[str, about("what it is about; a later event of the same subject continues an open one")] = ""
    is_open: Annotated[bool, about("a later event can take its place")] = False
    first_round: Annotated[int, about("first of the rounds that it stands for; 0: none")] = 0
