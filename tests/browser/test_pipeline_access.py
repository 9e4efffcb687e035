"""The Pipeline view for everybody: phones, keyboards, screen readers, weak contrast, and 64 stages of 200 computers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dashboard_session import FAINT, TWICE, UNNAMED, OpenPage, StartNode, show_afresh
from playwright.sync_api import Page, ViewportSize, expect
from swarm_snapshots import crowd, driver, gap, one_stage, resting, silent, trainer, worker

from neuroshard.status.snapshot import NodeStatus

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=360, height=740)
EVERY = (driver, worker, trainer, gap, resting, silent, one_stage, crowd)


def test_the_view_fits_a_phone(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, viewport=PHONE)
    for make in EVERY:
        show_afresh(node, page, make(), "pipeline")
        expect(page.get_by_role("region", name="Stages", exact=True)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], make
        texts = page.locator(".stage-box .pill, .stage-times li, .stat, .facts dd, .holders li")
        cut = texts.evaluate_all("all => all.filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML)")
        assert cut == [], make


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(theme: str, start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, theme=theme)
    for make in (driver, gap, resting, silent):
        show_afresh(node, page, make(), "pipeline")
        expect(page.get_by_role("region", name="Stages", exact=True)).to_be_visible()
        assert page.evaluate(FAINT) == [], make


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_parts_of_the_bars_can_be_told_from_the_ground(
    theme: str, start_node: StartNode, open_page: OpenPage
) -> None:
    """WCAG 1.4.11: 3 to 1 between a graphic and what is behind it."""
    page = open_page(f"{start_node(driver()).url}#pipeline", theme=theme)
    expect(page.locator(".part-key").first).to_be_visible()
    ratios = page.evaluate(PART_CONTRAST)
    assert len(ratios) >= 4
    assert min(ratios.values()) >= 3, ratios


PART_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (colour) => rgb(colour).reduce((sum, v, at) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
  return Object.fromEntries([...document.querySelectorAll('.part-key')].map((e) => {
    const [a, b] = [light(getComputedStyle(e).backgroundColor), ground].sort((x, y) => y - x);
    return [e.className, (a + 0.05) / (b + 0.05)];
  }));
}"""


@pytest.mark.parametrize("make", [driver, gap, crowd])
def test_names_and_heads_are_there_for_screen_readers(
    make: Callable[[], NodeStatus], start_node: StartNode, open_page: OpenPage
) -> None:
    page = open_page(f"{start_node(make()).url}#pipeline")
    expect(page.get_by_role("region", name="Stages", exact=True)).to_be_visible()
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(TWICE) == []
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    expect(page.get_by_role("group", name="Stages of the model; choose one to see who holds it")).to_be_visible()
    assert page.locator(".view [aria-live], .view [role=status]").count() == 0, "numbers are not announced"


def test_stages_and_microbatches_are_chosen_without_a_mouse(start_node: StartNode, open_page: OpenPage) -> None:
    """A group of choices is one stop of the Tab key; arrows move in it."""
    page = open_page(f"{start_node(driver()).url}#pipeline")
    expect(page.get_by_role("region", name="Who holds stage 1")).to_be_visible()
    page.get_by_role("region", name="Stages", exact=True).get_by_role("radio").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("region", name="Who holds stage 2")).to_be_visible()
    box = page.locator(".stage-box", has_text="Stage 2")
    assert box.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    columns = page.get_by_role("region", name="The last microbatches").get_by_role("radio")
    expect(columns.nth(30)).to_be_checked()
    expect(columns.nth(30)).to_be_focused()


def test_64_stages_of_200_computers_are_no_trouble(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(crowd())
    page = open_page(f"{node.url}#pipeline")
    stages = page.get_by_role("region", name="Stages", exact=True)
    expect(stages.get_by_role("radio")).to_have_count(64)
    panel = page.get_by_role("region", name="Who holds stage 1", exact=True)
    expect(panel.get_by_role("listitem")).to_have_count(24)
    panel.get_by_role("button", name="Last page").click()
    expect(panel.get_by_role("listitem")).to_have_count(8)
    loads = page.get_by_role("region", name="Where time goes")
    expect(loads.get_by_role("listitem")).to_have_count(16)
    loads.get_by_role("button", name="Last page").click()
    expect(loads).to_contain_text("Stage 64")
    assert page.evaluate("document.querySelectorAll('*').length") < 1_500


def settled(page: Page, what: str) -> list[float]:
    """What the expression is once it has stayed the same for a second: cards above come with answers of their own."""
    page.wait_for_function(
        f"""() => {{
          const now = JSON.stringify({what});
          if (window.lastSeen?.value !== now) window.lastSeen = {{ value: now, since: performance.now() }};
          return performance.now() - window.lastSeen.since > 1000;
        }}""",
        polling=100,
    )
    return page.evaluate(what)


def test_new_numbers_do_not_move_the_page(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(driver())
    page = open_page(f"{node.url}#pipeline")
    expect(page.get_by_role("region", name="Where time goes")).to_be_visible()
    tops = "[...document.querySelectorAll('.card, .stat')].map((card) => card.getBoundingClientRect().top)"
    before = settled(page, tops)
    with page.expect_response("**/api/pipeline"):
        node.publish(lambda _: driver())
    assert page.evaluate(tops) == before
