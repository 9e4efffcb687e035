"""Token ids of one source on their way into shards, with the marks that a checkpoint needs. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuroshard.genesis.population.batches import Mark

Ids = NDArray[np.unsignedinteger[Any]]
NO_TOKENS: Ids = np.empty(0, dtype=np.uint16)


@dataclass(frozen=True)
class PackedShard:
    """A shard's ids (count,) and what to remember with it: reading goes on at the mark, after the leftover (n,)."""

    ids: Ids
    mark: Mark
    leftover: Ids


class Packer:
    """Keeps batches of ids until there are enough for a shard."""

    def __init__(self, mark: Mark, leftover: Ids = NO_TOKENS) -> None:
        """Where a checkpoint left off; the beginning of the source without one."""
        self._batches = deque([(leftover, mark)])
        self.tokens = len(leftover)

    @property
    def reached(self) -> Mark:
        """Where the source stands after all that was added."""
        return self._batches[-1][1]

    def add(self, ids: Ids, mark: Mark) -> None:
        """Take one batch (n,), after which the source stands at the mark."""
        self._batches.append((ids, mark))
        self.tokens += len(ids)

    def cut(self, count: int) -> PackedShard:
        """Take `count` ids from the front; there must be so many."""
        if not 0 < count <= self.tokens:
            raise ValueError(f"cannot cut {count} of {self.tokens} tokens")
        parts: list[Ids] = []
        missing = count
        ids, mark = self._batches.popleft()
        while len(ids) < missing:
            parts.append(ids)
            missing -= len(ids)
            ids, mark = self._batches.popleft()
        leftover = ids[missing:]
        parts.append(ids[:missing])
        self._batches.appendleft((leftover, mark))
        self.tokens -= count
        return PackedShard(np.concatenate(parts), mark, leftover)
