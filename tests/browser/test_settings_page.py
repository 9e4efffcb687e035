"""Number fields of the page Settings: one sentence for a wrong number, the default for an empty field."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import expect

from neuroshard.config.setting_forms import FORMS, InputKind, control_of
from neuroshard.config.settings import Settings
from neuroshard.status.board import UpdateSettings

pytestmark = pytest.mark.browser

NUMBERS = [key for key in Settings.model_fields if control_of(key).kind is InputKind.NUMBER]
WRONG = ("1e99", "-1", "NaN", "9" * 1_000)


def test_a_wrong_number_changes_nothing_and_an_empty_field_is_the_default(
    start_node: StartNode, open_page: OpenPage, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    stored = "".join(f"{key} = {control_of(key).maximum:.0f}\n" for key in NUMBERS)
    config.write_text(stored)
    node = start_node(folder=tmp_path)
    page = open_page(f"{node.url}#settings", excused="responded with a status of 422")
    page.get_by_label("Show all settings").check()
    for place, key in enumerate(NUMBERS[::8]):  # tests/api has all of them
        title = FORMS[key].title
        page.get_by_role("button", name=f"Change {title}", exact=True).click()
        field, problem = page.get_by_role("textbox", name=title, exact=True), page.get_by_role("alert")
        for text in WRONG if place == 0 else (WRONG[place % len(WRONG)],):  # the check is the same for all of them
            field.fill(text)
            field.press("Enter")
            expect(problem, f"{key} {text[:9]}").to_contain_text(f"{key} cannot be {sent(text)}")
            assert problem.inner_text().count(". ") == 0
            expect(field).to_have_value(text)
            expect(field).to_be_focused()
            field.fill("")  # the next sentence is a new one
            field.press("Escape")
            page.get_by_role("button", name=f"Change {title}", exact=True).click()
        field.press("Escape")
    assert config.read_text() == stored
    title = FORMS["cpu_percent"].title
    page.get_by_role("button", name=f"Change {title}", exact=True).click()
    page.get_by_role("textbox", name=title, exact=True).fill("")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("button", name=f"Change {title}", exact=True)).to_be_focused()
    assert node.taken[-1] == UpdateSettings({"cpu_percent": None})
    assert "cpu_percent" not in config.read_text()


def sent(text: str) -> str:
    """Beginning of the value in the sentence: a number that the page can send as one has no quotes."""
    return text if text == "-1" else f"'{text[:20]}"
