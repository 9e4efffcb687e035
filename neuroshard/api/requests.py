"""Bodies of requests, and of the responses to commands and sessions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, RootModel

from neuroshard.api.rendering import EncodableText, RequestBody, ResponseBody
from neuroshard.types import DAY_SECONDS

LONGEST_PAUSE_SECONDS = 7 * DAY_SECONDS


class PauseRequest(RequestBody):
    """POST /api/training/pause. Without a duration the pause lasts until training is resumed."""

    duration_seconds: float | None = Field(default=None, gt=0, le=LONGEST_PAUSE_SECONDS)


class NoMembers(RequestBody):
    """Body of a call without parameters: `{}` or nothing."""


SettingName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9_.-]+$")]


class ConfigChanges(RootModel[Annotated[dict[SettingName, JsonValue], Field(min_length=1, max_length=64)]]):
    """PATCH /api/config: settings to change, by name."""


class CommandBody(ResponseBody):
    """202: the result of a command."""

    state: EncodableText = Field(description="state of the node afterwards")
    message: EncodableText
    details: dict[str, JsonValue] | None = None


class SessionRequest(RequestBody):
    """POST /api/session: a key that works once, from the page of `neuroshard open`, or the API secret."""

    secret: str = Field(min_length=1, max_length=200)


class SessionBody(ResponseBody):
    """The session of the dashboard, with the token that it needs to send commands."""

    csrf_token: str = Field(description="value of the X-NeuroShard-CSRF header")
    setup: bool = Field(description="true: the node waits to be set up; only the wizard's routes answer")
