"""A driver and three stages on nodes of their own, in memory, that hand their results to each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import anyio
import trio
from torch import Tensor
from trio.testing import MockClock

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import InMemoryNetwork
from neuroshard.network.transport import RequestHandler, Transport
from neuroshard.pipeline.chain_call import ChainedCall, ChainEdges
from neuroshard.pipeline.chain_protocol import PASS, PassAnswer, Receipt
from neuroshard.pipeline.chain_server import ChainRequestHandler, Neighbours
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import Architecture, LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, chain_of, gradients, key

T = TypeVar("T")

CUTS = (0, 1, 2, 3)
STAGES = tuple(StageAddress(RunId("1" * 64), LayerRange(a, b), 1) for a, b in pairwise(CUTS))
DRIVER = NodeId("driver")
ROWS = slice(0, 4)


def name_of(stage: int) -> NodeId:
    return NodeId(f"stage {stage}")


class CountedLine:
    """A node's transport, which counts the bytes of the tensors that it sends."""

    def __init__(self, transport: Transport, sent: dict[NodeId, int]) -> None:
        self._transport, self._sent = transport, sent

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        self._count(self._transport.local_id, frame)
        answer = await self._transport.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)
        self._count(peer, answer)
        return answer

    def _count(self, sender: NodeId, frame: Frame) -> None:
        size = sum(part.spec.byte_count for part in frame.tensors)
        self._sent[sender] = self._sent.get(sender, 0) + size


class RedirectedAnswers:
    """A transport whose handler of questions can be replaced later."""

    def __init__(self, transport: Transport, swarm: Swarm, stage: int) -> None:
        self._transport, self._swarm, self._stage = transport, swarm, stage

    def serve(self, kind: str, handler: RequestHandler, limits: FrameLimits, *, max_concurrent: int) -> None:
        """Register a handler."""

        async def answer(sender: NodeId, frame: Frame) -> Frame:
            chosen = self._swarm.answers.get(self._stage, handler) if kind == PASS else handler
            return await chosen(sender, frame)

        self._transport.serve(kind, answer, limits, max_concurrent=max_concurrent)


class Swarm:
    """A driver and stages on nodes of their own, in memory."""

    def __init__(self, network: InMemoryNetwork, services: Sequence[StageServer], options: StageClientOptions) -> None:
        self.network, self.services = network, services
        self.sent = dict[NodeId, int]()  # bytes of tensors by sender
        self.answers = dict[int, RequestHandler]()
        self.endpoints = list[StageRequestHandler]()
        shapes = [StageShapes.of(service.executor.model, 4) for service in services]
        for stage, service in enumerate(services):
            transport = network.join(name_of(stage))
            neighbours = Neighbours(CountedLine(transport, self.sent), lambda node, _layers: node != "stranger")
            handler = StageRequestHandler(
                service, STAGES[stage], shapes[stage], root=lambda: "ab", neighbours=neighbours
            )
            handler.serve(RedirectedAnswers(transport, self, stage))
            self.endpoints.append(handler)
        self.line = CountedLine(network.join(DRIVER), self.sent)
        self.hops = [
            RemoteStageClient(self.line, name_of(stage), STAGES[stage], shapes[stage], options)
            for stage in range(len(services))
        ]
        self.edges = ChainEdges(options.precision)

    def chain(self, stage: int) -> ChainRequestHandler:
        """The honest end of the chain at a stage."""
        chain = self.endpoints[stage].chain
        assert chain is not None
        return chain

    def falsify(self, stage: int, change: Callable[[Receipt], Receipt]) -> None:
        """Let a stage send changed receipts from now on."""

        async def lying(sender: NodeId, frame: Frame) -> Frame:
            answer = await self.chain(stage).answer(sender, frame)
            receipt = answer.read(PassAnswer).receipt
            return answer if receipt is None else replace(answer, message=PassAnswer(change(receipt)))

        self.answers[stage] = lying

    def call(self, name: int, hops: Sequence[StageClient] | None = None) -> ChainedCall:
        """A microbatch through all stages."""
        routing = FixedRouting(self.hops if hops is None else hops)
        return ChainedCall(self.edges, routing, key(name), INPUTS[ROWS], LABELS[ROWS])


def in_swarm(
    compute: ComputeThread,
    work: Callable[[Swarm], Awaitable[T]],
    options: StageClientOptions | None = None,
    *,
    clock: MockClock | None = None,
    architecture: Architecture = ARCHITECTURE,
) -> tuple[T, Swarm, dict[str, Tensor]]:
    """The value of `work`, the swarm, and the gradients that all its stages have accumulated."""
    services, swarms = chain_of(compute, CUTS, architecture=architecture), list[Swarm]()

    async def main() -> T:
        with InMemoryNetwork() as network:
            swarms.append(Swarm(network, services, options or StageClientOptions(timeout_seconds=30)))
            with anyio.fail_after(600):
                return await work(swarms[0])

    value: T = trio.run(main, clock=clock)  # pyright: ignore[reportUnknownMemberType]
    return value, swarms[0], gradients(services)
