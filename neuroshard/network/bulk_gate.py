"""Whether bulk may pass: a gate that the owner's rules close, also while something is on its way.

Closed, it stops what is large (tensors, states, shards): what this node has asked for ends at once, what others ask
for is refused from then on, and an answer to them that is on its way comes to its end. What is small goes on, so that
the others know what this node does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from neuroshard.network.transport import (
    Admission,
    Connection,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    Transport,
)
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits

BULK_BYTES = 256 * 1024  # what has more is large, and so is a request whose answer may have more
T = TypeVar("T")


class TransfersStoppedError(PeerUnreachableError):
    """This node's owner lets nothing large pass now."""


class BulkGate:
    """Open at first. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.reason = ""  # why nothing large passes, in a sentence; "" while it does
        self._passing: set[anyio.CancelScope] = set()

    def close(self, reason: str) -> None:
        """Let nothing large pass any more; what this node has asked for ends now."""
        self.reason = reason
        for scope in self._passing:
            scope.cancel()

    def open(self) -> None:
        """Let everything pass again."""
        self.reason = ""

    async def passing(self, work: Callable[[], Awaitable[T]]) -> T:
        """The value of `work`, which moves something large. Raises TransfersStoppedError when that may not pass."""
        if not self.reason:
            with anyio.CancelScope() as scope:
                self._passing.add(scope)
                try:
                    return await work()
                finally:
                    self._passing.discard(scope)
        raise TransfersStoppedError(self.reason)


class GatedTransport:
    """A transport whose large requests and answers pass a gate; see Transport."""

    def __init__(self, inner: Transport, gate: BulkGate) -> None:
        self._inner = inner
        self._gate = gate

    @property
    def local_id(self) -> NodeId:
        """See Transport."""
        return self._inner.local_id

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport; raises TransfersStoppedError as well."""

        async def ask() -> Frame:
            return await self._inner.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)

        is_large = _bytes(frame) > BULK_BYTES or (reply is not None and reply.max_body_bytes > BULK_BYTES)
        return await self._gate.passing(ask) if is_large and peer != self.local_id else await ask()

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits | None = None,
        *,
        max_concurrent: int = 16,
        admit: Admission | None = None,
    ) -> None:
        """See Transport; what is large is refused with the gate's reason, a request before its tensors have come."""

        def pass_gate(size: int) -> None:
            if self._gate.reason and size > BULK_BYTES:
                raise RequestRefusedError(self._gate.reason)

        def admitted(size: int) -> None:
            pass_gate(size)
            if admit is not None:
                admit(size)

        async def gated(sender: NodeId, request: Frame) -> Frame:
            answer = await handler(sender, request)
            if sender != self.local_id:
                pass_gate(_bytes(answer))
            return answer

        self._inner.serve(kind, gated, limits, max_concurrent=max_concurrent, admit=admitted)

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        """See Transport."""
        return await self._inner.connect(address, is_given=is_given)

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return self._inner.addresses()

    def peers(self) -> frozenset[NodeId]:
        """See Transport."""
        return self._inner.peers()

    def connections(self) -> tuple[Connection, ...]:
        """See Transport."""
        return self._inner.connections()

    async def close(self) -> None:
        """See Transport."""
        await self._inner.close()


def _bytes(frame: Frame) -> int:
    return sum(part.spec.byte_count for part in frame.tensors)
