"""Contribution, chat, settings, reports and pages that are not there, used as a reader would."""

from __future__ import annotations

import io
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import Page, expect

from neuroshard.status.board import Pause, Resume
from neuroshard.status.owner_policy import OwnerPolicyStatus, SensorReading, TrainingAction, TrainingDecision
from neuroshard.status.snapshot import NodeState
from tests.worlds.api import SECRET

pytestmark = pytest.mark.browser


def test_the_contribution_is_told_for_a_day_a_week_and_all_time(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(snapshots.with_a_past()).url}#contribution")
    values = page.locator(".stats .stat-value")
    expect(values.first).to_have_text("115.20 million")
    expect(page.get_by_text("This computer trained for 14 h 24 min in the last 24 hours.")).to_be_visible()
    expect(page.get_by_role("img", name="115.20 million tokens in the last 24 hours.")).to_be_visible()
    page.get_by_role("button", name="Week").click()
    expect(values.first).not_to_have_text("115.20 million")
    expect(page.get_by_role("button", name="Week")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="All time").click()
    expect(values.first).to_have_text("3.46 billion")
    page.get_by_text("The same as a table").click()
    assert 2 <= page.get_by_role("row").count() <= 25


def test_before_the_first_step_there_is_no_contribution(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(snapshots.starting()).url}#contribution")
    expect(page.get_by_text("Nothing is recorded yet: it begins with the first learning step.")).to_be_visible()
    expect(page.get_by_text("Nothing in this time yet.").first).to_be_visible()


def test_what_the_model_wrote_is_shown_from_the_start_on(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(snapshots.with_a_past()).url}#chat")
    written = page.locator(".written-text")
    expect(written).to_have_count(4)
    expect(page.get_by_role("heading", name="Before its first step")).to_be_visible()
    expect(written.last).to_have_text("Once upon a time, the object is created and the")
    page.get_by_role("button", name="The function returns…").click()
    expect(written.last).to_have_text("The function returns a new list with all the names")
    page.get_by_role("button", name="2 samples in between").click()
    expect(written).to_have_count(6)
    expect(page.get_by_text("It writes the next sample at step 1,000")).to_be_visible()


def test_a_wrong_setting_is_told_beside_its_field(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}#settings", excused="responded with a status of 422")
    field = begin_to_change(page, "Training text on disk")
    field.fill("5")
    page.keyboard.press("Enter")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("max_storage")
    expect(problem).to_contain_text("20 to 1000000000")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(re.compile("20 to 1000000000"))
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Change Training text on disk")).to_be_focused()
    expect(problem).to_have_count(0)


def test_settings_survive_a_restart_and_say_when_they_hold(
    start_node: StartNode, open_page: OpenPage, tmp_path: Path
) -> None:
    node = start_node(folder=tmp_path)
    page = open_page(f"{node.url}#settings", excused="Failed to load resource")
    page.get_by_label("Show all settings").check()
    begin_to_change(page, "Stages").fill("3")
    page.get_by_role("button", name="Save", exact=True).click()
    setting = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="Stages", exact=True))
    expect(setting).to_contain_text("After a restart: 3 stages. Until then as many as fit the memory.")
    expect(page.get_by_text("Stored. It takes effect after a restart:")).to_be_visible()
    relay = page.get_by_role("switch", name="Relays")
    expect(relay).to_have_attribute("aria-checked", "true")
    relay.focus()
    page.keyboard.press("Space")
    expect(relay).to_have_attribute("aria-checked", "false")
    expect(
        page.get_by_text(re.compile("(Stages and Relays|Relays and Stages). Finished steps are kept"))
    ).to_be_visible()
    node.stop()
    expect(page.get_by_text("The node is gone")).to_be_visible()
    start_node(port=node.port, folder=tmp_path)
    everything = page.get_by_label("Show all settings")
    expect(everything).not_to_be_checked(timeout=15_000)  # the page has begun again, with the node
    everything.check()
    expect(setting.locator("b")).to_have_count(1)
    expect(setting.locator("b")).to_have_text("3 stages")
    expect(setting).to_contain_text("stored here")
    expect(page.get_by_text("Stored. It takes effect after a restart:")).to_have_count(0)


def test_settings_show_what_the_node_uses_and_can_be_searched(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}#settings")
    rows = page.locator(".setting")
    expect(rows.filter(has=page.get_by_role("heading", name="Memory", exact=True))).to_contain_text("6,568 MB")
    expect(rows.filter(has=page.get_by_role("heading", name="CPU threads"))).to_contain_text("2 threads")
    basic = rows.count()
    page.get_by_label("Find").fill("relay")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("Be reached through a relay")
    page.get_by_label("Find").fill("no such words")
    expect(page.get_by_text("No setting contains these words.")).to_be_visible()
    page.get_by_label("Find").fill("")
    page.get_by_label("Show all settings").check()
    expect(rows).not_to_have_count(basic)
    page.get_by_label("Train when").select_option("idle")
    expect(page.locator(".message")).to_contain_text("train_when: in effect now.")


def begin_to_change(page: Page, name: str):
    page.get_by_role("button", name=f"Change {name}").click()
    field = page.get_by_label(name, exact=True)
    expect(field).to_be_focused()
    return field


def test_the_report_is_downloaded_and_holds_no_secret(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    node.ring.append(1.0, "INFO", "neuroshard", f"a secret {SECRET} in {Path.home()}/x")
    page = open_page(f"{node.url}#log")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the report").click()
    assert re.fullmatch(r"neuroshard-report-\d{8}-\d{4}\.zip", download.value.suggested_filename)
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as archive:
        parts = {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert "a secret [secret] in ~/x" in parts["log.txt"]
    assert json.loads(parts["status.json"])["state"] == "training"
    expect(page.locator(".message")).to_contain_text("is with your downloads.")


def test_a_pause_can_have_an_end(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    page.get_by_text("For a while…").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="1 hour")).to_be_hidden()
    expect(page.get_by_text("For a while…")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="1 hour")).to_be_enabled()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="1 hour")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Training rests for another 60 min.")).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Pause")).to_be_focused()
    assert node.taken == [Pause(3_600.0), Resume()]


def test_the_list_of_pauses_keeps_the_focus_while_the_node_is_away(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, excused="Failed to load resource")
    page.get_by_text("For a while…").click()
    hour = page.get_by_role("button", name="1 hour")
    expect(hour).to_be_enabled()
    node.stop()
    expect(hour).to_be_disabled()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(hour).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="4 hours")).to_be_focused()
    assert node.taken == []


def test_a_page_that_is_not_there_offers_those_that_are(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}#setings")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such page")
    expect(page).to_have_title("No such page · NeuroShard")
    page.get_by_role("main").get_by_role("link", name="Settings").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Settings")


def test_a_defect_of_one_view_leaves_the_others(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(f"{node.url}#data", excused="undefined")
    expect(page.get_by_role("heading", level=1)).to_have_text("Files")
    page.route("**/api/rounds", lambda route: route.fulfill(json={"rounds": None}))
    page.get_by_role("link", name="Network").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("This view cannot be shown")
    page.get_by_role("link", name="Home").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Your computer is teaching")


def test_an_address_that_is_not_there_is_answered_with_a_page(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(f"{node.url}nowhere", excused="responded with a status of 404")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such page")
    page.get_by_role("link", name="Open the dashboard").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Your computer is teaching")


def test_a_rule_that_holds_training_up_is_named(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    expect(page.get_by_text("Nothing limits training.")).to_be_visible()
    slowed = TrainingDecision(
        TrainingAction.THROTTLE, "Slowed down to 50% of the time, as set.", "cpu_percent", None, 0.5
    )
    node.publish(lambda status: replace(status, owner_policy=OwnerPolicyStatus(slowed)))
    expect(page.get_by_text("tokens (word pieces) per second. Slowed down to 50% of the time, as set.")).to_be_visible()
    reason = "Paused while blender runs."
    readings = (SensorReading("programs", "blender"), SensorReading("battery", "there is none", is_known=False))
    paused = OwnerPolicyStatus(
        TrainingDecision(TrainingAction.PAUSE, reason, "pause_for_programs", None, 0.0), readings
    )
    node.publish(lambda status: replace(status, state=NodeState.PAUSED, state_reason=reason, owner_policy=paused))
    expect(page.get_by_text(f"{reason} Training resumes by itself; finished steps are kept.")).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_have_count(0)
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()  # by hand as well
    page.get_by_role("link", name="Files").click()
    expect(page.get_by_text("unknown: there is none")).to_be_visible()
