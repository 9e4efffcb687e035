"""Bounded queues of one node for messages that need no answer, one for each kind."""

from __future__ import annotations

from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from neuroshard.network.transport import Message, PeerUnreachableError, TransportClosedError
from neuroshard.types import NodeId

MAX_KINDS = 64  # inboxes of one node
MAX_KIND_CHARACTERS = 64

_Queue: TypeAlias = tuple[MemoryObjectSendStream[Message], MemoryObjectReceiveStream[Message]]


class Inboxes:
    """The queues of one node."""

    def __init__(self, owner: NodeId, queue_length: int) -> None:
        self._owner = owner
        self._queue_length = queue_length
        self._queues: dict[str, _Queue] = {}
        self._ended = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._ended

    async def receive(self, kind: str) -> Message:
        """The next message of this kind. Raises TransportClosedError."""
        try:
            return await self._queue(kind)[1].receive()
        except (anyio.ClosedResourceError, anyio.EndOfStream):
            raise TransportClosedError("This node's transport is closed.") from None

    async def deliver(self, message: Message) -> None:
        """Queue a message, waiting while the queue is full. Raises PeerUnreachableError when it ends meanwhile."""
        # strangers may open some queues, since messages may come before their reader; but not any number of them
        if message.kind not in self._queues and (
            len(self._queues) >= MAX_KINDS or len(message.kind) > MAX_KIND_CHARACTERS
        ):
            raise PeerUnreachableError(f"Peer {self._owner} does not know messages of kind {message.kind[:64]!r}.")
        try:
            await self._queue(message.kind)[0].send(message)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, TransportClosedError):
            raise PeerUnreachableError(f"Peer {self._owner} went away.") from None

    def close(self) -> None:
        """End all queues; whoever waits gets TransportClosedError."""
        self._ended = True
        for sender, receiver in self._queues.values():
            sender.close()
            receiver.close()

    def _queue(self, kind: str) -> _Queue:
        if self._ended:
            raise TransportClosedError("This node's transport is closed.")
        if kind not in self._queues:
            self._queues[kind] = anyio.create_memory_object_stream[Message](self._queue_length)
        return self._queues[kind]
