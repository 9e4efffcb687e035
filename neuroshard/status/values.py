"""Declarations of status values: the meaning, the unit, when a value is stale, and how it adds up over a swarm.

The REST responses, the OpenAPI document, /metrics and the rows of `neuroshard status` follow from the declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from math import isfinite
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_args, get_type_hints

from pydantic import Field, PlainSerializer, WithJsonSchema, computed_field
from pydantic.fields import ComputedFieldInfo, FieldInfo

# A measured number. JSON has no NaN and no infinity: the serializer writes null for them.
Number: TypeAlias = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})]
Name = TypeVar("Name", bound=str)
Property = TypeVar("Property")


class Stale(StrEnum):
    """Condition under which a value no longer describes the present. The API then shows null."""

    OLD_SNAPSHOT = "the snapshot is older than 30 s"
    NOT_TRAINING = "the node does not train, or the snapshot is older than 30 s"
    NETWORK_DOWN = "the network does not run, or the snapshot is older than 30 s"
    IDLE_PEER = "the peer does not train, or the snapshot is older than 30 s"


def about(
    description: str = "",
    unit: str = "",
    *,
    over_swarm: str = "",
    stale: Stale | None = None,
    gauge: str = "",
    counter: str = "",
    label: str = "",
    brief: str = "",
    alias: str | None = None,
) -> Any:  # Any: FieldInfo is what pydantic reads from Annotated
    """Declare a status value.

    /metrics shows every numeric value as a gauge, whose name follows from the field. `gauge` or `counter` gives it
    another name, without the prefix `neuroshard_`; `holders{state=ready}` adds a fixed label. With a name, a choice
    becomes one gauge for each of its values, and a tuple shows its length. `label` makes the value a label of all
    metrics of its dataclass; on counts by name, it is the label of the names. `neuroshard status` shows
    values that have a label for people in `brief`; with --all it shows every value. `alias` is the name in JSON.
    """
    facts = {"unit": unit, "over_swarm": over_swarm, "stale_when": stale or "", "gauge": gauge, "counter": counter}
    extra = _known(**facts, label=label, brief=brief)
    return Field(description=description or None, serialization_alias=alias, json_schema_extra=extra)


def derived(
    description: str,
    unit: str = "",
    *,
    stale: Stale | None = None,
    gauge: str = "",
    label: str = "",
    brief: str = "",
) -> Callable[[Property], Property]:
    """Declare a property as a status value that is computed from the others. The arguments are those of `about`.

    A property is stale because the fields are from which it is computed.
    """
    extra = _known(unit=unit, stale_when=stale or "", gauge=gauge, label=label, brief=brief)
    return computed_field(description=description, json_schema_extra=extra)


def _known(**facts: str) -> dict[str, Any] | None:
    return {name: str(fact) for name, fact in facts.items() if fact} or None


@dataclass(frozen=True)
class Declaration:
    """The declaration of one field or computed value of a status dataclass. Facts that were not given are empty."""

    name: str
    is_computed: bool = False
    description: str = ""
    unit: str = ""
    over_swarm: str = ""
    stale_when: str = ""
    gauge: str = ""
    counter: str = ""
    label: str = ""
    brief: str = ""


@cache
def declarations(kind: type[Any]) -> tuple[Declaration, ...]:
    """The values of a status dataclass: its fields in order, then the computed ones. Empty for any other type."""
    if not is_dataclass(kind):
        return ()
    hints = get_type_hints(kind, include_extras=True)
    infos = [(one.name, _field_info(hints[one.name])) for one in fields(kind)]
    if not any(info for _, info in infos):
        return ()
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    computed = ((name, getattr(member, "decorator_info", None)) for name, member in members.items())
    found = [_declaration(name, info, is_computed=False) for name, info in infos]
    return (
        *found,
        *(_declaration(name, info, is_computed=True) for name, info in computed if isinstance(info, ComputedFieldInfo)),
    )


def _field_info(hint: object) -> FieldInfo | None:
    return next((fact for fact in getattr(hint, "__metadata__", ()) if isinstance(fact, FieldInfo)), None)


def _declaration(name: str, info: FieldInfo | ComputedFieldInfo | None, *, is_computed: bool) -> Declaration:
    extra = cast("dict[str, Any] | None", info.json_schema_extra) if info else None
    return Declaration(name, is_computed, (info and info.description) or "", **(extra or {}))


@cache
def perishable(kind: type[Any]) -> Mapping[str, str]:
    """Fields of a status dataclass that can be stale, by name, with their condition.

    The condition is empty where only parts of the field's value can be stale.
    """
    conditions = {one.name: one.stale_when for one in declarations(kind)}
    hints = get_type_hints(kind)
    found = {one.name: conditions.get(one.name, "") for one in fields(kind)}
    return {name: stale for name, stale in found.items() if stale or any(map(perishable, _dataclasses_in(hints[name])))}


def _dataclasses_in(hint: Any) -> Iterator[type[Any]]:
    """The dataclasses in a type hint, such as `Part` in `tuple[Part, ...] | None`."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from _dataclasses_in(argument)


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


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 step", "2 steps", "1,200 batches", "2 copies"."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
