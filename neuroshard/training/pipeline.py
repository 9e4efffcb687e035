"""One microbatch along its route, hop by hop; a lone node's route has one hop, itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neuroshard.training.compute import ComputeThread
from neuroshard.training.executor import SessionId, StageExecutor


class Hop(Protocol):
    """One stage of a route, here or on a peer. The first stage takes token ids, the last one also labels."""

    async def forward(self, session: SessionId, inputs: Tensor) -> Tensor:
        """Activations for the next stage."""
        ...

    async def loss(self, session: SessionId, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of the last stage in one call: summed loss and gradient of the inputs."""
        ...

    async def backward(self, session: SessionId, gradient: Tensor | None) -> Tensor | None:
        """Gradient of the inputs; None from the first stage."""
        ...

    async def infer(self, inputs: Tensor, labels: Tensor | None) -> Tensor:
        """Forward only: activations, or the summed loss of each sequence when labels are given."""
        ...


class LocalHop:
    """A stage on this node: every call is one job of the compute thread."""

    def __init__(self, compute: ComputeThread, executor: StageExecutor) -> None:
        self._compute = compute
        self._executor = executor

    async def forward(self, session: SessionId, inputs: Tensor) -> Tensor:
        """See Hop."""
        return await self._compute.run(lambda: self._executor.forward(session, inputs))

    async def loss(self, session: SessionId, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Hop."""
        return await self._compute.run(lambda: self._executor.loss(session, inputs, labels))

    async def backward(self, session: SessionId, gradient: Tensor | None) -> Tensor | None:
        """See Hop."""
        return await self._compute.run(lambda: self._executor.backward(session, gradient))

    async def infer(self, inputs: Tensor, labels: Tensor | None) -> Tensor:
        """See Hop."""
        return await self._compute.run(lambda: self._executor.infer(inputs, labels))


@dataclass(frozen=True)
class MicrobatchResult:
    """What the last stage measured."""

    loss_sum: Tensor  # scalar, nats summed over tokens; still on the last stage's device
    token_count: int


async def run_microbatch(
    route: Sequence[Hop], session: SessionId, input_ids: Tensor, labels: Tensor
) -> MicrobatchResult:
    """Forward along the route and backward along its reverse; gradients stay accumulated in the stages.

    Law: any split of the layers over the hops gives the same loss and gradients as one hop that holds them all.
    """
    *before, last = route
    activations = input_ids
    for hop in before:
        activations = await hop.forward(session, activations)
    loss_sum, gradient = await last.loss(session, activations, labels)
    for hop in reversed(before):
        gradient = await hop.backward(session, gradient)
    return MicrobatchResult(loss_sum, labels.numel())


async def sequence_losses(route: Sequence[Hop], input_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of each sequence, (b,) nats a token, without touching gradients."""
    *before, last = route
    activations = input_ids
    for hop in before:
        activations = await hop.infer(activations, None)
    return (await last.infer(activations, labels)) / labels.shape[1]
