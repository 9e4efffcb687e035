"""A data feed whose position is safe on disk before anybody gets the data behind it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import anyio.to_thread
import torch

from neuroshard.data.feed import HeldOut
from neuroshard.data.windows import Batch
from neuroshard.status.data import DataStatus
from neuroshard.training.evaluation import PINNED_SEQUENCES
from neuroshard.training.parts import Feed
from neuroshard.types import DataPosition

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # while the position cannot be written
BATCHES_AT_ONCE = 8  # are taken and noted together: writing costs a disk as much as computing a small microbatch


class JournaledFeed:
    """See Feed. While the position cannot be written no data are given out: they might be sent twice.

    A kill leaves out what was taken and not yet given out, less than BATCHES_AT_ONCE batches, until the next pass.
    """

    def __init__(
        self, feed: Feed, note: Callable[[DataPosition], None], is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        """`note` makes a position safe, in another thread; it raises OSError when it cannot.

        While it is not needed, no data leave this node: its checkpoints say where they go on.
        """
        self._feed = feed
        self._note = note
        self._is_needed = is_needed
        self._trouble = ""
        self._taken: deque[Batch] = deque()  # of one sequence each, not yet given out
        self._safe = 0  # of those, from the first one on
        self._given: DataPosition | None = None

    @property
    def position(self) -> DataPosition:
        """See Feed: behind what was given out."""
        return self._given or self._feed.position

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """See Feed. After a call that was cancelled, the next one may give what that one had taken."""
        if self._is_needed() or self._taken:
            while self._safe < sequences:
                await self._take(BATCHES_AT_ONCE * sequences, step)
            self._safe -= sequences
            batch = _joined([self._taken.popleft() for _ in range(sequences)])
        else:
            batch = await self._feed.next_batch(sequences, step=step)
        self._given = batch.position
        return batch

    async def _take(self, sequences: int, step: int | None) -> None:
        """Have so many ready, their position safe."""
        while len(self._taken) < sequences:
            self._taken.append(await self._feed.next_batch(1, step=step))
        await self._make_safe(self._taken[-1].position)
        self._safe = len(self._taken)

    async def held_out(self, count: int = PINNED_SEQUENCES) -> HeldOut:
        """See Feed."""
        return await self._feed.held_out(count)

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """See Feed."""
        self._feed.note_evaluation(train_loss, held_out_loss, step)

    def status(self) -> DataStatus:
        """See Feed."""
        status = self._feed.status()
        return replace(status, explanation=f"{status.explanation} {self._trouble}".strip())

    async def _make_safe(self, position: DataPosition) -> None:
        while True:
            try:
                await anyio.to_thread.run_sync(self._note, position)
            except OSError as error:
                self._trouble = f"The data position cannot be written: {error.strerror or error}."
                _LOG.warning("%s Nothing is driven until it can.", self._trouble)
                await anyio.sleep(RETRY_SECONDS)
            else:
                self._trouble = ""
                return


def _joined(batches: Sequence[Batch]) -> Batch:
    """One behind the other."""
    inputs, labels = torch.cat([one.input_ids for one in batches]), torch.cat([one.labels for one in batches])
    return Batch(inputs, labels, batches[-1].position, sum(one.token_count for one in batches))
