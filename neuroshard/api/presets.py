"""Presets of limits for the wizard and the dashboard: their settings, and the most that each sends in a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from fastapi import APIRouter
from pydantic import Field

from neuroshard.api.arrival import Room
from neuroshard.api.context import ApiContext
from neuroshard.api.rendering import ResponseBody
from neuroshard.host.presets import Limit, Preset, PresetName, chosen_preset, has_limits, presets_of
from neuroshard.model.memory_limit import available_mb, probe_memory


class PresetBody(ResponseBody):
    """Settings that belong together, and what they cost."""

    name: PresetName
    settings: dict[str, Limit] = Field(description="values to send to /api/config; null removes a limit")
    gb_per_day: float | None = Field(description="most that this computer sends in a day; null: no limit")

    @classmethod
    def of(cls, preset: Preset, monthly_quota: object = None) -> Self:
        """The body of a preset, with the owner's quota of gigabytes a month."""
        room = Room.of({"monthly_quota": monthly_quota, **preset.settings})
        return cls(name=preset.name, settings=dict(preset.settings), gb_per_day=room.gb_per_day)


class PresetsBody(ResponseBody):
    """All presets of this computer."""

    presets: list[PresetBody]
    chosen: PresetName | None = Field(description="the one whose values the settings have; null: other limits")
    has_limits: bool = Field(description="whether the settings limit memory, upload or speed; by default they do not")
    after_restart: list[str] = Field(description="settings of the presets that are stored for the next start")


def presets_body(memory_mb: int, values: Mapping[str, object], after_restart: Sequence[str] = ()) -> PresetsBody:
    """The presets for this memory, and the one that these settings are; `after_restart` names those that wait."""
    presets: Sequence[Preset] = presets_of(memory_mb)
    quota = values.get("monthly_quota")
    waiting = [key for key in presets[0].settings if key in after_restart]
    bodies = [PresetBody.of(preset, quota) for preset in presets]
    return PresetsBody(
        presets=bodies,
        chosen=chosen_preset(values, presets),
        has_limits=has_limits(values),
        after_restart=waiting,
    )


def preset_routes(context: ApiContext) -> APIRouter:
    """Make the route."""
    router = APIRouter(tags=["status"])

    @router.get("/api/presets", response_model=PresetsBody)
    async def presets() -> PresetsBody:
        """Three sets of limits for this computer. A stored change counts even if it takes effect after a restart."""
        described, values, waiting = context.config_view(), dict[str, object](), list[str]()
        for key, setting in described.items() if isinstance(described, Mapping) else ():
            if isinstance(setting, Mapping):
                values[key] = setting["after_restart"] if "after_restart" in setting else setting.get("value")
                waiting += [key] if "after_restart" in setting else []
        return presets_body(available_mb(probe_memory(), None), values, waiting)

    return router
