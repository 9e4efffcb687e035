"""What the control of the presets calls the limits in force."""

from __future__ import annotations

import pytest

from neuroshard.api.presets import line_body, presets_body
from neuroshard.config.loading import load_settings
from neuroshard.host.presets import Preset, presets_of

MEMORY_MB = 8_000


def values(**settings: object) -> dict[str, object]:
    """The values of all settings after these were given."""
    described = load_settings({"data_dir": "/data", **settings}, {}).describe()
    return {key: setting["value"] for key, setting in described.items()}  # type: ignore[index, misc]


def test_settings_that_nobody_has_touched_set_no_limit() -> None:
    body = presets_body(MEMORY_MB, line_body(None, None), values())
    assert (body.chosen, body.has_limits) == (None, False)


@pytest.mark.parametrize("preset", presets_of(MEMORY_MB), ids=lambda preset: preset.name)
def test_the_settings_of_a_preset_are_that_preset(preset: Preset) -> None:
    settings = {key: value for key, value in preset.settings.items() if value is not None}
    body = presets_body(MEMORY_MB, line_body(None, None), values(**settings))
    assert (body.chosen, body.has_limits) == (preset.name, preset.name != "everything")


@pytest.mark.parametrize("limit", [{"memory": 3_000}, {"max_upload": 3.0}, {"cpu_percent": 99}, {"upload_percent": 99}])
def test_one_limit_of_the_owner_is_a_limit(limit: dict[str, object]) -> None:
    body = presets_body(MEMORY_MB, line_body(None, None), values(**limit))
    assert (body.chosen, body.has_limits) == (None, True)


def test_the_upload_of_a_preset_follows_the_measured_line() -> None:
    balanced = values(memory=MEMORY_MB // 2, upload_percent=50, pause_on_battery=True, pause_on_full_screen=True)
    for measured, upload, gigabytes in ((None, 5, 54), (2_500_000.0, 10, 108)):
        body = presets_body(MEMORY_MB, line_body(measured, None if measured is None else 1.0), balanced)
        assert body.chosen == "balanced"  # also when the measurement comes after the choice
        assert (body.presets[1].upload, body.presets[1].gb_per_day) == (upload, pytest.approx(gigabytes))
        assert (body.line.upload, body.line.measured_at is None) == (2 * upload, measured is None)
        assert body.presets[2].upload is None
