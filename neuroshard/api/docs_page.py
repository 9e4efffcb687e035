"""The page /docs: every route of the OpenAPI document as plain HTML, without scripts and without other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
_REFERENCE = "#/components/schemas/"
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>API - NeuroShard</title></head><body><main>
<h1>The API of this node</h1>
"""


def docs_page(document: Schema) -> str:
    """Return the page that describes an OpenAPI document."""
    info = document["info"]
    parts = [_HEAD, f"<p>Version {escape(info['version'])}. {_text(info.get('description', ''))}</p>"]
    parts.append('<p>The same as <a href="/openapi.json">OpenAPI document</a>. <a href="/">Open the dashboard</a>.</p>')
    parts.append("<h2>Routes</h2>")
    for path, operations in document["paths"].items():
        parts += [_operation(method, path, operation) for method, operation in operations.items()]
    parts.append("<h2>Bodies</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        described = _text(schema.get("description", ""))
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{described}</p>{_members(schema)}')
    return "\n".join([*parts, "</main></body></html>\n"])


def _operation(method: str, path: str, operation: Schema) -> str:
    """Describe one operation: its text, parameters, body and successful response."""
    parts = [f"<h3><code>{method.upper()} {escape(path)}</code></h3>"]
    parts.append(f"<p>{_text(operation.get('description') or operation.get('summary', ''))}</p>")
    rows = [
        _row(parameter["name"], _kind(parameter["schema"]), parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    if rows:
        parts.append(_table(rows))
    parts += [f"<p>Body: {kind}</p>" for kind in _contents(operation.get("requestBody", {}))]
    for status, answer in operation["responses"].items():
        if status < "300":
            parts += [f"<p>{status}: {kind}</p>" for kind in _contents(answer)]
    return "\n".join(parts)


def _contents(holder: Schema) -> Iterator[str]:
    for media_type, content in holder.get("content", {}).items():
        schema = content.get("schema")
        yield _kind(schema) if schema else escape(media_type)


def _members(schema: Schema) -> str:
    """Table of the members of a schema, or its type if it has none."""
    members = schema.get("properties", {}).items()
    rows = [_row(name, _kind(member), member.get("description", "")) for name, member in members]
    return _table(rows) if rows else f"<p>{_kind(schema)}</p>"


def _kind(schema: Schema) -> str:
    """Type of a value, with links to the bodies."""
    if reference := str(schema.get("$ref", "")):
        name = escape(reference.removeprefix(_REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(_kind(option) for option in schema[joined])
    if "enum" in schema:
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = ", ".join(f"{word} {schema[word]}" for word in ("minimum", "maximum", "maxLength") if word in schema)
    return escape(str(schema.get("type", "any"))) + (f" ({bounds})" if bounds else "")


def _table(rows: list[str]) -> str:
    head = "<thead><tr><th>Name</th><th>Type</th><th>Meaning</th></tr></thead>"
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _row(name: str, kind: str, meaning: str) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{_text(meaning)}</td></tr>"


def _text(text: str) -> str:
    """Escape a text; `words` in backquotes become code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))
