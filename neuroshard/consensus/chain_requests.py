"""The request for the chain of a stage: a node sends what proves its newest certified state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from neuroshard.consensus.chain import Chain, ChainError, ChainProof
from neuroshard.decoders import msgpack_decoder
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import ScoreReason
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.transfer_messages import LyingDonorError, StageName
from neuroshard.types import HexDigest, NodeId

CHAIN = "round/chain"
MAX_PROOF_BYTES = 16 << 20
ANSWER_SECONDS = 20.0
MOST_ASKED = 16


class ChainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the chain of a stage since this foundation."""

    stage: StageName
    statement: HexDigest


class ChainAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The proof is the frame's tensor."""


CHAIN_LIMITS = FrameLimits(max_header_bytes=1024, message=ChainRequest)
CHAIN_ANSWER_LIMITS = FrameLimits(max_header_bytes=1024, max_body_bytes=MAX_PROOF_BYTES, message=ChainAnswer)


def chain_answer(proof: ChainProof) -> Frame:
    """The answer with the proof."""
    data = msgspec.msgpack.encode(proof)
    return Frame(CHAIN, ChainAnswer(), (TensorPart(TensorSpec("proof", "uint8", (len(data),)), data),))


async def ask_chain(asking: ReplicaClient, stage: StageName, statement: str, peer: NodeId) -> ChainProof:
    """Ask one node for the chain of a stage. Raises DonorError."""
    with asking.blaming(peer):
        request = Frame(CHAIN, ChainRequest(stage, statement))
        answer = await asking.ask(peer, request, CHAIN_ANSWER_LIMITS, ANSWER_SECONDS)
        return await asking.offload(lambda: _read(answer))


async def newest_chain(asking: ReplicaClient, stage: StageName, known: Chain, peers: Sequence[NodeId]) -> Chain:
    """The newest chain that any of these nodes proves. Raises ForkError if two nodes prove different values.

    One honest answer is enough, however many others invent something: only what the foundation's seats have
    signed counts.
    """

    async def ask(peer: NodeId) -> Chain:
        proof = await ask_chain(asking, stage, known.statement, peer)
        with asking.blaming(peer):
            try:
                return await asking.offload(lambda: known.proven(proof))
            except ChainError as error:
                raise LyingDonorError(f"Its chain is not valid: {error.message}") from None

    found = await ask_replicas(list(peers), ask, at_once=MOST_ASKED)
    newest = known
    for chain in found.values():
        if chain.standing.height > newest.standing.height:
            newest = chain
        elif chain.tip is not None and chain.standing.height == newest.standing.height:
            newest.proven(chain.proof())  # raises ForkError for another value
    return newest


def _read(answer: Frame) -> ChainProof:
    """Raises LyingDonorError."""
    try:
        return msgpack_decoder(ChainProof).decode(b"".join(part.data for part in answer.tensors))
    except (ValueError, RecursionError) as error:
        raise LyingDonorError(f"Its chain cannot be read: {str(error)[:200]}", ScoreReason.MALFORMED_FRAME) from None
