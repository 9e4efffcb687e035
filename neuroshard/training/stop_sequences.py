"""Stop sequences of a completion: text is held back while it could still become one of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopSequences:
    """Lets text through up to the first stop sequence, wherever the boundaries of the pieces fall."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.reached = False

    def feed(self, piece: str) -> str:
        """The text that is certainly part of the answer. Nothing more comes once a stop sequence was `reached`."""
        if self.reached:
            return ""
        text = self._held + piece
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self.reached, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The held text, when the answer ended otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
