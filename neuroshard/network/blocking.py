"""The call that runs blocking work outside the event loop, or at once in tests with a virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

_Value = TypeVar("_Value")


class BlockingRunner(Protocol):
    """Runs a blocking function elsewhere and waits for its value."""

    def __call__(self, function: Callable[[], _Value], /) -> Awaitable[_Value]:
        """The function's value; what it raises is raised here."""
        ...
