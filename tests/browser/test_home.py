"""Home: few words, at most 1.5 screens, every number explained and equal to REST, events as they happen."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import snapshots
import swarm_snapshots
from dashboard_session import OpenPage, StartNode, show_afresh, violations
from playwright.sync_api import Page, ViewportSize, expect

from neuroshard.status.history import FeedEvent, FeedTone
from neuroshard.status.rounds import Contributor, StageRoundsStatus
from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.types import LayerRange, WalletId
from tests.worlds.api import SECRET

pytestmark = pytest.mark.browser
SCREEN = ViewportSize(width=1280, height=800)
PHONE = ViewportSize(width=390, height=844)
MOST_WORDS = 200
MOST_SCREENS = 1.5
WORDS = """() => {
  const all = (element) => (element?.innerText ?? '').split(/\\s+/).filter(Boolean).length;
  return all(document.body) - all(document.querySelector('.feed'));
}"""
# texts with a digit in main that are in no figure, no event and no time, and do not name a version
UNEXPLAINED = """() => {
  const found = [];
  const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const inside = node.parentElement.closest('.figure, .feed, .uplot, dt, time');
    if (/\\d/.test(node.textContent) && !inside && node.parentElement.checkVisibility()) found.push(node.textContent);
  }
  return found;
}"""
MULTIPLES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "min": 60.0, "h": 3600.0, "days": 86400.0, "%": 0.01}


def busy() -> NodeStatus:
    """Among others, with rounds that accepted its work and a full feed."""
    status = swarm_snapshots.among(6)
    assert status.node_id is not None
    own = Contributor(status.node_id, WalletId("ab" * 16), accepted=12, sequences=700)
    other = Contributor(swarm_snapshots.peer_id(1), WalletId("cd" * 16), accepted=12, sequences=900)
    rounds = StageRoundsStatus(0, LayerRange(0, 6), completed=12, accepted=24, contributors=(own, other))
    sentence = "A computer left; its layers moved; 48 s, no step lost."
    feed = tuple(FeedEvent(status.time - n, FeedTone.WARN, f"{sentence} ({n})", f"gap {n}") for n in range(8))
    return replace(status, diloco=replace(status.diloco, rounds=(rounds,)), feed=feed)


def test_home_is_short(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, viewport=SCREEN, still=True)
    for situation in (snapshots.with_a_past, busy, swarm_snapshots.driver, swarm_snapshots.worker):
        show_afresh(node, page, situation())
        expect(page.get_by_role("region", name="Your limits")).to_be_visible()
        assert page.evaluate(WORDS) <= MOST_WORDS, situation
        assert page.evaluate("document.documentElement.scrollHeight") <= MOST_SCREENS * SCREEN["height"], situation


def at(status: Any, path: str) -> Any:
    for name in path.split("."):
        if status is None:
            return None
        status = status[int(name)] if name.isdigit() else status[name]
    return status


def read_number(text: str) -> float:
    match = re.match(r"([\d,.]+)(?: (\w+|%))?$", text)
    assert match, text
    return float(match[1].replace(",", "")) * MULTIPLES.get(match[2] or "", 1.0)


@pytest.mark.parametrize("situation", [snapshots.with_a_past, busy])
def test_every_number_is_explained_and_equal_to_rest(
    situation: Any, start_node: StartNode, open_page: OpenPage
) -> None:
    node = start_node(situation())
    page = open_page(node.url, viewport=SCREEN, still=True)
    expect(page.get_by_role("region", name="Your limits")).to_be_visible()
    assert page.evaluate(UNEXPLAINED) == []
    answer = page.context.request.get(f"{node.url}api/status", headers={"Authorization": f"Bearer {SECRET}"})
    status = answer.json()
    figures = page.locator(".figure")
    assert figures.count() >= 10
    for one in figures.all():
        path = one.get_attribute("data-path") or ""
        shown = one.evaluate("(element) => element.firstChild.textContent")
        value = at(status, path)
        if value is None:
            assert shown == "\N{EN DASH}", path
            continue
        assert one.get_attribute("data-value") == f"{value:g}" or float(one.get_attribute("data-value") or 0) == value
        if not path.startswith("training.held_out") and path != "network.upload_limit":  # shown as choices, as Mbit/s
            assert read_number(shown) == pytest.approx(value, rel=0.06, abs=0.5), path
        page.mouse.move(0, 0)  # off the explanation of the figure before
        one.hover()
        tip = one.locator(".tip")
        expect(tip).to_be_visible()
        expect(tip).to_contain_text(path)
        assert "A number of this node" not in (tip.text_content() or ""), path
        page.mouse.move(0, 0)
        one.focus()
        expect(tip).to_be_visible()
        one.blur()


@pytest.mark.parametrize(("theme", "viewport"), [("light", SCREEN), ("dark", PHONE)])
def test_home_is_clean_and_fits(theme: str, viewport: ViewportSize, start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(busy()).url, theme=theme, viewport=viewport, still=True)
    expect(page.get_by_role("log")).to_contain_text("no step lost")
    assert violations(page) == []
    page.locator(".figure").nth(5).focus()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_there_are_six_entries(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node().url)
    entries = page.get_by_role("navigation", name="Views").get_by_role("link")
    expect(entries).to_have_text(["Home", "Talk", "Model", "Network", "Files", "Settings"])


SUBJECTS = {  # by their views
    "Model": ("training", "pipeline"),
    "Network": ("swarm", "rounds", "events"),
    "Files": ("data", "checkpoints", "log"),
}


def test_an_address_of_a_subject_leads_there(start_node: StartNode, open_page: OpenPage) -> None:
    url = start_node().url
    page = open_page(url)
    for view, names in SUBJECTS.items():
        for name in names:
            page.goto("about:blank")
            page.goto(f"{url}#/{name}")
            expect(page.get_by_role("link", name=view, exact=True)).to_have_attribute("aria-current", "page")
            expect(page.locator(f"#title-{name}")).to_be_focused()
            expect(page.locator(f"#title-{name}")).to_be_in_viewport()


def test_an_event_appears_without_a_reload(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(replace(snapshots.training(), feed=()))
    page = open_page(node.url)
    expect(page.get_by_text(re.compile(r"Nothing since \d\d:\d\d\."))).to_be_visible()
    event = FeedEvent(snapshots.training().time, FeedTone.WARN, "A computer left: 2 computers in the run.", "departure")
    node.publish(lambda status: replace(status, feed=(event,)))
    expect(page.get_by_role("log").get_by_role("listitem")).to_contain_text("A computer left")


def test_a_long_path_breaks_in_an_event(start_node: StartNode, open_page: OpenPage) -> None:
    path = "/home/" + "0123456789abcdef" * 8
    event = FeedEvent(snapshots.training().time, FeedTone.WARN, f"step-183 was set aside, in {path}.", "set aside")
    page = open_page(start_node(replace(snapshots.training(), feed=(event,))).url)
    log = page.get_by_role("log")
    expect(log).to_contain_text(path)
    assert log.evaluate("(e) => e.scrollWidth <= e.clientWidth")


def texts_of_a_bare_zero(page: Page) -> list[str]:
    """Elements that show a lone 0 although they are no value of a list, a table or a figure."""
    return page.evaluate(
        """() => [...document.querySelectorAll('main *')]
        .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim() === '0'))
        .filter((e) => !e.closest('dd, td, .figure, .setting, .uplot')).map((e) => e.outerHTML.slice(0, 80))"""
    )


def test_no_view_shows_a_bare_zero(start_node: StartNode, open_page: OpenPage) -> None:
    """A count in front of `&&` is drawn as "0" when it is zero."""
    status = snapshots.starting()
    data = snapshots.training().data
    assert data is not None
    data = replace(data, total_shards=0, total_tokens=0, held_out_shards=0, verified=False)
    node = start_node(replace(status, state=NodeState.TRAINING, data=data, is_demo=False))
    page = open_page(node.url)
    for view in ("home", "model", "network", "files", "talk", "settings"):
        page.goto("about:blank")
        page.goto(f"{node.url}#/{view}")
        expect(page.locator(".view")).to_be_visible()
        assert texts_of_a_bare_zero(page) == [], view
        assert page.locator(".banners").evaluate("(e) => [...e.childNodes].every((n) => n.nodeType === 1)"), view
