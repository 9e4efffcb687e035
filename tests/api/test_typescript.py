"""The dashboard's types follow from the declarations of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuroshard.api.typescript import comment_of, declaration_of, type_of, typescript

FOLDER = Path(__file__).parents[2] / "web" / "src" / "api"


def test_the_types_of_the_dashboard_are_up_to_date() -> None:
    there = {name: (FOLDER / name).read_text(encoding="utf-8") for name in typescript()}
    assert there == typescript(), "run: python -m neuroshard.api.typescript web/src/api"


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer"}, "number"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number | null"),
        ({"anyOf": [{"anyOf": [{"type": "number"}, {"type": "null"}]}, {"type": "null"}]}, "number | null"),
        ({"anyOf": [{"$ref": "#/$defs/RunStatus"}, {"type": "null"}]}, "RunStatus | null"),
        ({"type": "array", "items": {"type": "string"}}, "string[]"),
        ({"type": "array", "items": {"enum": ["a", "b"], "type": "string"}}, '("a" | "b")[]'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "Record<string, number>"),
        (
            {"type": "object", "propertyNames": {"$ref": "#/$defs/Kind"}, "additionalProperties": {"type": "integer"}},
            "Partial<Record<Kind, number>>",
        ),
        ({"const": "day", "type": "string"}, '"day"'),
        ({}, "unknown"),
    ],
)
def test_a_schema_becomes_a_type(schema: dict[str, Any], shown: str) -> None:
    assert type_of(schema) == shown


def test_meaning_unit_and_staleness_are_comments() -> None:
    rate = {"type": "number", "description": "sent", "unit": "bytes/s", "stale_when": "the network is down"}
    lines = list(declaration_of("Rates", {"description": "Rates of\n  a node.", "properties": {"rate": rate}}))
    assert lines == [
        "/** Rates of a node. */",
        "export interface Rates {",
        "  rate: number; // sent [bytes/s]; null: the network is down",
        "}",
        "",
    ]


def test_a_stale_list_is_empty() -> None:
    rates = {"type": "array", "items": {"type": "number"}, "description": "sent", "stale_when": "the network is down"}
    assert comment_of(rates) == "sent; empty: the network is down"
