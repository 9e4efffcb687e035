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
from neuroshard.network.line import ASSUMED_UPLOAD
from neuroshard.status.snapshot import NetworkStatus
from neuroshard.types import BITS_PER_BYTE


class LineBody(ResponseBody):
    """The upload of this computer's line."""

    upload: float = Field(description="megabits per second, measured or assumed")
    measured_at: float | None = Field(description="seconds since the epoch; null: not measured yet, so it is assumed")


def line_of(network: NetworkStatus) -> LineBody:
    """The line of a node with this status."""
    return line_body(network.line_upload, network.line_measured_at)


def line_body(upload: float | None, measured_at: float | None) -> LineBody:
    """The line with this measured upload in bytes per second; None: not measured."""
    speed = ASSUMED_UPLOAD if upload is None else upload
    return LineBody(upload=speed * BITS_PER_BYTE / 1e6, measured_at=measured_at)


class PresetBody(ResponseBody):
    """Settings that belong together, and what they cost."""

    name: PresetName
    settings: dict[str, Limit] = Field(description="values to send to /api/config; null removes a limit")
    upload: float | None = Field(description="most that this computer sends, in megabits per second; null: no limit")
    gb_per_day: float | None = Field(description="most that this computer sends in a day; null: no limit")

    @classmethod
    def of(cls, preset: Preset, line: LineBody, monthly_quota: object = None) -> Self:
        """The body of a preset on this line, with the owner's quota of gigabytes a month."""
        room = Room.of({"monthly_quota": monthly_quota, **preset.settings}, line.upload)
        settings = dict(preset.settings)
        return cls(name=preset.name, settings=settings, upload=room.max_upload, gb_per_day=room.gb_per_day)


class PresetsBody(ResponseBody):
    """All presets of this computer."""

    presets: list[PresetBody]
    line: LineBody
    chosen: PresetName | None = Field(description="the one whose values the settings have; null: other limits")
    has_limits: bool = Field(description="whether the settings limit memory, upload or speed; by default they do not")
    after_restart: list[str] = Field(description="settings of the presets that are stored for the next start")


def presets_body(
    memory_mb: int, line: LineBody, values: Mapping[str, object], after_restart: Sequence[str] = ()
) -> PresetsBody:
    """The presets for this memory and line, and the one in use; `after_restart` names the settings that wait."""
    presets: Sequence[Preset] = presets_of(memory_mb)
    quota = values.get("monthly_quota")
    waiting = [key for key in presets[0].settings if key in after_restart]
    bodies = [PresetBody.of(preset, line, quota) for preset in presets]
    return PresetsBody(
        presets=bodies,
        line=line,
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
        line = line_of(context.board.current().network)
        return presets_body(available_mb(probe_memory(), None), line, values, waiting)

    return router
