"""When the model in training writes to the pinned prompts, and how what it wrote is kept. Pure."""

from __future__ import annotations

from math import isfinite
from typing import Final

from neuroshard.status.samples import Sample
from neuroshard.types import JsonValue

PROMPTS: Final = ("Once upon a time", "The function returns", "The capital of France is")
MOST_TOKENS: Final = 32  # of each text
MOST_CHARACTERS: Final = 400
MOST_SAMPLES: Final = 64
SHARE: Final = 0.01  # of the time of training that the writing may take
FORMAT: Final = 1
_FIRST_MARKS: Final = (0, 10, 100, 1_000)


class MalformedSamplesError(ValueError):
    """What was read are no samples of a run."""


def next_mark(last_step: int | None) -> int:
    """The step at which the next sample is due: 0, 10, 100, 1,000, and from there on each double one."""
    if last_step is None:
        return _FIRST_MARKS[0]
    for mark in _FIRST_MARKS:
        if mark > last_step:
            return mark
    mark = 2 * _FIRST_MARKS[-1]
    while mark <= last_step:
        mark *= 2
    return mark


def is_due(steps: int, samples: tuple[Sample, ...], trained_seconds: float) -> bool:
    """Whether a model after `steps` steps, which took `trained_seconds`, should write now.

    The first sample has no price yet; each later one waits until all of them stay below their share of the time.
    """
    if not samples:
        return True
    if len(samples) >= MOST_SAMPLES or steps < next_mark(samples[-1].last_step):
        return False
    spent = sum(sample.seconds for sample in samples) + samples[-1].seconds
    return spent <= SHARE * trained_seconds


def samples_to_json(prompts: tuple[str, ...], samples: tuple[Sample, ...]) -> dict[str, JsonValue]:
    """All of them; at most about 200 kB as text."""
    rows = [[s.step, s.last_step, s.time, round(s.seconds, 3), list(s.texts)] for s in samples]
    return {"format": FORMAT, "prompts": list(prompts), "samples": rows}


def samples_from_json(value: JsonValue) -> tuple[tuple[str, ...], tuple[Sample, ...]]:
    """Prompts and samples that were written down. Raises MalformedSamplesError."""
    match value:
        case {"format": 1, "prompts": [*prompts], "samples": [*rows]} if len(rows) <= MOST_SAMPLES:
            texts = _texts(prompts)
            if not 1 <= len(texts) <= len(PROMPTS):
                raise MalformedSamplesError(f"{len(texts)} prompts, not 1 to {len(PROMPTS)}")
            return texts, tuple(_sample(row, len(texts)) for row in rows)
        case _:
            raise MalformedSamplesError("it has other members than samples of a run")


def _sample(row: JsonValue, texts: int) -> Sample:
    match row:
        case [int() as step, int() as last, int() | float() as time, int() | float() as seconds, [*written]] if (
            len(written) == texts and 0 <= step <= last and isfinite(time) and isfinite(seconds) and seconds >= 0
        ):
            return Sample(step, last, float(time), float(seconds), _texts(written))
        case _:
            raise MalformedSamplesError("a sample does not hold what it should")


def _texts(values: list[JsonValue]) -> tuple[str, ...]:
    texts = tuple(value for value in values if isinstance(value, str) and len(value) <= MOST_CHARACTERS)
    if len(texts) != len(values):
        raise MalformedSamplesError("a text is too long, or none")
    return texts
