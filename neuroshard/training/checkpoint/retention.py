"""Which generations stay and which make room: pure decisions over what lies in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuroshard.status.snapshot import CheckpointGeneration

KEPT_GENERATIONS = 3


@dataclass(frozen=True)
class Room:
    """What to delete before a write; `missing_bytes` > 0 when even that is not enough."""

    delete: tuple[CheckpointGeneration, ...]
    missing_bytes: int


def superfluous(
    generations: Sequence[CheckpointGeneration], last_outer: CheckpointGeneration | None
) -> tuple[CheckpointGeneration, ...]:
    """All but the newest three and the one kept for the last outer step. `generations` is newest first."""
    return tuple(item for item in generations[KEPT_GENERATIONS:] if item != last_outer)


def make_room(
    generations: Sequence[CheckpointGeneration],
    new_bytes: int,
    *,
    elsewhere_bytes: int = 0,
    own_limit_bytes: int,
    all_limit_bytes: int | None = None,
    free_bytes: int,
    reserve_bytes: int,
) -> Room:
    """Oldest generations to delete so that one of `new_bytes` fits the own limit, that of all states and the disk.

    `elsewhere_bytes` are states of other runs, and those set aside or damaged: they count towards the limit of all and
    are nobody's to delete here. The newest generation is never deleted either: until the new one is complete, it is all
    there is. Nothing is deleted when that would not suffice.
    """
    used = sum(item.bytes for item in generations)
    shortage = max(used + new_bytes - own_limit_bytes, new_bytes + reserve_bytes - free_bytes)
    if all_limit_bytes is not None:
        shortage = max(shortage, elsewhere_bytes + used + new_bytes - all_limit_bytes)
    chosen: list[CheckpointGeneration] = []
    for item in reversed(generations[1:]):
        if shortage <= 0:
            break
        chosen.append(item)
        shortage -= item.bytes
    return Room((), shortage) if shortage > 0 else Room(tuple(chosen), 0)
