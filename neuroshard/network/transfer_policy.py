"""The transfer policy: the owner's rules allow or stop large transfers, also while one is in progress.

A closed policy cancels this node's large requests and refuses the large requests of peers. An answer that is already
under way still finishes. Small messages continue, so that peers know the state of this node.
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

BULK_BYTES = 256 * 1024  # larger messages count as large, and so does a request whose answer may be larger
T = TypeVar("T")


class TransfersStoppedError(PeerUnreachableError):
    """The owner's rules allow no large transfer now."""


class TransferPolicy:
    """Allows or stops large transfers; open at first. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.reason = ""  # a sentence that says why large transfers are stopped; "" while they are allowed
        self._passing: set[anyio.CancelScope] = set()

    def close(self, reason: str) -> None:
        """Stop large transfers. Pending large requests of this node end now."""
        self.reason = reason
        for scope in self._passing:
            scope.cancel()

    def open(self) -> None:
        """Allow large transfers again."""
        self.reason = ""

    async def passing(self, work: Callable[[], Awaitable[T]]) -> T:
        """The value of `work`, a large transfer.

        Raises TransfersStoppedError if the policy is closed or closes meanwhile.
        """
        if not self.reason:
            with anyio.CancelScope() as scope:
                self._passing.add(scope)
                try:
                    return await work()
                finally:
                    self._passing.discard(scope)
        raise TransfersStoppedError(self.reason)


class PolicyTransport:
    """A transport that subjects large requests and answers to a policy."""

    def __init__(self, inner: Transport, policy: TransferPolicy) -> None:
        self._inner = inner
        self._policy = policy

    @property
    def local_id(self) -> NodeId:
        return self._inner.local_id

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Raises TransfersStoppedError in addition to the errors of `Transport.request`."""

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
        for_anyone: bool = False,
    ) -> None:
        """Large requests are refused with the policy's reason, before their tensors are received."""

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

        self._inner.serve(
            kind, checked_answer, limits, max_concurrent=max_concurrent, admit=admitted, for_anyone=for_anyone
        )

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        return await self._inner.connect(address, is_given=is_given)

    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses()

    def peers(self) -> frozenset[NodeId]:
        return self._inner.peers()

    def connections(self) -> tuple[Connection, ...]:
        return self._inner.connections()

    async def close(self) -> None:
        await self._inner.close()


def _bytes(frame: Frame) -> int:
    return sum(part.spec.byte_count for part in frame.tensors)
