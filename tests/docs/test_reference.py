"""The tables of values in docs/API.md follow from the declarations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neuroshard.api.reference import members_table, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "API.md"


def test_the_tables_of_the_api_page_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- values of ") >= 10
    assert page == with_tables(page), "run: python -m neuroshard.api.reference docs/API.md"


def test_every_member_in_a_table_has_a_meaning() -> None:
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.fullmatch(r"\| `\w+` \|.*\|.*\|", line)
    ]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\| (\[[^]]*\] )?\|$", row)] == []


def test_a_row_shows_the_type_the_meaning_the_unit_and_when_a_value_is_stale() -> None:
    number = {"type": "number", "description": "sent", "unit": "bytes/s", "stale_when": "the network is down"}
    state = {"anyOf": [{"$ref": "#/$defs/State"}, {"type": "null"}], "description": "on | off"}
    parts = {"type": "array", "items": {"$ref": "#/$defs/Part"}, "description": "its parts"}
    schemas = {"State": {"enum": ["on", "off"], "type": "string"}, "Part": {"properties": {}, "type": "object"}}
    thing = {"description": "A thing.", "properties": {"rate": number, "state": state, "parts": parts}}
    assert list(members_table("Thing", thing, schemas)) == [
        "`Thing`: A thing.",
        "",
        "| member | type | meaning |",
        "| --- | --- | --- |",
        "| `rate` | number | sent [bytes/s]; null: the network is down |",
        "| `state` | `on`, `off` or null | on \\| off |",
        "| `parts` | list of `Part` | its parts |",
    ]


def test_a_type_without_a_table_on_the_page_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"RunStage uses types that have no table on the page: \['LayerRange'\]"):
        with_tables("<!-- values of RunStage -->\n<!-- end of values -->")


def test_a_type_that_no_response_has_is_an_error() -> None:
    with pytest.raises(KeyError, match="NoSuchType"):
        with_tables("<!-- values of NoSuchType -->\n<!-- end of values -->")
