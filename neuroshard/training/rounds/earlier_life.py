"""What a node sent to a round and trained on from, kept for the case that it ends before the round does."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from neuroshard.compression import MalformedVectorError
from neuroshard.errors import StorageError
from neuroshard.swarm.offload import Offload
from neuroshard.training.rounds.offer_file import Offer
from neuroshard.training.rounds.vote_book import VoteBook
from neuroshard.training.rounds.work import RoundWork

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Earlier:
    """What was sent, and the vector (k,) that the others read from it.

    What the codec lost of it is not told from what was trained since: both are for the next contribution.
    """

    offer: Offer
    contribution: Tensor


class EarlierLife:
    """Of one stage. Without it the work since a contribution is taken for a part of it, and lost with a restart."""

    def __init__(self, book: VoteBook, offload: Offload) -> None:
        self._book = book
        self._offload = offload

    async def keep(self, offer: Offer) -> None:
        """Write down what is sent now; the round goes on also when that is not possible."""
        try:
            await self._offload(lambda: self._book.keep_offer(offer))
        except StorageError as error:
            _LOG.warning("%s The round goes on.", error)

    async def sent(self, step_id: str, work: RoundWork) -> Earlier | None:
        """What was sent to a step; None when that was nothing, or cannot be read."""
        offer = await self._offload(lambda: self._book.offer(step_id))
        if offer is None or len(offer.parts) != work.plan.count:
            return None
        try:
            return Earlier(offer, await self._offload(lambda: work.decoded_parts(offer.parts)))
        except MalformedVectorError as error:
            _LOG.warning("What was sent to the round before the restart cannot be read: %s", error)
            return None
