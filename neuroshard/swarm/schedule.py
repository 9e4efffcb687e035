"""When a group's next round is due."""

from __future__ import annotations


def round_is_due(
    *,
    counted_sequences: int,
    inner_steps: int,
    sequences_per_step: int,
    members: int,
    elapsed_seconds: float,
    max_round_seconds: float,
) -> bool:
    """Whether the members together counted enough sequences since the last round, or it is too long ago.

    Enough is inner_steps x sequences_per_step x members. Nothing counted means nothing to contribute: never due.
    """
    if min(inner_steps, sequences_per_step, members) < 1 or counted_sequences < 0:
        raise ValueError("inner_steps, sequences_per_step and members must be positive, counts not negative")
    if counted_sequences == 0:
        return False
    return counted_sequences >= inner_steps * sequences_per_step * members or elapsed_seconds >= max_round_seconds
