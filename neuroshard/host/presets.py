"""Presets: three sets of limits for this computer, from one that its owner hardly notices to one without limits. Pure.

The upload limits are shares of the line, so they follow its measured speed: `neuroshard/network/line.py` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

LIGHT_CPU_PERCENT = 40
LIGHT_UPLOAD_PERCENT = 25
BALANCED_UPLOAD_PERCENT = 50
ALL_PERCENT = 100

PresetName: TypeAlias = Literal["light", "balanced", "everything"]
Limit: TypeAlias = bool | int | float | None
"""The value of a setting; None: no limit."""


@dataclass(frozen=True)
class Preset:
    """Values of settings that belong together."""

    name: PresetName
    settings: Mapping[str, Limit]


def presets_of(memory_mb: int) -> tuple[Preset, ...]:
    """The presets of a computer on which a node may use this memory (MB of 10^6 bytes)."""
    return (
        _preset("light", memory_mb // 4, LIGHT_UPLOAD_PERCENT, LIGHT_CPU_PERCENT, pauses=True),
        _preset("balanced", memory_mb // 2, BALANCED_UPLOAD_PERCENT, ALL_PERCENT, pauses=True),
        _preset("everything", None, ALL_PERCENT, ALL_PERCENT, pauses=False),
    )


def _preset(name: PresetName, memory: int | None, upload_percent: int, cpu_percent: int, *, pauses: bool) -> Preset:
    return Preset(
        name,
        {
            "memory": memory,
            "max_upload": None,
            "upload_percent": upload_percent,
            "cpu_percent": cpu_percent,
            "pause_on_battery": pauses,
            "pause_on_full_screen": pauses,
        },
    )


def has_limits(values: Mapping[str, object]) -> bool:
    """Whether the settings limit memory, upload or speed. By default they limit nothing, and pause on battery."""
    is_slower = any(values.get(key, ALL_PERCENT) != ALL_PERCENT for key in ("cpu_percent", "upload_percent"))
    return is_slower or any(values.get(key) is not None for key in ("memory", "max_upload"))


def chosen_preset(values: Mapping[str, object], presets: Sequence[Preset]) -> PresetName | None:
    """The preset whose values the settings have; None if the owner's limits are other ones."""
    for preset in presets:
        if all(values.get(key) == value for key, value in preset.settings.items()):
            return preset.name
    return None
