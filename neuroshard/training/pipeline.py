"""One microbatch along its route, hop by hop; a lone node's route has one hop, itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neuroshard.training.microbatch import MicrobatchKey
from neuroshard.training.stage_service import StageService
from neuroshard.types import NodeId


class Hop(Protocol):
    """One stage of a route, here or on a peer. The first stage takes token ids, the last one also labels.

    Every method raises StageError, whose class says what may be tried next; repeating a call does no harm.
    """

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

    def __init__(self, service: StageService) -> None:
        self.service = service

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


async def run_microbatch(
    route: Sequence[Hop],
    key: MicrobatchKey,
    input_ids: Tensor,
    labels: Tensor,
    measured: Callable[[MicrobatchResult], None] | None = None,
) -> MicrobatchResult:
    """Forward along the route and backward along its reverse; gradients stay accumulated in the stages.

    `measured` is told the loss before the backward passes begin, after which stages may step. Raises StageError; the
    same key may then be run again, and every stage does what it has not done yet.
    Law: any split of the layers over the hops gives the same loss and gradients as one hop that holds them all.
    """
    *before, last = route
    activations = input_ids
    for hop in before:
        activations = await hop.forward(key, activations)
    loss_sum, gradient = await last.loss(key, activations, labels)
    result = MicrobatchResult(loss_sum, labels.numel())
    if measured is not None:
        measured(result)
    for hop in reversed(before):
        if gradient is None:
            raise ValueError("only the first stage of a route has no gradient to send back")
        gradient = await hop.backward(key, gradient)
    return result


async def sequence_losses(route: Sequence[Hop], input_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of each sequence, (b,) nats a token, without touching gradients."""
    *before, last = route
    activations = input_ids
    for hop in before:
        activations = await hop.infer(activations, None)
    return (await last.infer(activations, labels)) / labels.shape[1]
