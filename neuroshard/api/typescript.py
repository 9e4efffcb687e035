"""TypeScript types of the API's responses, for the dashboard: `python -m neuroshard.api.typescript web/src/api`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from neuroshard.api.arrival import FolderListBody
from neuroshard.api.members import MadeInvitationBody, MembersBody
from neuroshard.api.model_tokens import ModelTokensBody, NewTokenBody
from neuroshard.api.presets import PresetsBody
from neuroshard.api.requests import CommandBody, SessionBody
from neuroshard.api.routes import SNAPSHOT_ROUTES, Health, LogLines
from neuroshard.api.setup import FinishedBody, SetupBody
from neuroshard.status.machines import MachineList
from neuroshard.status.snapshot import NodeStatus
from neuroshard.status.summaries import WorkSummary

HEADER: Final = """\
// {subject}, generated from the declarations in neuroshard/status and neuroshard/api. Do not edit.
// After a change there: python -m neuroshard.api.typescript web/src/api
"""
OTHER_RESPONSES: Final[tuple[type, ...]] = (
    WorkSummary, LogLines, Health, SessionBody, CommandBody, MachineList,
)  # fmt: skip
OWNER_RESPONSES: Final[tuple[type, ...]] = (
    SetupBody, FinishedBody, FolderListBody, MembersBody, MadeInvitationBody, PresetsBody,
    ModelTokensBody, NewTokenBody,
)  # fmt: skip
LONGEST_LINE: Final = 130
SIMPLE: Final = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def response_schemas() -> dict[str, Any]:
    """JSON schemas of all responses and their parts, by name."""
    kinds = (*(kind for _, kind, _ in SNAPSHOT_ROUTES), *OTHER_RESPONSES, *OWNER_RESPONSES)
    _, schema = TypeAdapter[Any].json_schemas([(kind, "serialization", TypeAdapter(kind)) for kind in kinds])
    return schema["$defs"]


def typescript() -> dict[str, str]:
    """The files by name: the status, which is also an event, the owner's pages, and the other responses."""
    schemas = response_schemas()
    status = used_by(NodeStatus.__name__, schemas)
    roots = [*(kind for _, kind, _ in SNAPSHOT_ROUTES), *OTHER_RESPONSES]
    others = {name for root in roots for name in used_by(root.__name__, schemas)} - status
    owners = {name for root in OWNER_RESPONSES for name in used_by(root.__name__, schemas)} - status - others
    return {
        "status.ts": _file("The node's status", schemas, status),
        "bodies.ts": _file(
            "The wizard's and the owner's responses", schemas, owners, (("status", status), ("responses", others))
        ),
        "responses.ts": _file("The other responses of the API", schemas, others, (("status", status),)),
        "explanations.ts": _explanations(schemas),
    }


def _explanations(schemas: Mapping[str, Any]) -> str:
    """The meaning of every number of the status, by its path in the JSON of GET /api/status."""
    pairs = sorted(explained(schemas[NodeStatus.__name__], schemas))
    lines = (f"  {json.dumps(path)}: {json.dumps(text, ensure_ascii=False)}," for path, text in pairs)
    subject = HEADER.format(subject="The meaning of every number of the status by its path")
    return "\n".join([subject, "export const EXPLANATIONS: Record<string, string> = {", *lines, "};", ""])


def explained(schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The numbers in a schema as pairs of path and meaning. A list adds "[]" to the path."""
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        for case in part.get("anyOf", [part]):
            is_list = case.get("type") == "array"
            inner = case.get("items", {}) if is_list else case
            if "$ref" in inner:
                found = schemas[inner["$ref"].rpartition("/")[2]]
                yield from explained(found, schemas, f"{here}[]" if is_list else here)
        if {"number", "integer"} & {case.get("type") for case in _cases(part)}:
            unit = f" [{part['unit']}]" if "unit" in part else ""
            text = part.get("description") or name.replace("_", " ")
            yield here, f"{text[:1].upper()}{text[1:]}{unit}"


def _cases(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema, through nested ones."""
    if "anyOf" not in schema:
        yield schema
    for case in schema.get("anyOf", ()):
        yield from _cases(case)


def used_by(name: str, schemas: Mapping[str, Any]) -> set[str]:
    """Names of a schema and of all schemas that it uses."""
    found, waiting = set[str](), {name}
    while waiting:
        one = waiting.pop()
        found.add(one)
        waiting |= references(schemas[one]) - found
    return found


def references(schema: Mapping[str, Any]) -> set[str]:
    """Names to which a schema refers."""
    return set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema)))


def _file(
    subject: str, schemas: Mapping[str, Any], names: Set[str], others: Sequence[tuple[str, Set[str]]] = ()
) -> str:
    """One file of declarations; `others` are files from which it imports, with the names that they declare."""
    used = {reference for name in names for reference in references(schemas[name])}
    imports = list[str]()
    for file, declared in others:
        if shared := sorted(used & declared):
            imports += ["import type {", *(f"  {name}," for name in shared), f'}} from "./{file}";', ""]
    lines = (line for name in sorted(names) for line in declaration_of(name, schemas[name]))
    return "\n".join([HEADER.format(subject=subject), *imports, *lines])


def declaration_of(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Lines that declare one named schema, with an empty line at the end."""
    if "description" in schema:
        yield f"/** {' '.join(schema['description'].split())} */"
    if "properties" in schema:
        yield f"export interface {name} {{"
        for member, part in schema["properties"].items():
            line, comment = f"  {member}: {type_of(part)};", comment_of(part)
            if len(line) + len(comment) > LONGEST_LINE:
                yield f"  /** {comment} */"
            yield line if not comment or len(line) + len(comment) > LONGEST_LINE else f"{line} // {comment}"
        yield "}"
    else:
        yield f"export type {name} = {type_of(schema)};"
    yield ""


def comment_of(schema: Mapping[str, Any]) -> str:
    """Meaning and unit of a value, and the condition under which it is stale."""
    unit = f"[{schema['unit']}]" if "unit" in schema else ""
    nothing = "empty" if schema.get("type") == "array" else "null"
    stale = f"; {nothing}: {schema['stale_when']}" if "stale_when" in schema else ""
    return f"{schema.get('description', '')} {unit}".strip() + stale


def type_of(schema: Mapping[str, Any]) -> str:
    """The TypeScript type of a JSON schema; `unknown` for any JSON value."""
    match schema:
        case {"$ref": str(path)}:
            name = path.rpartition("/")[2]
        case {"anyOf": [*cases]}:
            name = " | ".join(dict.fromkeys(type_of(one) for case in cases for one in case.get("anyOf", [case])))
        case {"const": value}:
            name = json.dumps(value)
        case {"enum": [*values]}:
            name = " | ".join(json.dumps(value) for value in values)
        case {"type": "array", "items": item}:
            inner = type_of(item)
            name = f"({inner})[]" if " | " in inner else f"{inner}[]"
        case {"type": "object", "propertyNames": keys, "additionalProperties": item}:
            name = f"Partial<Record<{type_of(keys)}, {type_of(item)}>>"
        case {"type": "object", "additionalProperties": {**item}}:
            name = f"Record<string, {type_of(item)}>"
        case _:
            name = SIMPLE.get(schema.get("type", ""), "unknown")
    return name


if __name__ == "__main__":
    for file_name, content in typescript().items():
        Path(sys.argv[1], file_name).write_text(content, encoding="utf-8", newline="\n")
