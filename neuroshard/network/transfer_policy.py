"""The transfer policy: the owner's rules allow or stop large transfers, also while one is in progress.

A closed policy cancels the large requests of this node and refuses the large requests of peers. An answer that is
already on its way still finishes. Small messages continue, so that peers know the state of this node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.transport import (
    Admission,
    Connection,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    Transport,
)
from neuroshard.types import NodeId

BULK_BYTES = 256 * 1024  # what has more is large, and so is a request whose answer may have more
T = TypeVar("T")


class TransfersStoppedError(PeerUnreachableError):
    """This node's owner lets nothing large pass now."""


class TransferPolicy:
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


class PolicyTransport:
    """A transport whose large requests and answers pass a policy; see Transport."""

    def __init__(self, inner: Transport, policy: TransferPolicy) -> None:
        self._inner = inner
        self._policy = policy

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
        return await self._policy.passing(ask) if is_large and peer != self.local_id else await ask()

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits | None = None,
        *,
        max_concurrent: int = 16,
        admit: Admission | None = None,
    ) -> None:
        """See Transport; what is large is refused with the policy's reason, a request before its tensors have come."""

        def check_policy(size: int) -> None:
            if self._policy.reason and size > BULK_BYTES:
                raise RequestRefusedError(self._policy.reason)

        def admitted(size: int) -> None:
            check_policy(size)
            if admit is not None:
                admit(size)

        async def checked_answer(sender: NodeId, request: Frame) -> Frame:
            answer = await handler(sender, request)
            if sender != self.local_id:
                check_policy(_bytes(answer))
            return answer

        self._inner.serve(kind, checked_answer, limits, max_concurrent=max_concurrent, admit=admitted)

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
