"""A stage as a driver sees it, here or on a peer, and what the last stage tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neuroshard.training.microbatch import MicrobatchKey
from neuroshard.training.stage_service import StageService
from neuroshard.types import NodeId

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

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """Activations for the next stage."""
        ...

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of the last stage in one call: summed loss and gradient of the inputs."""
        ...

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """Gradient of the inputs; None from the first stage."""
        ...

    async def infer(self, inputs: Tensor, labels: Tensor | None) -> Tensor:
        """Forward only: activations, or the summed loss of each sequence when labels are given."""
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
        self._root = root

    @property
    def state_root(self) -> str:
        """See Hop."""
        return self._root()

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """See Hop."""
        return await self.service.forward(key, inputs)

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Hop."""
        return await self.service.loss(key, inputs, labels)

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """See Hop."""
        return await self.service.backward(key, gradient)

    async def infer(self, inputs: Tensor, labels: Tensor | None) -> Tensor:
        """See Hop."""
        return await self.service.infer(inputs, labels)

    async def close(self, driver: NodeId, session: int) -> None:
        """See Hop."""
        self.service.close(driver, session)


@dataclass(frozen=True)
class MicrobatchResult:
    """What the last stage measured."""

    loss_sum: Tensor  # scalar, nats summed over tokens; still on the last stage's device
    token_count: int
