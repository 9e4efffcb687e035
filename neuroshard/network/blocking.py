"""Blocking calls leave the event loop here: in a thread, or at once in tests with a virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

_Value = TypeVar("_Value")


class BlockingRunner(Protocol):
    """Runs a blocking function outside the event loop and waits for its value."""

    def __call__(self, function: Callable[[], _Value], /) -> Awaitable[_Value]:
        """Return the function's value. An exception of the function is raised here."""
        ...
