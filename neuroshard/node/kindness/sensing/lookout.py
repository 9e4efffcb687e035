"""Looking beside the event loop, with an end: a display may take a question and never answer it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from threading import Event

import anyio
import anyio.to_thread

from neuroshard.node.kindness.policy import Observed, Rules
from neuroshard.node.kindness.sensing.look import Sensors

MOST_LOOK_SECONDS = 10.0


class Lookout:
    """Looks without the display as long as that leaves a question unanswered; every other rule goes on."""

    def __init__(self, environment: Mapping[str, str] | None = None, most_seconds: float = MOST_LOOK_SECONDS) -> None:
        """`environment` is the process's own by default."""
        environment = os.environ if environment is None else environment
        self._sensors = Sensors(environment=environment)
        self._without_display = Sensors(environment={**environment, "DISPLAY": ""})
        self._most_seconds = most_seconds
        self._answered = Event()  # the last question to `_sensors`
        self._answered.set()

    async def look(self, rules: Rules, gpu_uuid: str | None) -> Observed:
        """See `Sensors.look`. Cancelled, it waits for nothing."""
        if self._answered.is_set():
            self._answered = Event()
            with anyio.move_on_after(self._most_seconds):
                return await anyio.to_thread.run_sync(
                    self._asked, self._answered, rules, gpu_uuid, abandon_on_cancel=True
                )
        return await anyio.to_thread.run_sync(self._without_display.look, rules, gpu_uuid)

    def close(self) -> None:
        """Let go of what is open; a question that is still unanswered ends with that."""
        self._sensors.close()
        self._without_display.close()

    def _asked(self, answered: Event, rules: Rules, gpu_uuid: str | None) -> Observed:
        try:
            return self._sensors.look(rules, gpu_uuid)
        finally:
            answered.set()
