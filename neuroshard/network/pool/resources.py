"""What all links of one pool share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from secrets import randbits

from anyio.abc import TaskGroup

from neuroshard.network.budget import ByteBudget
from neuroshard.network.pacing import UploadPacer
from neuroshard.network.pool.options import PoolOptions
from neuroshard.network.pool.verifying import Verifier
from neuroshard.network.reputation import Reputation
from neuroshard.network.serving import RequestServer


def _numbers() -> Callable[[], int]:
    return count(randbits(62) + 1).__next__  # of this process, not of one before it


@dataclass(frozen=True)
class Resources:
    """Belongs to one event loop."""

    server: RequestServer
    budget: ByteBudget
    pacer: UploadPacer
    reputation: Reputation
    options: PoolOptions
    tasks: TaskGroup
    verifier: Verifier = field(default_factory=Verifier)
    next_transfer: Callable[[], int] = field(default_factory=_numbers)
