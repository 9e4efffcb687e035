"""Others than the source of a data set that may have its files, and when they are asked."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from neuroshard.data.opened_file import OpenedFile

REST_SECONDS = 30.0  # so long a source that could not be reached is not the first to be asked


class OtherGivers(Protocol):
    """Those who may have a file, whose `address` names its exact contents: a digest that is known before it comes.

    Nothing that they give is trusted: who gives something else is found out and left alone.
    """

    def may_have(self, name: str, address: str) -> bool:
        """Whether it makes sense to ask now."""
        ...

    def open(self, name: str, address: str) -> AbstractAsyncContextManager[OpenedFile]:
        """Begin to read a file from its start.

        Raises DataUnavailableError when nobody gives it, FileDamagedError for what is not the file.
        """
        ...


class SourceChoice:
    """Who is asked next: the source first, the others when it fails, and the source again."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest_seconds = rest_seconds
        self._down_until = float("-inf")

    def note_source(self, now: float, *, is_down: bool) -> None:
        """What the last attempt at the source has shown; seconds of the event loop's clock."""
        self._down_until = now + self._rest_seconds if is_down else float("-inf")

    def asks_others(self, now: float, *, asked_others: bool | None) -> bool:
        """Whether the next attempt goes to the others; `asked_others`: whether the last one at this file did."""
        return now < self._down_until if asked_others is None else not asked_others
