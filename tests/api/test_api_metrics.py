"""The metrics follow from the declarations of the status values."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, nan
from typing import Annotated, Any, cast

import pytest

from neuroshard.api.metrics import Sample, metrics_text, samples_of, snapshot_metrics
from neuroshard.api.rendering import as_python
from neuroshard.status.freshness import fresh
from neuroshard.status.snapshot import NodeStatus
from neuroshard.status.values import Number, about, derived
from tests.worlds.statuses import FIRST_STAGE, after_rounds, in_a_pipeline, training_status


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    place: Annotated[str, about(label="room")]
    size_mb: Annotated[int, about("its size", "MB")]
    rate: Annotated[Number | None, about(unit="bytes/s")] = None


@dataclass(frozen=True)
class Whole:
    count: Annotated[int, about("things", counter="things")] = 2
    is_new: bool = True
    colour: Annotated[Colour, about(gauge="colour")] = Colour.BLUE
    taste: Colour = Colour.RED
    lasted_seconds: Annotated[Number, about(unit="s")] = 1.5
    ended_at: Annotated[Number, about(unit="s since 1970")] = 9.0
    name: str = "text is no metric"
    waiting: Annotated[tuple[str, ...], about(gauge="queue{state=waiting}")] = ("a", "b")
    refused: Annotated[tuple[tuple[str, int], ...], about(counter="refused", label="reason")] = (
        ("late", 1),
        ("late", 2),
    )
    parts: tuple[Part, ...] = (Part("hall", 3, 5.0), Part("attic", 4))
    curve: tuple[float, ...] = (1.0, 2.0)

    @derived("twice the count")
    @property
    def double(self) -> int:
        return 2 * self.count


def test_every_number_becomes_a_metric_by_its_declaration() -> None:
    found = {(one.name, one.labels): one for one in samples_of(Whole())}
    assert {key: one.value for key, one in found.items()} == {
        ("things", ()): 2,
        ("is_new", ()): 1,
        ("colour", (("colour", "red"),)): 0,
        ("colour", (("colour", "blue"),)): 1,
        ("lasted_seconds", ()): 1.5,
        ("ended_at_timestamp_seconds", ()): 9.0,
        ("queue", (("state", "waiting"),)): 2,
        ("refused", (("reason", "late"),)): 3,
        ("parts_size_bytes", (("room", "hall"),)): 3e6,
        ("parts_size_bytes", (("room", "attic"),)): 4e6,
        ("parts_rate_bytes_per_second", (("room", "hall"),)): 5.0,
        ("double", ()): 4,
    }
    size = found["parts_size_bytes", (("room", "hall"),)]
    assert size == Sample(
        "parts_size_bytes", is_counter=False, meaning="size: its size [bytes]", labels=size.labels, value=3e6
    )
    assert {one.name for one in found.values() if one.is_counter} == {"things", "refused"}


def everything() -> NodeStatus:
    """A node among others with stages, rounds and a pipeline."""
    driving = in_a_pipeline()
    return replace(after_rounds(FIRST_STAGE), stages=driving.stages, pipeline=driving.pipeline)


def numbers_in(value: Any) -> list[float]:
    """Numbers of a JSON object and of the objects in it; its lists have no metrics."""
    if isinstance(value, dict):
        return [number for part in cast("dict[str, Any]", value).values() for number in numbers_in(part)]
    return [value] if isinstance(value, int | float) else []


def test_the_status_has_no_number_without_a_metric() -> None:
    status = everything()
    plain = as_python(status)
    assert isinstance(plain, dict)
    declared = [plain[name] for name in plain if name not in {"architecture", "layers", "model", "contribution"}]
    values = {number for part in declared for number in numbers_in(part)}
    shown = {sample.value for sample in samples_of(status)}
    assert len(values) >= 30
    assert not {number for number in values if number not in shown and number * 1e6 not in shown}


def test_names_are_prometheus_names_with_one_kind_each() -> None:
    families = list(snapshot_metrics(everything(), 1.0))
    assert len({family.name for family in families}) == len(families) > 100
    for family in families:
        assert re.fullmatch(r"neuroshard_[a-z][a-z0-9_]*", family.name)
        assert len({frozenset(sample.labels) for sample in family.samples}) == 1
        assert family.documentation


@pytest.mark.parametrize("age", [1.0, 31.0])
def test_a_value_that_is_stale_or_not_finite_is_absent(age: float) -> None:
    status = replace(training_status(), resources=replace(training_status().resources, cpu_cores=0.5))
    text = metrics_text(fresh(status, age), (), age).decode()
    assert ("neuroshard_tokens_per_second 900.0" in text) is (age < 30)
    assert ("neuroshard_cpu_cores 0.5" in text) is (age < 30)
    assert "neuroshard_steps_total 20.0" in text
    for number in (nan, inf, None):
        training = replace(status.training, loss=number)
        assert "neuroshard_loss " not in metrics_text(replace(status, training=training), (), age).decode()
