"""Bodies of the calls that change something."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, RootModel

from neuroshard.api.bodies.base import Answer, Question, Text

LONGEST_PAUSE_SECONDS = 7 * 86_400.0


class PauseRequest(Question):
    """POST /api/training/pause; without a duration the pause lasts until somebody resumes."""

    duration_seconds: float | None = Field(default=None, gt=0, le=LONGEST_PAUSE_SECONDS)


class NoMembers(Question):
    """A body for calls that need none: `{}` or nothing."""


SettingName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9_.-]+$")]


class ConfigChanges(RootModel[Annotated[dict[SettingName, JsonValue], Field(min_length=1, max_length=64)]]):
    """PATCH /api/config: settings to change, by name."""


class CommandBody(Answer):
    """202: what the command led to."""

    state: Text = Field(description="state of the node afterwards")
    message: Text
    details: dict[str, JsonValue] | None = None


class SessionRequest(Question):
    """POST /api/session: the API secret, typed in by the owner."""

    secret: str = Field(min_length=1, max_length=200)


class SessionBody(Answer):
    """What the dashboard needs to send commands."""

    authenticated: bool
    secret_required: bool = Field(description="true: the owner must enter the API secret first")
    csrf_token: str | None = Field(description="value of the X-NeuroShard-CSRF header; null when not authenticated")
    setup: bool = Field(description="true: the node waits to be set up; only the wizard's routes answer")
