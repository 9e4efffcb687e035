"""When samples are due, and that only samples are read as such."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from neuroshard.status.history import TextSample
from neuroshard.training.text_generation import (
    MOST_CHARACTERS,
    MOST_SAMPLES,
    PROMPTS,
    SHARE,
    StoredSamples,
    is_due,
    next_mark,
)

TEXTS = ("of of", "the the", "in a")


def sample(step: int, seconds: float = 0.5) -> TextSample:
    return TextSample(step, step, 1_000.0 + step, seconds, TEXTS)


def test_the_marks_are_sparse() -> None:
    marks = [next_mark(None)]
    while marks[-1] < 20_000:
        marks.append(next_mark(marks[-1]))
    assert marks == [0, 10, 100, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000]
    assert next_mark(4_711) == 8_000


def test_the_first_is_due_at_once_and_the_next_when_it_is_paid_for() -> None:
    assert is_due(0, (), 0.0)
    assert not is_due(9, (sample(0),), 1e9)
    assert is_due(10, (sample(0),), 100.0)
    assert not is_due(10, (sample(0),), 99.0)
    assert not is_due(10**9, tuple(sample(0) for _ in range(MOST_SAMPLES)), 1e12)


@given(floats(0.001, 100), floats(0.001, 20))
def test_writing_stays_below_its_share(price: float, step_seconds: float) -> None:
    samples: tuple[TextSample, ...] = (sample(0, price),)
    for power in range(1, 400):
        steps = int(1.1**power)
        if is_due(steps, samples, steps * step_seconds):
            samples = (*samples, sample(steps, price))
            assert sum(one.seconds for one in samples) <= SHARE * steps * step_seconds


@given(integers(0, 10**12))
def test_a_mark_lies_ahead(step: int) -> None:
    assert step < next_mark(step) <= max(10 * step, 2 * step + 10)


def read(content: object) -> StoredSamples:
    return msgspec.json.decode(msgspec.json.encode(content), type=StoredSamples)


def test_what_was_written_down_is_read_again() -> None:
    stored = StoredSamples(PROMPTS, (sample(0), TextSample(10, 12, 5.0, 0.25, ("\u00e9\n", "", "x" * MOST_CHARACTERS))))
    assert read(stored) == stored


ROW = {"step": 0, "last_step": 0, "time": 1.0, "seconds": 0.5, "texts": list(TEXTS)}


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        {"prompts": list(PROMPTS), "samples": [], "more": 1},
        {"prompts": [], "samples": []},
        {"prompts": [1, 2, 3], "samples": []},
        {"prompts": list(PROMPTS), "samples": [ROW] * (MOST_SAMPLES + 1)},
        {"prompts": list(PROMPTS), "samples": [{**ROW, "step": 5, "last_step": 4}]},
        {"prompts": list(PROMPTS), "samples": [{**ROW, "texts": ["one"]}]},
        {"prompts": list(PROMPTS), "samples": [{**ROW, "texts": ["x" * (MOST_CHARACTERS + 1), "", ""]}]},
        {"prompts": list(PROMPTS), "samples": [{**ROW, "seconds": -1.0}]},
    ],
)
def test_other_contents_are_refused(damaged: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        read(damaged)
