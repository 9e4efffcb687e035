"""A change of the running node's settings leads to the very settings that the next start reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.config.loading import load_settings
from neuroshard.config.settings import Applies, application_table
from neuroshard.host.live_settings import Configuration
from neuroshard.node.launch import first_status
from neuroshard.types import JsonValue

CHANGES: dict[str, JsonValue] = {
    "max_storage": "300",
    "max_checkpoint_storage": 7_000,
    "checkpoint_min_seconds": 5,
    "checkpoint_write_gb_per_day": 1,
    "train_when": "idle",
    "idle_minutes": "2",
    "pause_on_battery": False,
    "pause_on_full_screen": "false",
    "pause_for_programs": "blender, obs, blender",
    "training_schedule": ["mon-fri 18:00-08:00"],
    "network_schedule": "sat-sun 00:00-24:00",
    "max_upload": "2.5",
    "upload_percent": 50,
    "monthly_quota": 100,
    "spare_metered": "false",
    "cpu_percent": 50,
    "gpu_share": "10",
    "gpu_max_temperature": 80,
    "gpu_max_power": "200",
}


def test_every_setting_that_holds_at_once_is_tried() -> None:
    assert CHANGES.keys() == {key for key, applies in application_table().items() if applies is Applies.AT_ONCE}


def test_the_first_status_has_the_limit_that_the_owner_set(tmp_path: Path) -> None:
    """The dashboard shows it before the network is open."""
    for options, limit in (({"max_upload": 2.5}, 312_500.0), ({"upload_percent": 50}, 625_000.0), ({}, None)):
        status = first_status(load_settings({"data_dir": tmp_path, **options}, {}), 0.0, (), is_demo=False)
        assert status.network.upload_limit == limit


@pytest.mark.parametrize("key", CHANGES)
def test_a_change_holds_as_after_a_restart_and_so_does_taking_it_back(tmp_path: Path, key: str) -> None:
    before = load_settings({"data_dir": tmp_path}, {})
    configuration = Configuration(before)
    for value in (CHANGES[key], None):
        configuration.change({key: value}, "training")
        again = load_settings({"data_dir": tmp_path}, {})
        assert configuration.settings == again.settings
        assert type(getattr(configuration.settings, key)) is type(getattr(again.settings, key))
        assert configuration.source_of(key) == again.sources[key]
    assert configuration.settings == before.settings
