"""How messages reach peers: one interface, and the implementation inside one process."""

from neuroshard.network.in_memory import InMemoryNetwork, InMemoryTransport, Link
from neuroshard.network.transport import (
    Message,
    MessageTooLargeError,
    PeerUnreachableError,
    Transport,
    TransportClosedError,
)

__all__ = [
    "InMemoryNetwork",
    "InMemoryTransport",
    "Link",
    "Message",
    "MessageTooLargeError",
    "PeerUnreachableError",
    "Transport",
    "TransportClosedError",
]
