"""The tables of values in docs/API.md follow from the declarations."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.api.reference import members_table, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "API.md"


def test_the_tables_of_the_api_page_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- values of ") >= 10
    assert page == with_tables(page), "run: python -m neuroshard.api.reference docs/API.md"


def test_a_row_shows_the_type_the_meaning_the_unit_and_when_a_value_is_stale() -> None:
    number = {"type": "number", "description": "sent", "unit": "bytes/s", "stale_when": "the network is down"}
    state = {"anyOf": [{"$ref": "#/$defs/State"}, {"type": "null"}]}
    schemas = {"State": {"enum": ["on", "off"], "type": "string"}}
    assert list(members_table({"properties": {"rate": number, "state": state}}, schemas))[2:] == [
        "| `rate` | number | sent [bytes/s]; null: the network is down |",
        "| `state` | `on`, `off` or null |  |",
    ]


def test_a_type_that_no_response_has_is_an_error() -> None:
    with pytest.raises(KeyError, match="NoSuchType"):
        with_tables("<!-- values of NoSuchType -->\n<!-- end of values -->")
