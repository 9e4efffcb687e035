"""The Swarm view for everybody: phones, keyboards, screen readers, weak contrast, and a thousand peers at once."""

from __future__ import annotations

import pytest
import swarm_snapshots
from dashboard_session import FAINT, MOST_ROWS, TWICE, UNNAMED, OpenPage, StartNode, rows, show_afresh
from playwright.sync_api import ViewportSize, expect
from swarm_snapshots import among

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=360, height=740)


def test_the_view_fits_a_phone(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, viewport=PHONE)
    for count in (0, 4, 1_000):
        show_afresh(node, page, among(count) if count else swarm_snapshots.alone(), "swarm")
        expect(page.get_by_role("button", name="Copy: Join line")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        if count:
            expect(rows(page)).to_have_count(min(count + 1, MOST_ROWS))
            cells = rows(page).nth(1).locator("td")
            boxes = cells.evaluate_all("cells => cells.map((c) => c.scrollWidth - c.clientWidth)")
            assert max(boxes) <= 0, "a cell's text is cut off"


def test_the_list_is_used_without_a_mouse(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(60)).url}#swarm")
    expect(rows(page)).to_have_count(MOST_ROWS)
    page.get_by_label("Find").focus()
    for name in ("Order", "First page", "Previous page", "Next page", "Last page", "Nodes of this run"):
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUSED) == name
    page.get_by_role("navigation", name="Pages of the list, top").get_by_role("button", name="Next page").press("Enter")
    expect(page.get_by_text("26 to 50 of 60 other nodes.")).to_be_visible()
    page.get_by_label("Find").press_sequentially("relayed")
    expect(page.get_by_text("15 found among 60 other nodes.")).to_be_visible()


FOCUSED = "document.activeElement.labels?.[0]?.firstElementChild.textContent ?? document.activeElement.ariaLabel"


def test_names_and_heads_are_there_for_screen_readers(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(60)).url}#swarm")
    expect(rows(page)).to_have_count(MOST_ROWS)
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(TWICE) == []
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    expect(page.get_by_role("columnheader")).to_have_count(9)
    expect(page.get_by_role("rowheader")).to_have_count(MOST_ROWS)
    expect(rows(page).nth(1).get_by_role("cell", name="sent")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(theme: str, start_node: StartNode, open_page: OpenPage) -> None:
    """WCAG AA: 4.5 to 1 for all text of the view, in both colour schemes."""
    page = open_page(f"{start_node(among(10)).url}#swarm", theme=theme)
    expect(rows(page)).to_have_count(11)
    assert page.evaluate(FAINT) == []


def test_news_of_a_thousand_peers_is_shown(start_node: StartNode, open_page: OpenPage) -> None:
    """All thousand heard of again in one event. `python -m benchmarks dashboards` measures how long a frame takes."""
    node = start_node(among(1_000))
    page = open_page(f"{node.url}#swarm")
    expect(rows(page)).to_have_count(MOST_ROWS)
    node.publish(swarm_snapshots.later)
    expect(rows(page).nth(1)).to_contain_text("805")
