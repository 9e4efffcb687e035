"""The snapshot and the counters as Prometheus text. The metrics follow from the declarations of the status values.

Each request has its own registry, so that nothing is global.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import isfinite
from typing import Any, Final, TypeAlias, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from neuroshard.api.rendering import encodable
from neuroshard.status.snapshot import NodeStatus
from neuroshard.status.values import Declaration, counted, declarations
from neuroshard.telemetry.counters import CounterValue

PREFIX: Final = "neuroshard_"
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
BYTES_PER_MB = 1e6
# Prometheus' names end with the unit. A value in MB is exported in bytes.
UNIT_SUFFIXES: Final = {
    "s": "_seconds",
    "s since 1970": "_timestamp_seconds",
    "bytes": "_bytes",
    "MB": "_bytes",
    "bytes/s": "_bytes_per_second",
    "tokens/s": "_tokens_per_second",
}
Labels: TypeAlias = tuple[tuple[str, str], ...]


def metrics_text(status: NodeStatus, counters: Sequence[CounterValue], age_seconds: float) -> bytes:
    """Encode all metrics in Prometheus' text format. `age_seconds` is the age of the snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values([*snapshot_metrics(status, age_seconds), *_counted(counters)]))
    return generate_latest(registry)


class _Values(Collector):
    """Passes finished values to a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry holds only this collector, so there are no duplicates to check."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _counted(counters: Sequence[CounterValue]) -> Iterator[Metric]:
    for counter in counters:
        yield CounterMetricFamily(f"{PREFIX}events_{counter.name}", counter.help, counter.value)


@dataclass(frozen=True)
class Sample:
    """One number of a scrape."""

    name: str
    is_counter: bool
    meaning: str
    labels: Labels
    value: float


def snapshot_metrics(status: NodeStatus, age_seconds: float) -> Iterator[Metric]:
    """Gauges and counters of one snapshot. Values that are unknown or stale (not finite) are left out."""
    yield InfoMetricFamily(PREFIX + "node", "This node", {"version": status.version, "node_id": status.node_id or ""})
    status = replace(status, uptime_seconds=status.uptime_seconds + age_seconds)
    if status.data is not None and not status.data.source:  # a node that reads no data
        status = replace(status, data=None)
    by_name: dict[str, list[Sample]] = {}
    age = Sample("snapshot_age_seconds", is_counter=False, meaning="age of the snapshot", labels=(), value=age_seconds)
    for sample in (age, *samples_of(status)):
        if isfinite(sample.value):
            by_name.setdefault(sample.name, []).append(sample)
    yield from (_family(samples) for samples in by_name.values())


def _family(samples: list[Sample]) -> Metric:
    """All samples of one name. Fields that share it have the same labels; the help text joins their meanings."""
    first = samples[0]
    kind = CounterMetricFamily if first.is_counter else GaugeMetricFamily
    help_text = "; ".join(dict.fromkeys(sample.meaning for sample in samples))
    family = kind(PREFIX + first.name, help_text[:1].upper() + help_text[1:], labels=[name for name, _ in first.labels])
    for sample in samples:
        family.add_metric([encodable(value) for _, value in sample.labels], sample.value)
    return family


def samples_of(value: object, path: str = "", labels: Labels = ()) -> Iterator[Sample]:
    """Every number in a status dataclass and in its parts; `path` begins the names that are not declared."""
    declared = declarations(type(value))
    keys = {one.label: getattr(value, one.name) for one in declared}
    labels += tuple((label, str(key)) for label, key in keys.items() if label and isinstance(key, str | int))
    for one in declared:
        item = getattr(value, one.name)
        if not (one.label and isinstance(item, str | int)):
            yield from _samples(one, item, path, labels)


def _samples(declared: Declaration, item: Any, path: str, labels: Labels) -> Iterator[Sample]:
    name, _, fixed = (declared.gauge or declared.counter).partition("{")
    if fixed:  # name{label=value}
        label, _, value = fixed.removesuffix("}").partition("=")
        labels += ((label, value),)

    def sample(number: float, *more: tuple[str, str]) -> Sample:
        shown = name or _name(declared, path)
        return Sample(shown, bool(declared.counter), _meaning(declared), (*labels, *more), number)

    match item:
        case Enum() if name:
            yield from (sample(member is item, (declared.name, str(member.value))) for member in type(item))
        case bool() | int() | float():
            yield sample(item * BYTES_PER_MB if declared.unit == "MB" else item)
        case tuple() if declared.label:
            counts = cast("tuple[tuple[str, int], ...]", item)
            yield from (sample(count, (declared.label, str(key))) for key, count in counted(counts).items())
        case tuple() if name:
            yield sample(len(cast("tuple[object, ...]", item)))
        case tuple():
            parts = cast("tuple[object, ...]", item)
            labelled = [one for one in parts if any(part.label for part in declarations(type(one)))]
            yield from (found for one in labelled for found in samples_of(one, f"{path}{declared.name}_", labels))
        case _:
            yield from samples_of(item, f"{path}{declared.name}_", labels)


def _meaning(declared: Declaration) -> str:
    words = declared.name.removesuffix("_mb").replace("_", " ")
    words += f": {declared.description}" if declared.description else ""
    unit = "bytes" if declared.unit == "MB" else declared.unit
    return f"{words} [{unit}]" if unit else words


def _name(declared: Declaration, path: str) -> str:
    """Name of a value that declares none: its path in the status and its unit."""
    suffix = UNIT_SUFFIXES.get(declared.unit, "")
    stem = declared.name.removesuffix("_mb")
    return path + stem + ("" if f"_{stem}".endswith(suffix) else suffix)
