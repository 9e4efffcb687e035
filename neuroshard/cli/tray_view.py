"""The state and the menu of the tray icon. It uses the REST API, like any other program."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from neuroshard.cli.client import NodeClient, NodeRefusedError, connect, entrance_of
from neuroshard.errors import NetworkRefusedError, NeuroShardError, StorageError, UsageError

PAUSE_SECONDS = 3600.0
MOST_TITLE_CHARACTERS = 120  # Windows shows 127


class Mood(Enum):
    """State of the node that the icon shows; the value is the icon's colour."""

    WORKING = "#3457d5"
    RESTING = "#8a8f98"
    TROUBLE = "#c9362b"


@dataclass(frozen=True)
class TrayView:
    """Title, mood and enabled menu entries of the icon at one moment."""

    title: str
    mood: Mood
    may_pause: bool
    may_resume: bool
    is_running: bool


def tray_view(status: Mapping[str, Any] | None) -> TrayView:
    """Make the view for a response of /api/status; None means that no node answers."""
    if status is None:
        return TrayView("NeuroShard: no node is running", Mood.RESTING, False, False, False)
    state = str(status.get("state"))
    title = f"NeuroShard: {status.get('state_reason') or state}"
    if len(title) > MOST_TITLE_CHARACTERS:
        title = title[: MOST_TITLE_CHARACTERS - 1] + "…"
    mood = Mood.TROUBLE if state == "failed" else Mood.WORKING if state == "training" else Mood.RESTING
    may_pause = state not in {"paused", "failed", "stopping"}
    return TrayView(title, mood, may_pause, state == "paused", True)


class TrayNode:
    """The node with this data folder, looked up for each action because it may have been restarted."""

    def __init__(
        self, data_dir: Path | None, *, demo: bool = False, open_page: Callable[[str], object] = webbrowser.open
    ) -> None:
        self._data_dir = data_dir
        self._demo = demo
        self._open_page = open_page
        self.seen = tray_view(None)  # result of the last `look`

    def look(self) -> TrayView:
        """Request the node's current state, store it in `seen` and return it."""
        self.seen = self._look()
        return self.seen

    def _look(self) -> TrayView:
        try:
            return tray_view(self._client().get("/api/status"))
        except (NetworkRefusedError, StorageError, UsageError):
            return tray_view(None)
        except NodeRefusedError as error:
            return TrayView(f"NeuroShard: {error.message}"[:MOST_TITLE_CHARACTERS], Mood.TROUBLE, False, False, True)

    def pause_an_hour(self) -> str:
        """Pause training for an hour. Returns the node's answer, or the reason of a failure."""
        return self._post("/api/training/pause", {"duration_seconds": PAUSE_SECONDS})

    def resume(self) -> str:
        """End a pause. Returns the node's answer, or the reason of a failure."""
        return self._post("/api/training/resume", {})

    def open_dashboard(self) -> str:
        """Open the dashboard in the browser. Returns the reason if that fails."""
        try:
            self._open_page(entrance_of(self._client()).page.as_uri())
        except NeuroShardError as error:
            return str(error)
        return ""

    def _post(self, path: str, body: Mapping[str, object]) -> str:
        try:
            return str(self._client().post(path, body).get("message", ""))
        except NeuroShardError as error:
            return str(error)

    def _client(self) -> NodeClient:
        return connect(self._data_dir, None, demo=self._demo)
