"""When the next round of a group is due, and when its averaged state may be downloaded. Pure."""

from __future__ import annotations

YOUNG_SHARE = 0.1  # of a step's sequences: so many are in while a step is young
SERVING_SHARE = 0.2  # from then on nobody begins to give its state
PATIENCE_SECONDS = 180.0
PUT_OFF_SECONDS = 60.0


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


def may_download_averaged(counted_sequences: int, enough_sequences: int, waited_seconds: float) -> bool:
    """Whether to begin to fetch a state that every step changes as a whole: while the step is young (DESIGN 4.6).

    So it may be there before the next one. Nobody waits longer than three minutes for that, as steps may take long.
    """
    return counted_sequences < YOUNG_SHARE * enough_sequences or waited_seconds >= PATIENCE_SECONDS


def may_serve_averaged(counted_sequences: float, enough_sequences: int, waited_seconds: float) -> bool:
    """Whether to begin to give such a state to others: not shortly before a step, whose exchange needs the line.

    Who was put off for a minute gets it all the same: the step may wait for nobody but that node.
    """
    return counted_sequences < SERVING_SHARE * enough_sequences or waited_seconds >= PUT_OFF_SECONDS
