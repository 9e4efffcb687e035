"""Names that cost nothing: nodes without a replica that answer the requests of matchmaking as a test decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import msgspec

from neuroshard.consensus.chain import ChainProof
from neuroshard.consensus.message_queue import PART, PART_LIMITS
from neuroshard.consensus.stage_chain import CHAIN, CHAIN_LIMITS, ChainAnswer, chain_answer
from neuroshard.messages import Frame, TensorPart, TensorSpec
from neuroshard.network import InMemoryNetwork
from neuroshard.state.replica_status import REPLICA_STATUS, STATUS_REQUEST, ReplicaStatus, StatusAnswer
from neuroshard.types import NodeId


@dataclass
class FreeName:
    """One such node. `status` and `proof` return None to stay silent until the asker gives up."""

    name: NodeId
    network: InMemoryNetwork
    status: Callable[[], ReplicaStatus | None]
    proof: Callable[[], ChainProof | bytes | None] = lambda: None
    asked: list[float] = field(default_factory=list[float])  # times of the requests for its status

    def __post_init__(self) -> None:
        transport = self.network.join(self.name)
        transport.serve(REPLICA_STATUS, self._give_status, STATUS_REQUEST)
        transport.serve(CHAIN, self._give_chain, CHAIN_LIMITS)
        transport.serve(PART, self._take, PART_LIMITS)

    async def _give_status(self, _sender: NodeId, _frame: Frame) -> Frame:
        self.asked.append(anyio.current_time())
        status = self.status()
        if status is None:
            await anyio.sleep_forever()
        return Frame(REPLICA_STATUS, StatusAnswer(status))

    async def _give_chain(self, _sender: NodeId, _frame: Frame) -> Frame:
        proof = self.proof()
        if isinstance(proof, ChainProof):
            return chain_answer(proof)
        if proof is None:
            await anyio.sleep_forever()
        data = proof or b""
        return Frame(CHAIN, ChainAnswer(), (TensorPart(TensorSpec("proof", "uint8", (len(data),)), data),))

    async def _take(self, _sender: NodeId, _frame: Frame) -> Frame:
        await anyio.sleep_forever()
        raise AssertionError


def invented(proof: ChainProof) -> ChainProof:
    """A proof with another newest state, under the votes for the real one."""
    assert proof.tip is not None
    value = msgspec.structs.replace(proof.tip.value, next_root="e" * 64)
    return msgspec.structs.replace(proof, tip=msgspec.structs.replace(proof.tip, value=value))
