"""What the control of the presets calls the limits in force."""

from __future__ import annotations

import pytest

from neuroshard.api.presets import presets_body
from neuroshard.config.loading import load_settings
from neuroshard.host.presets import Preset, presets_of

MEMORY_MB = 8_000


def values(**settings: object) -> dict[str, object]:
    """The values of all settings after these were given."""
    described = load_settings({"data_dir": "/data", **settings}, {}).describe()
    return {key: setting["value"] for key, setting in described.items()}  # type: ignore[index, misc]


def test_settings_that_nobody_has_touched_set_no_limit() -> None:
    body = presets_body(MEMORY_MB, values())
    assert (body.chosen, body.has_limits) == (None, False)


@pytest.mark.parametrize("preset", presets_of(MEMORY_MB), ids=lambda preset: preset.name)
def test_the_settings_of_a_preset_are_that_preset(preset: Preset) -> None:
    settings = {key: value for key, value in preset.settings.items() if value is not None}
    body = presets_body(MEMORY_MB, values(**settings))
    assert (body.chosen, body.has_limits) == (preset.name, preset.name != "everything")


@pytest.mark.parametrize("limit", [{"memory": 3_000}, {"max_upload": 3.0}, {"cpu_percent": 99}])
def test_one_limit_of_the_owner_is_a_limit(limit: dict[str, object]) -> None:
    body = presets_body(MEMORY_MB, values(**limit))
    assert (body.chosen, body.has_limits) == (None, True)
