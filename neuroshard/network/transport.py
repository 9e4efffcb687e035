"""The interface between rooms that talk to peers and whatever carries their messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from neuroshard.errors import NeuroShardError
from neuroshard.types import NodeId


class PeerUnreachableError(NeuroShardError):
    """A peer that cannot be reached now; another try later may work."""


class TransportClosedError(NeuroShardError):
    """This node's own transport was closed."""


class MessageTooLargeError(NeuroShardError):
    """A message above the transport's limit; it was not sent."""


@dataclass(frozen=True)
class Message:
    """What arrived; the transport has authenticated the sender."""

    sender: NodeId
    kind: str
    payload: bytes = field(repr=False)


class Transport(Protocol):
    """Messages between nodes. A message that was sent may still be lost: only an answer proves arrival."""

    @property
    def local_id(self) -> NodeId:
        """This node."""
        ...

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """Send one message; waits while the peer's queue is full.

        Raises PeerUnreachableError, MessageTooLargeError or TransportClosedError.
        """
        ...

    async def receive(self, kind: str) -> Message:
        """The next message of this kind, from anybody. Raises TransportClosedError."""
        ...

    async def close(self) -> None:
        """Stop sending and receiving; whoever waits in `receive` gets TransportClosedError."""
        ...
