"""What all metrics share: the prefix of their names, and gauges of values that may be unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

PREFIX: Final = "neuroshard_"


def known_gauges(values: Iterable[tuple[str, str, float | None]]) -> Iterator[Metric]:
    """A gauge of each (name, help, value) whose value is a number."""
    for name, help_text, value in values:
        if value is not None and isfinite(value):
            yield GaugeMetricFamily(PREFIX + name, help_text, value)
