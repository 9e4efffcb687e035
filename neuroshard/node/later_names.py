"""Names of a run's file whose features come with later versions.

They are known, so that nobody takes them for misspelt; none of them reaches the parameters, because what a run's id
covers must have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuroshard.errors import UsageError
from neuroshard.types import JsonValue


@dataclass(frozen=True)
class LaterName:
    """A name whose feature is not there yet."""

    feature: str
    today: str | int | None = None  # the value that says what this version does anyway; None when there is none


LATER_NAMES: Mapping[str, LaterName] = {
    "matchmaking_time": LaterName("matchmaking with a time limit of the run's"),
    "averaging_timeout": LaterName("a time limit of the run's for one averaging"),
    "sparse_avg": LaterName("sparse averaging of another share than the 5 % of strategy sparta", 0),
    "average_state_every": LaterName("averaging of the state, which all replicas hold bit for bit,", 0),
    "max_allowed_stale": LaterName("another number of rounds to catch up with", 5),  # vote_book.KEPT_STEPS
}
_HINT = "Leave the name out."


def check_not_later(name: str, value: JsonValue) -> None:
    """Raises UsageError when this version cannot do yet what the entry asks for."""
    later = LATER_NAMES.get(name)
    if later is not None and not _is_today(later, value):
        hint = _HINT if later.today is None else f"Leave the name out; {name} = {later.today!r} says the same."
        raise UsageError(f"{name}: {later.feature} is not in this version.", hint)


def _is_today(later: LaterName, value: JsonValue) -> bool:
    return later.today is not None and not isinstance(value, bool) and value == later.today
