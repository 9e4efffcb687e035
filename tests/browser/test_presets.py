"""The preset of limits next to Pause: what the page says is what the API has and the file keeps."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx
import pytest
import snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import Page, Route, expect

from neuroshard.host.presets import presets_of
from neuroshard.model.memory_limit import available_mb, probe_memory
from neuroshard.status.board import Restart
from tests.worlds.api import SECRET

pytestmark = pytest.mark.browser


def chosen(page: Page) -> str:
    """The selected entry of the control."""
    return str(page.get_by_label("What this computer gives").evaluate("box => box.selectedOptions[0].textContent"))


def test_a_preset_is_chosen_next_to_pause_and_stored(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.training())
    page = open_page(node.url)
    control = page.get_by_label("What this computer gives")
    expect(control).to_be_visible()
    assert chosen(page) == "No limits set"  # not Everything: it pauses on battery
    for preset in presets_of(available_mb(probe_memory(), None)):
        control.select_option(preset.name)
        waits = preset.settings["memory"] is not None  # the node began without a limit of its own
        words = "The memory changes when NeuroShard starts again" if waits else "This is in effect now."
        expect(page.get_by_role("status").filter(has_text=words)).to_be_visible()
        expect(page.get_by_role("button", name="Restart")).to_have_count(1 if waits else 0)
        expect(control).to_have_value(preset.name)
        answer = httpx.get(f"{node.url}api/presets", headers={"Authorization": f"Bearer {SECRET}"}).json()
        assert answer["chosen"] == preset.name
        config = httpx.get(f"{node.url}api/config", headers={"Authorization": f"Bearer {SECRET}"}).json()
        for key, value in preset.settings.items():
            assert config[key].get("after_restart", config[key]["value"]) == value
    page.reload()
    expect(control).to_have_value("everything")


def test_the_limits_follow_a_line_that_is_measured_meanwhile(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(replace(snapshots.training(), network=replace(snapshots.training().network, line_upload=None)))
    page = open_page(node.url)
    control = page.get_by_label("What this computer gives")
    control.select_option("balanced")
    words = r"5 Mbit/s \(54 GB per day\).* not measured yet, 10 Mbit/s assumed"
    expect(control).to_have_attribute("title", re.compile(words))
    network = replace(snapshots.training().network, line_upload=2.5e6, line_measured_at=1_772_600_000.0)
    node.publish(lambda status: replace(status, network=network))
    words = r"10 Mbit/s \(110 GB per day\).*: 20 Mbit/s, measured on 4 March 2026"
    expect(control).to_have_attribute("title", re.compile(words))
    expect(control).to_have_value("balanced")


def test_a_limit_of_the_owners_own_is_named_so(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.training())
    headers = {"Authorization": f"Bearer {SECRET}"}
    httpx.patch(f"{node.url}api/config", headers=headers, json={"cpu_percent": 70}).raise_for_status()
    assert chosen(open_page(node.url)) == "Own limits"


def test_restart_is_offered_while_a_stored_limit_waits(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.training())
    page = open_page(node.url)
    page.get_by_label("What this computer gives").select_option("light")
    page.get_by_role("button", name="Restart").click()
    expect(page.get_by_role("status").filter(has_text="saves a checkpoint and starts again")).to_be_visible()
    assert node.taken[-1] == Restart()
    page.goto(f"{node.url}#/settings")
    banner = page.get_by_text("Stored. It takes effect after a restart:")
    expect(banner).to_be_visible()
    with page.expect_response("**/api/restart"):
        page.get_by_role("button", name="Restart now").click()
    expect(page.get_by_role("status").filter(has_text="saves a checkpoint and starts again")).to_be_visible()
    assert node.taken[-1] == Restart()
    assert len([one for one in node.taken if one == Restart()]) == 2


def test_the_controls_keep_the_focus_while_a_command_runs(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(snapshots.training()).url)
    control = page.get_by_label("What this computer gives")
    expect(control).to_be_enabled()
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/api/config", hold)
    control.focus()
    control.select_option("light")
    expect(control).to_be_disabled()
    expect(control).to_be_focused()
    control.evaluate("box => { box.value = 'everything'; box.dispatchEvent(new Event('change', { bubbles: true })); }")
    expect(control).to_have_value("")
    page.keyboard.press("Tab")
    stop = page.get_by_role("button", name="Stop")
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert len(held) == 1
    held[0].continue_()
    expect(control).to_have_value("light")
    expect(stop).to_be_enabled()
    expect(stop).to_be_focused()


def test_a_step_of_the_wizard_leads_to_home_once_the_node_runs(start_node: StartNode, open_page: OpenPage) -> None:
    """As with the back button, or in a second tab."""
    node = start_node(snapshots.training())
    page = open_page(node.url)
    page.goto(f"{node.url}#setup-start")
    expect(page.get_by_role("link", name="Home")).to_have_attribute("aria-current", "page")
    expect(page.get_by_text("There is no such page")).to_have_count(0)
