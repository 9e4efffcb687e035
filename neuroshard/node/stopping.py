"""How any thread asks the node to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock

import trio


class StopRequest:
    """Asks the event loop to end, from any thread, also before the loop runs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._reaction: Callable[[], object] = _nothing
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Remember the first reason; what `react` was told last happens on the event loop."""
        with self._lock:
            is_first, self.reason = self.reason is None, self.reason or reason
            if is_first and self._token is not None:
                with suppress(trio.RunFinishedError):  # the loop has ended already: nothing is left to stop
                    self._token.run_sync_soon(self._happen)  # pyright: ignore[reportUnknownMemberType]

    def react(self, reaction: Callable[[], object]) -> None:
        """On a stop, call this on the event loop's thread, and nothing that was told before: that has ended.

        At once when a stop was asked for already.
        """
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
            self._reaction = reaction
            was_asked = self.reason is not None
        if was_asked:
            reaction()

    def _happen(self) -> None:
        self._reaction()


def _nothing() -> None:
    """Nobody listens yet."""
