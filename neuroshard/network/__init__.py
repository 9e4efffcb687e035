"""The network room: transports, gossip, the directory and the reputation of peers behind one set of interfaces."""

from neuroshard.network.in_memory import InMemoryNetwork, InMemoryTransport
from neuroshard.network.in_memory_links import Link
from neuroshard.network.reputation import PeerScores, Reputation, ScoreReason
from neuroshard.network.transport import (
    Admission,
    Connection,
    Directory,
    Gossip,
    GossipCheck,
    MessageTooLargeError,
    Network,
    NobodyListensError,
    PeerRefusedError,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    RequestTimeoutError,
    Subscription,
    Transport,
    TransportClosedError,
)

__all__ = [
    "Admission",
    "Connection",
    "Directory",
    "Gossip",
    "GossipCheck",
    "InMemoryNetwork",
    "InMemoryTransport",
    "Link",
    "MessageTooLargeError",
    "Network",
    "NobodyListensError",
    "PeerRefusedError",
    "PeerScores",
    "PeerUnreachableError",
    "Reputation",
    "RequestHandler",
    "RequestRefusedError",
    "RequestTimeoutError",
    "ScoreReason",
    "Subscription",
    "Transport",
    "TransportClosedError",
]
