"""A data feed whose position is safe on disk before anybody gets the data behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio
import anyio.to_thread

from neuroshard.data.feed import HeldOut
from neuroshard.data.windows import Batch
from neuroshard.status.snapshot import DataStatus
from neuroshard.training.evaluation import PINNED_SEQUENCES
from neuroshard.training.parts import Feed
from neuroshard.types import DataPosition

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # while the position cannot be written


class JournaledFeed:
    """See Feed. While the position cannot be written no data are given out: they might be sent twice."""

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
        self._taken: Batch | None = None  # of the feed, not yet given out

    @property
    def position(self) -> DataPosition:
        """See Feed."""
        return self._feed.position

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """See Feed. After a call that was cancelled, the next one may give what that one had taken."""
        if self._taken is None:
            self._taken = await self._feed.next_batch(sequences, step=step)
        if self._is_needed():
            await self._make_safe(self._taken.position)
        batch, self._taken = self._taken, None
        return batch

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
