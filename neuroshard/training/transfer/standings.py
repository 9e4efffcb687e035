"""Asks other nodes how far their state of a stage is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import anyio

from neuroshard.training.transfer.download import Asking
from neuroshard.training.transfer.errors import DonorError, LyingDonorError
from neuroshard.training.transfer.fields import StageName
from neuroshard.training.transfer.standing import LIMITS, Standing, read_standing, standing_request
from neuroshard.types import NodeId

STANDING_SECONDS = 5.0
QUESTIONS_AT_ONCE = 16


async def standings_of(asking: Asking, stage: StageName, peers: Sequence[NodeId]) -> dict[NodeId, Standing]:
    """What these nodes say of their state of the stage; who does not answer or has nothing is left out."""
    found: dict[NodeId, Standing] = {}
    slots = anyio.CapacityLimiter(QUESTIONS_AT_ONCE)

    async def ask(peer: NodeId) -> None:
        with suppress(DonorError):  # it may be gone
            async with slots:
                standing = await standing_of(asking, stage, peer)
            if standing is not None:
                found[peer] = standing

    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(ask, peer)
    return found


async def standing_of(asking: Asking, stage: StageName, peer: NodeId) -> Standing | None:
    """What one node says of its state of the stage; None: it has nothing of it. Raises DonorError."""
    try:
        return read_standing(await asking.ask(peer, standing_request(stage), LIMITS, STANDING_SECONDS))
    except LyingDonorError as error:
        asking.report(peer, error.reason)
        raise
