"""The status of a running node as text. Rows, units and meanings follow from the declarations of the status values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias, cast

MOST_ITEMS: Final = 10  # of a list
Schema: TypeAlias = Mapping[str, Any]
# The end of a name that repeats the unit, which the value shows.
UNIT_ENDINGS: Final = {"s": "_seconds", "bytes": "_bytes", "MB": "_mb", "nats/token": ""}
SIZES: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
LARGE: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))  # prefixes of FLOP


@dataclass(frozen=True)
class StatusRow:
    """One value of the status as text."""

    path: tuple[str, ...]  # the words of the label, beginning with the part of the status
    value: str
    meaning: str


class StatusText:
    """Shows responses that have the type of a status dataclass, one value per line."""

    def __init__(self, kind: type[Any]) -> None:
        from pydantic import TypeAdapter  # `neuroshard logs` uses this module, too, and must start fast

        self._schema: Schema = TypeAdapter(kind).json_schema(mode="serialization")

    def lines(self, answer: Schema, *, every_value: bool = False) -> list[str]:
        """The values that are declared as brief, or every value with its meaning."""
        rows = list(self._rows(self._schema, answer, (), every_value=every_value))
        width = max((len(" ".join(row.path)) for row in rows), default=0)
        lines: list[str] = []
        for before, row in zip([None, *rows], rows, strict=False):
            is_new_part = before is None or before.path[0] != row.path[0]
            if every_value and lines and is_new_part and len(row.path) > 1:
                lines.append("")
            meaning = f"  ({row.meaning})" if every_value and row.meaning else ""
            lines.append(f"{' '.join(row.path):{width}}  {row.value}{meaning}")
        return lines

    def _rows(
        self, schema: Schema, members: Schema, path: tuple[str, ...], *, every_value: bool
    ) -> Iterator[StatusRow]:
        """Rows for the members of one object of the status; `path` has the words above them."""
        for name, part in schema["properties"].items():
            kind = self._kind(part)
            if name not in members or not (every_value or part.get("brief") or self._has_brief(kind)):
                continue
            value = members[name]
            below = (*path, _words(name, part)) if every_value else (part.get("brief") or _words(name, part),)
            if isinstance(value, dict) and _is_declared(kind):
                whole = every_value or not self._has_brief(kind)
                yield from self._rows(kind, cast("Schema", value), below, every_value=whole)
                continue
            meaning = part.get("description", "")
            for text in self._texts(part, value, every_value=every_value):
                yield StatusRow(below, text, meaning)
                meaning = ""  # once, for the first item of a list

    def _texts(self, part: Schema, value: Any, *, every_value: bool) -> Iterator[str]:
        """The texts of a value: one for each text or object of a list; none if it is empty, unless all are wanted."""
        if isinstance(value, list) and value:
            items, kind = cast("list[object]", value), self._kind(part).get("items", {})
            texts = [self._item(kind, item, every_value=every_value) for item in items[:MOST_ITEMS]]
            if len(items) > MOST_ITEMS:
                texts.append(f"and {len(items) - MOST_ITEMS:,} more")
            is_long = isinstance(items[0], dict) or self._kind(kind) == {"type": "string"}
            yield from texts if is_long else [", ".join(texts)]
        elif value is None and "stale_when" in part:
            yield f"not known (hidden when {part['stale_when']})"
        elif value not in (None, "", [], {}):
            yield self._item(part, value, every_value=every_value)
        elif every_value:
            yield "none"

    def _item(self, part: Schema, value: Any, *, every_value: bool) -> str:
        """One value on one line. An object begins with its first member, which names it."""
        kind = self._kind(part)
        if not isinstance(value, dict):
            return _scalar(value, part.get("unit", ""), is_choice="enum" in kind)
        members = cast("Schema", value)
        if "properties" not in kind:
            return ", ".join(f"{name} {_scalar(item, '')}" for name, item in members.items())
        whole = every_value or not self._has_brief(kind)
        shown = [
            (_words(name, one) if whole else one.get("brief", ""), text)
            for name, one in kind["properties"].items()
            if (whole or one.get("brief")) and members.get(name) is not None
            for text in self._texts(one, members[name], every_value=False)
        ]
        if not _is_declared(kind):
            return ", ".join(f"{label} {text}" for label, text in shown)
        (_, first), *rest = shown or [("", "")]
        others = [text if len(rest) == 1 else f"{label} {text}" for label, text in rest]
        return f"{first}: {', '.join(others)}" if others else first

    def _kind(self, part: Schema) -> Schema:
        """The schema of a value that is not null, with its reference resolved."""
        case = next((one for one in part.get("anyOf", ()) if one != {"type": "null"}), part)
        return self._schema["$defs"][case["$ref"].rpartition("/")[2]] if "$ref" in case else case

    def _has_brief(self, kind: Schema) -> bool:
        """Whether an object, or an item of a list, has a member that is declared as brief, at any depth."""
        if "items" in kind:
            return self._has_brief(self._kind(kind["items"]))
        return any(one.get("brief") or self._has_brief(self._kind(one)) for one in kind.get("properties", {}).values())


def _scalar(value: object, unit: str, *, is_choice: bool = False) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return _number(value, unit)
        case _:
            return str(value).replace("_", " ") if is_choice else str(value)


def _number(value: float, unit: str) -> str:
    if unit == "s since 1970":
        return local_time(value)
    if unit == "0..1":
        return f"{value:.1%}"
    if unit in ("bytes", "bytes/s"):
        factor, prefixed = next((one for one in SIZES if abs(value) >= one[0]), (1.0, "bytes"))
        return f"{value / factor:,.4g} {prefixed}{unit.removeprefix('bytes')}"
    if unit.startswith("FLOP"):
        factor, prefix = next((one for one in LARGE if abs(value) >= one[0]), LARGE[-1])
        return f"{value / factor:,.4g} {prefix}{unit}"
    digits = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{digits} {unit}".rstrip()


def local_time(seconds: float) -> str:
    """A time since 1970 as date and time of this computer's time zone."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _words(name: str, part: Schema) -> str:
    """The label of a value: its name without the unit."""
    return name.removesuffix(UNIT_ENDINGS.get(part.get("unit", ""), "")).replace("_", " ")


def _is_declared(kind: Schema) -> bool:
    """Whether an object has a section or rows of its own. A range, for example, is one value."""
    declared = ("description", "unit", "brief", "stale_when")
    return any(fact in one for one in kind.get("properties", {}).values() for fact in declared)
