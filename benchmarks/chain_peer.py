"""One node of a pipeline as a process of its own, over a real network at the address that it is given.

Arguments: number of its stage, its address. Says {"address", "node"}; obeys JSON objects on stdin, one per line:
{"peers": [...]} names all nodes in the order of their stages and connects to them; {"drive": count, "plane": name}
sends microbatches through all stages and answers with seconds and tokens; {"sent": true} answers with the bytes that
this node has sent. The end of stdin ends the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from itertools import count, pairwise
from typing import Any

import anyio
import anyio.to_thread
import torch

from benchmarks.identities import identity_of
from benchmarks.sizes import size
from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.chain_call import ChainedCall, ChainEdges
from neuroshard.pipeline.chain_server import Neighbours
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import MicrobatchKey
from neuroshard.pipeline.microbatch_call import MicrobatchCall
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress, WirePrecision
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import Architecture, LayerRange, NodeId, RunId

STAGES = size(6, 3)
BATCH, LENGTH = size((2, 256), (1, 32))
ARCHITECTURE = Architecture(*size((384, 9, 6, 3, 1024, 4096, 256), (64, 3, 2, 1, 128, 300, 32)))
IN_FLIGHT = 8
CUTS = [round(stage * ARCHITECTURE.layer_count / STAGES) for stage in range(STAGES + 1)]
ADDRESSES = tuple(StageAddress(RunId("1" * 64), LayerRange(start, stop), 1) for start, stop in pairwise(CUTS))
SHAPES = tuple(StageShapes.for_layers(ARCHITECTURE, stage.layers, BATCH) for stage in ADDRESSES)
PRECISION = WirePrecision.INT8
TOKENS = BATCH * LENGTH  # of a microbatch


class Peer:
    """The holder of one stage, which can also drive."""

    def __init__(self, number: int, network: Network, compute: ComputeThread) -> None:
        layers = ADDRESSES[number].layers
        model = StageModel(ARCHITECTURE, layers)
        initialise(model, 1)
        optimizer = make_inner_optimizer(model, InnerOptimization())
        executor = StageExecutor(model, optimizer, torch.device("cpu"))
        self._service = StageServer(compute, executor, sequences_per_step=10**9, batch_size=BATCH)
        self._service.open()
        self._network, self._nodes, self._number = network, list[NodeId](), number
        neighbours = Neighbours(network.transport, lambda node, _layers: node in self._nodes)
        stage = ADDRESSES[number]
        StageRequestHandler(self._service, stage, SHAPES[number], neighbours=neighbours).serve(network.transport)
        self._sessions = count(1)

    async def meet(self, peers: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Connect to the others."""
        self._nodes = [NodeId(peer["node"]) for peer in peers]
        for place, peer in enumerate(peers):
            if place != self._number:
                await self._network.transport.connect(peer["address"], is_given=True)
        return {"members": len(peers)}

    async def drive(self, microbatches: int, plane: str) -> Mapping[str, Any]:
        """Send microbatches through all stages, IN_FLIGHT at a time."""
        options, transport = StageClientOptions(PRECISION), self._network.transport
        hops: list[StageClient] = [
            RemoteStageClient(transport, node, ADDRESSES[stage], SHAPES[stage], options, moved=self._moved)
            for stage, node in enumerate(self._nodes)
        ]
        hops[self._number] = LocalStageClient(self._service, transport.local_id)
        routing, edges = FixedRouting(hops), ChainEdges(PRECISION)
        numbers, session = iter(range(microbatches)), next(self._sessions)
        ids = torch.randint(0, ARCHITECTURE.vocabulary_size, (BATCH, LENGTH + 1))

        async def line() -> None:
            for number in numbers:
                key = MicrobatchKey(transport.local_id, session, number)
                if plane == "star":
                    call = MicrobatchCall(routing, key, ids[:, :-1], ids[:, 1:])
                else:
                    call = ChainedCall(edges, routing, key, ids[:, :-1], ids[:, 1:])
                await call.run()

        started = time.perf_counter()
        async with anyio.create_task_group() as lines:
            for _ in range(IN_FLIGHT):
                lines.start_soon(line)
        seconds = time.perf_counter() - started
        for hop in hops:
            await hop.close(transport.local_id, session)
        return {"seconds": seconds, "tokens": microbatches * TOKENS, "stars": len(edges.stars())}

    def _moved(self, node: NodeId) -> int:
        every = self._network.transport.connections()
        return sum(one.bytes_sent + one.bytes_received for one in every if one.peer == node)

    def sent(self) -> Mapping[str, Any]:
        """Bytes that this node has sent."""
        return {"sent": sum(one.bytes_sent for one in self._network.transport.connections())}


async def main() -> None:
    """See above."""
    number, host = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    options = NetworkOptions(host, lan_discovery=False, port_mapping=False, relay=False)
    compute = ComputeThread(cpu_threads=1)
    async with libp2p_network(identity_of(number + 1), options) as network:
        peer = Peer(number, network, compute)
        _report({"address": network.transport.addresses()[0], "node": network.transport.local_id})
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            match json.loads(line):
                case {"peers": peers}:
                    _report(await peer.meet(peers))
                case {"drive": int(microbatches), "plane": str(plane)}:
                    _report(await peer.drive(microbatches, plane))
                case {"sent": True}:
                    _report(peer.sent())
                case order:
                    raise SystemExit(f"unknown order {order}")
    compute.close()


def _report(facts: Mapping[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    anyio.run(main, backend="trio")
