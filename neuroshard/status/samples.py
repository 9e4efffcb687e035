"""What the model in training wrote at some of its steps, to the same prompts: frozen values for the snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
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
    samples: tuple[Sample, ...] = ()
    next_step: int | None = None  # the next one is due then; None: none is
    explanation: str = ""  # why none are written; "" where they are
