"""Declarations of status values: the meaning, the unit, when a value is stale, and how it adds up over a swarm.

The REST responses and the OpenAPI document are generated from the declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from math import isfinite
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_type_hints

from pydantic import Field, PlainSerializer, WithJsonSchema
from pydantic.fields import FieldInfo

# A measured number. JSON has no NaN and no infinity: the serializer writes null for them.
Number: TypeAlias = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})]
Name = TypeVar("Name", bound=str)


class Stale(StrEnum):
    """Condition under which a value no longer describes the present. The API then shows null."""

    OLD_SNAPSHOT = "the snapshot is older than 30 s"
    NOT_TRAINING = "the node does not train, or the snapshot is older than 30 s"
    NETWORK_DOWN = "the network does not run, or the snapshot is older than 30 s"
    IDLE_PEER = "the peer does not train, or the snapshot is older than 30 s"


class MetricKind(StrEnum):
    """Type of a Prometheus metric."""

    GAUGE = "gauge"
    COUNTER = "counter"


def about(
    description: str = "",
    unit: str = "",
    *,
    over_swarm: str = "",
    stale: Stale | None = None,
    gauge: str = "",
    counter: str = "",
) -> Any:  # Any: FieldInfo is what pydantic reads from Annotated
    """Declare a status value. `gauge` or `counter` is its name in /metrics, without the prefix `neuroshard_`."""
    facts = {"unit": unit, "over_swarm": over_swarm, "stale_when": stale or "", "gauge": gauge, "counter": counter}
    known: dict[str, Any] = {name: str(fact) for name, fact in facts.items() if fact}
    return Field(description=description or None, json_schema_extra=known or None)


def facts_of(declared: FieldInfo) -> dict[str, str]:
    """The facts that `about` stored in addition to the description; facts that were not given are absent."""
    extra = cast("dict[str, str] | None", declared.json_schema_extra)
    return extra or {}


@cache
def declarations(kind: type[Any]) -> dict[str, FieldInfo]:
    """The declared fields of a status dataclass by name."""
    hints = get_type_hints(kind, include_extras=True)
    found = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
    return {name: fact for name, facts in found for fact in facts if isinstance(fact, FieldInfo)}


EXCLUDED: Any = Field(exclude=True)  # a part of the snapshot that has a route of its own, or that stays in the process


def counted(pairs: Iterable[tuple[Name, int]]) -> dict[Name, int]:
    """Counts by name. Names that appear twice are added up."""
    counts: Counter[Name] = Counter()
    for name, count in pairs:
        counts[name] += count
    return dict(counts)


Counts: TypeAlias = Annotated[tuple[tuple[str, int], ...], PlainSerializer(counted, return_type=dict[str, int])]


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are finite numbers, in order; None, NaN and infinities are left out."""
    return [value for value in values if value is not None and isfinite(value)]
