"""A stage as a driver sees it, here or on a peer, and what the last stage tells."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import anyio
from torch import Tensor

from neuroshard.training.held_out_claim import Measured
from neuroshard.training.microbatch import MicrobatchKey
from neuroshard.training.stage_frames import Operation
from neuroshard.training.stage_service import StageService
from neuroshard.training.timing import REMEMBERED_TIMINGS, HopTiming, recompute_seconds
from neuroshard.types import NodeId

T = TypeVar("T")
_HERE = NodeId("this node")


class Hop(Protocol):
    """One stage, here or on a peer. The first stage takes token ids, the last one also labels.

    Every method raises StageError, whose class says what may be tried next; repeating a call does no harm.
    """

    @property
    def node_id(self) -> NodeId:
        """Who does the work."""
        ...

    @property
    def state_root(self) -> str:
        """Names the weights behind the last answer: two hops with one root have equal ones; "" when it is unknown."""
        ...

    @property
    def timings(self) -> Sequence[HopTiming]:
        """Of the last requests of microbatches, the newest last."""
        ...

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """Activations for the next stage."""
        ...

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of the last stage in one call: summed loss and gradient of the inputs."""
        ...

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """Gradient of the inputs; None from the first stage."""
        ...

    async def infer(self, inputs: Tensor) -> Tensor:
        """Forward only: activations for the next stage."""
        ...

    async def measure(self, inputs: Tensor, labels: Tensor) -> Measured:
        """Forward only, of the last stage: the loss of each sequence, summed over its tokens."""
        ...

    async def read(self, session: int, position: int, inputs: Tensor) -> Tensor:
        """The next tokens of one text, whose position 0 begins it anew: activations, or the last stage's logits."""
        ...

    async def forget(self, session: int) -> None:
        """Let the stage forget a text."""
        ...

    async def close(self, driver: NodeId, session: int) -> None:
        """Let the stage forget a session whose microbatches are done."""
        ...


class LocalHop:
    """A stage on this node."""

    def __init__(self, service: StageService, node_id: NodeId = _HERE, root: Callable[[], str] = lambda: "") -> None:
        """`root` names the stage's present weights."""
        self.service = service
        self.node_id = node_id
        self.timings: deque[HopTiming] = deque(maxlen=REMEMBERED_TIMINGS)
        self._root = root

    @property
    def state_root(self) -> str:
        """See Hop."""
        return self._root()

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """See Hop."""
        return await self._timed(Operation.FORWARD, key, self.service.forward(key, inputs))

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Hop."""
        return await self._timed(Operation.LOSS, key, self.service.loss(key, inputs, labels))

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """See Hop."""
        return await self._timed(Operation.BACKWARD, key, self.service.backward(key, gradient))

    async def infer(self, inputs: Tensor) -> Tensor:
        """See Hop."""
        return await self.service.infer(inputs)

    async def measure(self, inputs: Tensor, labels: Tensor) -> Measured:
        """See Hop."""
        return Measured(await self.service.infer(inputs, labels))

    async def read(self, session: int, position: int, inputs: Tensor) -> Tensor:
        """See Hop; also while the node is paused, for its own texts."""
        return await self.service.texts.read(self.node_id, session, position, inputs)

    async def forget(self, session: int) -> None:
        """See Hop."""
        self.service.texts.forget(self.node_id, session)

    async def close(self, driver: NodeId, session: int) -> None:
        """See Hop."""
        self.service.close(driver, session)

    async def _timed(self, operation: Operation, key: MicrobatchKey, work: Awaitable[T]) -> T:
        """The value of `work`; what the service did not compute of the time it waited."""
        began, before = anyio.current_time(), self.service.compute_seconds(key)
        answer = await work
        seconds = anyio.current_time() - began
        worked = max(0.0, self.service.compute_seconds(key) - before)
        again = recompute_seconds(operation, before, worked) if self.service.is_recomputed(key) else 0.0
        self.timings.append(HopTiming(operation, key.session, key.microbatch, seconds, seconds, worked, again))
        return answer


@dataclass(frozen=True)
class MicrobatchResult:
    """What the last stage measured."""

    loss_sum: Tensor  # scalar, nats summed over tokens; still on the last stage's device
    token_count: int
