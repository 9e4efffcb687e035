"""axe-core finds nothing wrong with any view, in both themes, nor with what opens on top of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import snapshots
import swarm_snapshots
from dashboard_session import DESKTOP, OpenPage, StartNode, violations
from playwright.sync_api import Page, ViewportSize, expect

from neuroshard.status.snapshot import NodeState, NodeStatus

pytestmark = pytest.mark.browser
VIEWS = ("home", "contribution", "talk", "model", "network", "friends", "files")
PHONE = ViewportSize(width=360, height=740)


def show(page: Page, url: str) -> None:
    """Go to a view and wait until it has read what it shows."""
    page.goto(url)
    expect(page.locator(".view, .friends .grid").first).to_be_visible()
    expect(page.get_by_text("Reading the ")).to_have_count(0)


# other tests read the texts of the dark theme with the same measure of contrast
DARK = pytest.param("dark", PHONE, marks=pytest.mark.long)


@pytest.mark.parametrize(("theme", "viewport"), [("light", DESKTOP), DARK])
def test_every_view_is_clean(theme: str, viewport: ViewportSize, start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.with_a_past())
    node.ring.append(1.0, "WARNING", "neuroshard", "a line of the log")
    page = open_page(node.url, theme=theme, viewport=viewport, still=True)
    for view in (*VIEWS, "settings", "nowhere"):
        show(page, f"{node.url}#{view}")
        assert violations(page) == [], view


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_a_node_among_others_is_clean(theme: str, start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, theme=theme, still=True)
    seen: tuple[tuple[str, Callable[[], NodeStatus]], ...] = (
        ("swarm", lambda: swarm_snapshots.among(6)),
        ("pipeline", swarm_snapshots.gap),
        ("rounds", swarm_snapshots.eventful),
        ("home", snapshots.starting),
        ("home", snapshots.in_trouble),
    )
    for view, situation in seen:
        told = situation()
        node.publish(lambda _, told=told: told)
        page.goto("about:blank")
        show(page, f"{node.url}#{view}")
        assert violations(page) == [], (view, situation)


def test_what_opens_on_top_is_clean_on_a_phone(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.with_a_past())
    excused = "Failed to load resource"
    page = open_page(f"{node.url}#settings", viewport=PHONE, still=True, excused=excused)
    page.get_by_role("button", name="Change Training text on disk").click()
    page.get_by_label("Training text on disk", exact=True).fill("5")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_text("For a while…").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    node.publish(lambda status: replace(status, state=NodeState.FAILED, state_reason="The disk is gone."))
    expect(page.get_by_role("alert")).to_contain_text("The disk is gone.")
    assert violations(page) == []
    node.stop()
    expect(page.get_by_role("alert")).to_contain_text("The node is gone")
    assert violations(page) == []


def test_the_page_for_an_unknown_address_is_clean(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}nowhere", excused="responded with a status of 404")
    assert violations(page) == []


@pytest.mark.parametrize(("theme", "viewport"), [("light", DESKTOP), DARK])
def test_the_locked_page_is_clean(
    theme: str, viewport: ViewportSize, start_node: StartNode, open_page: OpenPage
) -> None:
    page = open_page(
        start_node().url, secret="", theme=theme, viewport=viewport, excused="responded with a status of 401"
    )
    expect(page.get_by_role("heading", level=1)).to_have_text("NeuroShard is locked")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
