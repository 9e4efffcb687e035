"""The preset of limits next to Pause: what the page says is what the API has and the file keeps."""

from __future__ import annotations

import httpx
import pytest
import snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import Page, expect

from neuroshard.host.presets import presets_of
from neuroshard.model.memory_limit import available_mb, probe_memory
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
    assert chosen(page) == "Own limits"  # no memory limit, and it pauses on battery
    for preset in presets_of(available_mb(probe_memory(), None)):
        control.select_option(preset.name)
        expect(page.get_by_role("status").filter(has_text="change when NeuroShard starts again")).to_be_visible()
        expect(control).to_have_value(preset.name)
        answer = httpx.get(f"{node.url}api/presets", headers={"Authorization": f"Bearer {SECRET}"}).json()
        assert answer["chosen"] == preset.name
        config = httpx.get(f"{node.url}api/config", headers={"Authorization": f"Bearer {SECRET}"}).json()
        for key, value in preset.settings.items():
            assert config[key].get("after_restart", config[key]["value"]) == value
    page.reload()
    expect(control).to_have_value("everything")
