"""The Data view: each shard with what it is for and where it came from, what is new, and who in the run has what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import snapshots
from dashboard_session import DESKTOP, FAINT, TWICE, UNNAMED, OpenPage, StartNode
from playwright.sync_api import ViewportSize, expect

from neuroshard.status.data import DataStatus, RefreshState, RefreshStatus
from neuroshard.status.snapshot import NodeStatus

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=360, height=740)
OTHERS = (("dark", DESKTOP), ("light", PHONE))  # both themes and both sizes are in the shorter ones
NOTHING = "\N{EN DASH}"
NEWER = "Newer data: 24 shards more than the 16 of this run, which stays with its own."


def with_data(**changes: object) -> NodeStatus:
    status = snapshots.training()
    assert isinstance(status.data, DataStatus)
    return replace(status, data=replace(status.data, **changes))  # type: ignore[arg-type]


def test_each_shard_is_told(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(snapshots.training()).url + "#data")
    table = page.get_by_role("region", name="List of the shards")
    expect(table.get_by_role("row")).to_have_count(6)
    rows = [row.inner_text().split("\t") for row in table.get_by_role("row").all()]
    assert [[cell.strip() for cell in row] for row in rows[:4]] == [
        ["Shard", "What for", "Kept here", "Checked", "Came from"],
        ["5", "being read", "312 kB", "yes", "the source"],
        ["6", "next", "312 kB", "yes", "another computer"],
        ["7", "later", "not yet", NOTHING, NOTHING],
    ]


def test_who_has_what_is_told_in_words_and_as_a_picture(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(snapshots.training()).url + "#data")
    words = "3 computers have 14 of 16 shards (88 %) and can give them to others."
    strip = page.get_by_role("img", name=words)
    expect(strip).to_be_visible()
    assert strip.locator(".cell").count() == 16
    assert [strip.locator(f".copies-{level}").count() for level in range(4)] == [2, 1, 7, 6]


def test_newer_data_are_told_without_alarm(start_node: StartNode, open_page: OpenPage) -> None:
    refresh = RefreshStatus(RefreshState.GROWN, NEWER, 0.0, None, 40, 1_600_000)
    page = open_page(start_node(with_data(refresh=refresh)).url + "#data")
    card = page.get_by_role("region", name="Source")
    expect(card).to_contain_text("newer data there")
    expect(card).to_contain_text("40 shards, 1.60 million tokens")
    expect(card).to_contain_text(NEWER)
    expect(page.locator(".banner", has_text="The source is")).to_have_count(0)


@pytest.mark.parametrize(
    ("state", "title"),
    [
        (RefreshState.REFUSED, "The source is not to be trusted."),
        (RefreshState.OLDER, "The source is behind."),
        (RefreshState.INCOMPLETE, "The source is half published."),
        (RefreshState.UNREACHABLE, "The source is not reachable."),
    ],
)
def test_trouble_at_the_source_stands_above_everything(
    start_node: StartNode, open_page: OpenPage, state: RefreshState, title: str
) -> None:
    refresh = RefreshStatus(state, "What it is about, in words.", 0.0)
    page = open_page(start_node(with_data(refresh=refresh)).url + "#data")
    banner = page.locator(".banner", has_text=title)
    expect(banner).to_contain_text("What it is about, in words.")


@pytest.mark.parametrize(
    ("theme", "viewport"),
    [("light", DESKTOP), ("dark", PHONE), *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)],
)
def test_everybody_can_read_it(start_node: StartNode, open_page: OpenPage, theme: str, viewport: ViewportSize) -> None:
    refresh = RefreshStatus(RefreshState.REFUSED, "Refused: " + "signed by another key " * 6, 0.0)
    page = open_page(start_node(with_data(refresh=refresh)).url + "#data", theme=theme, viewport=viewport)
    expect(page.get_by_role("heading", name="In the whole run")).to_be_visible()
    assert page.evaluate(FAINT) == []
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(TWICE) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
