"""Carries messages of rounds between nodes of an in-memory network."""

from __future__ import annotations

import math

import anyio
import trio

from neuroshard.network import InMemoryNetwork, PeerRefusedError, PeerUnreachableError, TransportClosedError
from neuroshard.swarm.round import Message
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, TensorPart, TensorSpec

_KIND = "round/post"
_LIMITS = FrameLimits(max_body_bytes=1 << 20)


class RoundPost:
    """One node's messenger; a lost message is one that is never confirmed."""

    def __init__(self, network: InMemoryNetwork, node_id: NodeId) -> None:
        self._network = network
        self._transport = network.join(node_id)
        self._transport.serve(_KIND, self._take, _LIMITS)
        self._queues: dict[str, tuple[trio.MemorySendChannel[Message], trio.MemoryReceiveChannel[Message]]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Leave the network without a word."""
        self._is_closed = True
        self._network.kill(self._transport.local_id)
        for queue, _ in self._queues.values():
            queue.close()

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """See Messenger."""
        part = TensorPart(TensorSpec("payload", "uint8", (len(payload),)), payload)
        try:
            await self._transport.request(peer, Frame(_KIND, {"kind": kind}, (part,)), timeout_seconds=math.inf)
        except PeerRefusedError as error:
            raise PeerUnreachableError(error.message) from None

    async def receive(self, kind: str) -> Message:
        """See Messenger."""
        try:
            return await self._queue(kind)[1].receive()
        except trio.EndOfChannel:
            raise TransportClosedError("This node left.") from None

    def _queue(self, kind: str) -> tuple[trio.MemorySendChannel[Message], trio.MemoryReceiveChannel[Message]]:
        if self._is_closed:
            raise TransportClosedError("This node left.")
        if kind not in self._queues:
            self._queues[kind] = trio.open_memory_channel[Message](64)
        return self._queues[kind]

    async def _take(self, sender: NodeId, frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        kind = str(frame.header["kind"])
        self._queue(kind)[0].send_nowait(Message(sender, kind, bytes(frame.tensors[0].data)))
        return Frame(_KIND)
