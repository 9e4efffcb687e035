"""A stage of a chain dies with each of its messages, and a replica takes over: nothing is lost or counted twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import anyio
import pytest
import torch
import trio
from trio.testing import MockClock

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import InMemoryNetwork, PeerUnreachableError
from neuroshard.network.transport import Transport
from neuroshard.pipeline.chain_call import ChainedCall, ChainEdges
from neuroshard.pipeline.chain_protocol import HandedTensor, PassQuestion
from neuroshard.pipeline.chain_server import Neighbours
from neuroshard.pipeline.routing import ChoiceInTurn, SwarmRouting
from neuroshard.pipeline.stage_client import RemoteStageClient
from neuroshard.pipeline.stage_protocol import WirePrecision
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import Architecture, NodeId
from tests.worlds.chains import CUTS, DRIVER, ROWS, STAGES
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, ComputeInPlace, chain_of, gradients, key

# one without a subspace, and one whose coefficients travel with ids
ARCHITECTURES = {"dense": ARCHITECTURE, "subspace": replace(ARCHITECTURE, subspace_rank=8, free_blocks=1)}


def name_of(stage: int, replica: int) -> NodeId:
    return NodeId(f"stage {stage} {'ab'[replica]}")


@dataclass(frozen=True)
class Moment:
    """A message of the first attempt: who sends what to whom."""

    what: str  # name of the pass that is asked for, or of the tensor that is handed
    receiver: NodeId
    sender: NodeId = DRIVER


MOMENTS = [
    Moment("forward", name_of(0, 0)),
    Moment("forward", name_of(1, 0)),
    Moment("loss", name_of(2, 0)),
    Moment("inputs", name_of(1, 0), name_of(0, 0)),
    Moment("inputs", name_of(2, 0), name_of(1, 0)),
    Moment("gradient", name_of(1, 0), name_of(2, 0)),
    Moment("backward", name_of(1, 0)),
    Moment("backward", name_of(0, 0)),
    Moment("gradient", name_of(0, 0), name_of(1, 0)),
]
DEATHS = [(one, one.receiver) for one in MOMENTS] + [(one, one.sender) for one in MOMENTS if one.sender != DRIVER]


@dataclass
class Fate:
    """One node dies at one moment: before the message arrives, with its answer on the way, or after it."""

    moment: Moment
    victim: NodeId
    when: str
    is_dead: bool = False
    has_come: bool = False
    log: list[str] = field(default_factory=list[str])

    def check(self, *nodes: NodeId) -> None:
        """Raise PeerUnreachableError if one of these is dead."""
        if self.is_dead and self.victim in nodes:
            raise PeerUnreachableError("It is dead.")


class MortalLine:
    """A node's way to the others, on which one of them dies."""

    def __init__(self, transport: Transport, fate: Fate) -> None:
        self._transport, self._fate = transport, fate

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        fate, own = self._fate, self._transport.local_id
        fate.check(own, peer)
        message = frame.message
        what = message.name if isinstance(message, PassQuestion | HandedTensor) else ""
        fate.log.append(f"{own} {what} {peer}")
        is_moment = not fate.has_come and (own, what, peer) == (
            fate.moment.sender,
            fate.moment.what,
            fate.moment.receiver,
        )
        fate.has_come = fate.has_come or is_moment
        if is_moment and fate.when == "before":
            fate.is_dead = True
        fate.check(own, peer)
        answer = await self._transport.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)
        if is_moment and fate.when == "during":
            fate.is_dead = True
        fate.check(own, peer)
        if is_moment:
            fate.is_dead = True
        return answer


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize(("moment", "victim"), DEATHS)
def test_the_law_holds_whatever_message_a_stage_of_a_chain_dies_with(
    moment: Moment, victim: NodeId, when: str, architecture: Architecture
) -> None:
    fate = Fate(moment, victim, when)
    compute = ComputeInPlace()
    services = {
        name_of(number, replica): service
        for replica in range(2)
        for number, service in enumerate(chain_of(compute, CUTS, architecture=architecture))
    }
    shapes = [StageShapes.for_layers(architecture, stage.layers, 4) for stage in STAGES]
    run_of, lasted = list[ChainedCall](), list[float]()

    async def main() -> float:
        with InMemoryNetwork() as network:
            for node, service in services.items():
                number = int(str(node)[6])
                transport = network.join(node)
                neighbours = Neighbours(MortalLine(transport, fate), lambda _node, _layers: True)
                StageRequestHandler(
                    service, STAGES[number], shapes[number], root=lambda: "ab", neighbours=neighbours
                ).serve(transport)
            line = MortalLine(network.join(DRIVER), fate)
            routing = SwarmRouting(
                len(STAGES),
                lambda number: [name_of(number, replica) for replica in range(2)],
                lambda number, node: RemoteStageClient(line, node, STAGES[number], shapes[number]),
                ChoiceInTurn(DRIVER),
            )
            call = ChainedCall(ChainEdges(WirePrecision.FP32), routing, key(1), INPUTS[ROWS], LABELS[ROWS])
            run_of.append(call)
            began = anyio.current_time()
            result = await call.run()
            lasted.append(anyio.current_time() - began)
            assert fate.is_dead, fate.log
            return result.loss_sum.item()

    found_loss: float = trio.run(main, clock=MockClock(autojump_threshold=0))  # pyright: ignore[reportUnknownMemberType]
    (call,) = run_of
    whole = chain_of(compute, (0, 3), architecture=architecture)
    loss, _ = trio.run(whole[0].loss, key(1), INPUTS[ROWS], LABELS[ROWS])
    assert found_loss == pytest.approx(loss.item(), rel=1e-5)
    named = [hop.node_id for hop in call.hops if hop is not None]
    for node in named:
        assert services[node].counts.microbatches == 1, fate.log
    expected = gradients(whole)
    found = gradients([services[node] for node in named])
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)
    assert all(one.is_exact for one in call.replacements if one.stage != int(str(victim)[6]))
    assert lasted[0] <= 5, fate.log
