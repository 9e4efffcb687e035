"""When the copy of a stage is renewed, and which node's turn that is. Decisions only."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.node.copy_order import RANKS


@dataclass(frozen=True)
class CopyTimes:
    """How often, and how much of the holder's line it may take."""

    every_seconds: float = 30.0  # no copy shall be older, where line and write budget allow
    lead_seconds: float = 8.0  # so long before that the next one is begun
    fresh_seconds: float = 10.0  # of a snapshot that is older than this the holder makes a new one, if it may
    look_seconds: float = 1.0
    retry_seconds: float = 5.0  # of the first in the order, while its copy is missing or old
    stale_seconds: float = 90.0  # of a copy: then the next one in the order makes one too
    turn_seconds: float = 20.0  # so long each one in the order waits for the ones before it
    ranks: int = RANKS
    share: float = 0.5  # of the holder's line


def copy_is_due(
    times: CopyTimes, rank: int, age_seconds: float | None, *, single_seconds: float, waited: float | None
) -> bool:
    """Whether to ask the holder for its state now.

    `age_seconds` of the copy here, `single_seconds` since the stage has one holder, `waited` since the last try.
    """
    if rank >= times.ranks or single_seconds < rank * times.turn_seconds:
        return False
    pause = times.retry_seconds if rank == 0 else times.every_seconds
    is_old = age_seconds is None or age_seconds >= times.every_seconds - times.lead_seconds
    return is_old and (waited is None or waited >= pause)
