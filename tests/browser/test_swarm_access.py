"""The Swarm view for everybody: phones, keyboards, screen readers, weak contrast, and a thousand peers at once."""

from __future__ import annotations

import pytest
import swarm_snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import ViewportSize, expect
from swarm_page import MOST_ROWS, rows
from swarm_snapshots import among

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=360, height=740)


@pytest.mark.parametrize("count", [0, 4, 1_000])
def test_the_view_fits_a_phone(count: int, start_node: StartNode, open_page: OpenPage) -> None:
    status = among(count) if count else swarm_snapshots.alone()
    page = open_page(f"{start_node(status).url}#swarm", viewport=PHONE)
    expect(page.get_by_role("button", name="Copy: Join line")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    if count:
        expect(rows(page)).to_have_count(min(count + 1, MOST_ROWS))
        boxes = rows(page).nth(1).locator("td").evaluate_all("cells => cells.map((c) => c.scrollWidth - c.clientWidth)")
        assert max(boxes) <= 0, "a cell's text is cut off"


def test_the_list_is_used_without_a_mouse(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(among(60)).url}#swarm")
    expect(rows(page)).to_have_count(MOST_ROWS)
    page.get_by_label("Find").focus()
    for name in ("Order", "Next page", "Last page", "Nodes of this run"):
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


UNNAMED = """() => [...document.querySelectorAll('button, input, select, a, nav, section, [role]')]
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.hasAttribute('aria-labelledby')
    || e.role === 'status' || e.textContent.trim()))
  .map((e) => e.outerHTML)"""
TWICE = (
    """() => [...document.querySelectorAll('[id]')].map((e) => e.id).filter((id, at, all) => all.indexOf(id) !== at)"""
)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(theme: str, start_node: StartNode, open_page: OpenPage) -> None:
    """WCAG AA: 4.5 to 1 for all text of the view, in both colour schemes."""
    page = open_page(f"{start_node(among(10)).url}#swarm", theme=theme)
    expect(rows(page)).to_have_count(11)
    assert page.evaluate(FAINT) == []


# Mixed colours (color-mix, color(srgb ...)) are drawn on a canvas to be read as red, green and blue.
FAINT = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (values) => values.reduce((sum, v, at) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(getComputedStyle(e).backgroundColor);
    return chain.reduce((under, colour) => `rgb(${rgb(colour, under)})`, 'rgb(255,255,255)');
  };
  const texts = [...document.querySelectorAll('main *')].filter(
    (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
      && e.checkVisibility() && !e.matches(':disabled'));
  return texts.map((e) => {
    const under = behind(e);
    const [a, b] = [light(rgb(getComputedStyle(e).color, under)), light(rgb(under, under))].sort((x, y) => y - x);
    return { text: e.textContent.trim().slice(0, 30), ratio: (a + 0.05) / (b + 0.05) };
  }).filter((found) => found.ratio < 4.5);
}"""


def test_a_thousand_peers_do_not_hold_up_the_page(start_node: StartNode, open_page: OpenPage) -> None:
    """All thousand heard of again in one event, while the page paints: no frame waits for long."""
    node = start_node(among(1_000))
    page = open_page(f"{node.url}#swarm")
    expect(rows(page)).to_have_count(MOST_ROWS)
    node.publish(swarm_snapshots.later)
    slowest = page.evaluate("""async () => {
      let slowest = 0, last = performance.now();
      const end = last + 2500;
      while (last < end) {
        await new Promise(requestAnimationFrame);
        slowest = Math.max(slowest, performance.now() - last);
        last = performance.now();
      }
      return slowest;
    }""")
    expect(rows(page).nth(1)).to_contain_text("805")
    assert slowest < 500
