"""When a group's next round is due."""

from __future__ import annotations


def round_is_due(
    *,
    counted_sequences: int,
    enough_sequences: int,
    elapsed_seconds: float,
    max_round_seconds: float,
) -> bool:
    """Whether the members together counted enough sequences since the last round, or it is too long ago.

    Nothing counted means nothing to contribute: never due.
    """
    if enough_sequences < 1 or counted_sequences < 0:
        raise ValueError("enough_sequences must be positive, counts not negative")
    if counted_sequences == 0:
        return False
    return counted_sequences >= enough_sequences or elapsed_seconds >= max_round_seconds
