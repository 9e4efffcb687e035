"""The machines of the owner's wallet on one page: their states, pause and resume of all or one, and no mouse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import snapshots
from dashboard_session import FAINT, TWICE, UNNAMED, OpenPage, StartNode, violations
from playwright.sync_api import Locator, Page, ViewportSize, expect
from swarm_snapshots import among

from neuroshard.errors import UsageError
from neuroshard.status.board import OrderMachines
from neuroshard.status.snapshot import NetworkStatus
from tests.worlds.run_commands import ATTIC

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=390, height=844)
FOCUSED = "document.activeElement.ariaLabel || document.activeElement.textContent.trim()"


def card(page: Page) -> Locator:
    return page.get_by_role("region", name="Your machines")


def row(page: Page, name: str) -> Locator:
    return card(page).get_by_role("listitem").filter(has_text=name)


def test_each_machine_shows_its_state_and_one_that_is_away_what_it_did_last(
    start_node: StartNode, open_page: OpenPage
) -> None:
    page = open_page(f"{start_node(among(2)).url}#machines")
    expect(page.get_by_role("heading", level=1)).to_have_text("Network")
    expect(card(page).get_by_role("listitem")).to_have_count(3)
    expect(row(page, "laptop")).to_contain_text("this computer")
    expect(row(page, "attic")).to_contain_text("Training")
    expect(row(page, "attic")).to_contain_text("tokens/s")
    expect(row(page, "cellar")).to_contain_text("Cannot be reachedLast seen 60 min ago: training")
    expect(row(page, "cellar").get_by_role("button")).to_be_disabled()
    expect(card(page)).to_contain_text("does not wait for a machine")


def test_all_are_paused_at_once_and_the_one_that_is_away_says_so(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(among(2))
    page = open_page(f"{node.url}#network", excused="Failed to load resource")
    card(page).get_by_role("button", name="Pause all").click()
    expect(card(page).get_by_role("status")).to_have_text("2 of 3 did it.")
    expect(row(page, "cellar")).to_contain_text("It did not answer.")
    card(page).get_by_role("button", name="Pause: attic").click()
    expect(card(page).get_by_role("status")).to_have_text("1 of 1 did it.")
    card(page).get_by_role("button", name="Resume all").click()
    expect(card(page).get_by_role("status")).to_have_text("2 of 3 did it.")
    assert node.taken == [OrderMachines("pause"), OrderMachines("pause", ATTIC), OrderMachines("resume")]
    node.refuse = UsageError("No machine of your wallet has this node id.")
    card(page).get_by_role("button", name="Pause: attic").click()
    expect(card(page).get_by_role("alert")).to_contain_text("No machine of your wallet")


def test_a_single_machine_has_no_list(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(replace(snapshots.training(), network=NetworkStatus())).url}#home")
    with page.expect_response("**/api/machines"):
        page.goto(page.url.replace("#home", "#network"))
    expect(page.get_by_role("heading", name="Swarm")).to_be_visible()
    expect(card(page)).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_a_phone_a_keyboard_and_a_screen_reader_are_enough(
    theme: str, start_node: StartNode, open_page: OpenPage
) -> None:
    node = start_node(among(2))
    page = open_page(f"{node.url}#network", viewport=PHONE, theme=theme, still=True)
    expect(card(page)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    card(page).get_by_role("button", name="Pause all").focus()
    for name in ("Resume all", "Pause: laptop, this computer", "Pause: attic, 12D3KooWattic"):
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUSED) == name
    page.keyboard.press("Enter")
    expect(card(page).get_by_role("status")).to_have_text("1 of 1 did it.")
    assert node.taken == [OrderMachines("pause", ATTIC)]
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(TWICE) == []
    assert page.evaluate(FAINT) == []
    assert violations(page) == []
