"""The owner's way into the dashboard, as a browser meets it: with the page of the key, without it, and afterwards."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import Page, expect

from neuroshard.api.access import Entrance, new_entrance
from neuroshard.config.folders import prepare_data_dir
from tests.worlds.api import SECRET, ServedNode

pytestmark = pytest.mark.browser
LOCKED = "responded with a status of 401"


def owned(start_node: StartNode, folder: Path) -> ServedNode:
    """A node with a data folder of its own."""
    prepare_data_dir(folder)
    (folder / "api-secret").write_text(SECRET)
    node: ServedNode = start_node(folder=folder)
    return node


def entrance(node: ServedNode, folder: Path) -> Entrance:
    """What `neuroshard open` makes."""
    return new_entrance(folder, f"http://localhost:{node.port}", time.time())


def is_open(page: Page) -> None:
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    expect(page.get_by_role("link", name="Home")).to_have_attribute("aria-current", "page")
    assert "key=" not in page.url


def is_locked(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("NeuroShard is locked")
    expect(page.get_by_label("Command that opens the dashboard", exact=True)).to_have_text("neuroshard open")


def test_the_page_of_the_key_opens_the_dashboard_for_this_browser(
    start_node: StartNode, open_page: OpenPage, tmp_path: Path
) -> None:
    node = owned(start_node, tmp_path)
    way_in = entrance(node, tmp_path)
    page = open_page(way_in.page.as_uri(), excused=LOCKED)
    is_open(page)
    page.reload()
    is_open(page)
    second = page.context.new_page()
    second.goto(f"http://localhost:{node.port}/#settings")
    expect(second.get_by_role("heading", level=1)).to_have_text("Settings")
    stranger = open_page(way_in.page.as_uri())  # who reads the page later
    is_locked(stranger)
    stranger.reload()
    is_locked(stranger)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()


def test_a_restarted_node_knows_the_browser_and_one_with_a_new_secret_does_not(
    start_node: StartNode, open_page: OpenPage, tmp_path: Path
) -> None:
    node = owned(start_node, tmp_path)
    page = open_page(entrance(node, tmp_path).page.as_uri(), excused="Failed to load resource")
    is_open(page)
    node.stop()
    expect(page.get_by_role("alert")).to_contain_text("The node is gone")
    again = start_node(port=node.port, folder=tmp_path)
    expect(page.get_by_role("alert")).to_have_count(0)
    is_open(page)
    page.context.clear_cookies()  # as with another secret, or a week later
    again.stop()
    start_node(port=node.port, folder=tmp_path)
    is_locked(page)


def test_a_locked_page_takes_an_address_and_follows_another_tab(
    start_node: StartNode, open_page: OpenPage, tmp_path: Path
) -> None:
    node = owned(start_node, tmp_path)
    page = open_page(f"http://localhost:{node.port}/", secret="", excused=LOCKED)
    is_locked(page)
    page.get_by_label("Address or key").fill("123.guessed.key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Run `neuroshard open`")
    page.get_by_label("Address or key").fill(entrance(node, tmp_path).address)
    page.keyboard.press("Enter")
    is_open(page)
    page.context.clear_cookies()
    page.reload()
    is_locked(page)
    other = page.context.new_page()
    other.goto(entrance(node, tmp_path).address)
    is_open(other)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # its reader returns to it
    is_open(page)


def test_two_nodes_at_two_ports_do_not_share_a_session(
    start_node: StartNode, open_page: OpenPage, tmp_path: Path
) -> None:
    first, second = owned(start_node, tmp_path / "first"), owned(start_node, tmp_path / "second")
    page = open_page(entrance(first, tmp_path / "first").page.as_uri(), excused=LOCKED)
    is_open(page)
    other = page.context.new_page()
    other.goto(f"http://localhost:{second.port}/")
    is_locked(other)
    other.goto(entrance(second, tmp_path / "second").page.as_uri())
    is_open(other)
    page.reload()
    is_open(page)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert (len(first.taken), len(second.taken)) == (1, 0)


def test_a_setting_of_the_owner_is_shown_with_its_command(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}#settings")
    page.get_by_label("Show all settings").check()
    for title, way in (("Dashboard address", "neuroshard --host HOST"), ("Updates from", "a line in config.toml")):
        row = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=title, exact=True))
        expect(row).to_contain_text(re.compile(f"No page can change it. Use {way}"))
        expect(row.get_by_role("button")).to_have_count(0)
