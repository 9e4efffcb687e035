"""The interfaces of the network (requests, gossip, directory), their errors, and the check of a directory record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from neuroshard.errors import NeuroShardError
from neuroshard.identity import DelegationExpiredError, MalformedClaimError, SignedClaim, VerifiedClaim, verify_claim
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.reputation import Reputation
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId


class Requester(Protocol):
    """The part of a Transport that a hop needs."""

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport.request."""
        ...


MAX_GOSSIP_BYTES = 64 * 1024
MAX_REASON_CHARACTERS = 500


class PeerUnreachableError(NeuroShardError):
    """A peer that cannot be reached now; another try later may work."""


class RequestTimeoutError(PeerUnreachableError):
    """A peer that was reached but did not answer in time."""


class TransportClosedError(NeuroShardError):
    """This node's own transport was closed."""


class MessageTooLargeError(NeuroShardError):
    """A message above the transport's limit; it was not sent."""


class PeerRefusedError(NeuroShardError):
    """The peer answered that it refuses; its reason is in the message."""


class RequestRefusedError(NeuroShardError):
    """Raised by a handler: the asking peer is told the reason."""


RequestHandler: TypeAlias = Callable[[NodeId, Frame], Awaitable[Frame]]
Admission: TypeAlias = Callable[[int], None]
"""Is told the bytes of a peer's tensors before they are received; refuses them by raising RequestRefusedError."""
GossipCheck: TypeAlias = Callable[[NodeId, bytes], bool]
"""Whether gossip that came from a node is worth passing on; pure and fast."""


@dataclass(frozen=True)
class Connection:
    """A peer this node is connected with now."""

    peer: NodeId
    address: str
    kind: ConnectionKind
    is_outbound: bool
    since: float  # seconds since the epoch
    bytes_sent: int = 0
    bytes_received: int = 0
    rtt_seconds: float | None = None
    bulk_connections: int = 0  # direct connections for tensors


class Transport(Protocol):
    """Requests between nodes: what nobody here serves is refused before memory is taken.

    There are no streams: docs/decisions/0013 tells what carries large tensors instead.
    """

    @property
    def local_id(self) -> NodeId:
        """This node."""
        ...

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Ask a peer and wait for its answer, which must keep the limits of `reply` (None: a header, no tensors).

        The peer's handler runs at most once for it, whatever breaks; after an error it may have run or not.
        Raises PeerUnreachableError (RequestTimeoutError when it was reached), PeerRefusedError, WireError for an
        answer that breaks the limits, MessageTooLargeError or TransportClosedError.
        """
        ...

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits | None = None,
        *,
        max_concurrent: int = 16,
        admit: Admission | None = None,
    ) -> None:
        """Answer requests of a kind that `admit` lets in; one handler a kind, ValueError for a second one.

        A handler refuses by raising RequestRefusedError. Its other errors are logged here and told as "internal error".
        """
        ...

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        """Connect to a multiaddr that ends with /p2p/<node id>. Raises PeerUnreachableError, UsageError.

        `is_given`: by this node's owner. What others tell of may not lead to this computer, unless all is on it.
        """
        ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which others may reach this node."""
        ...

    def peers(self) -> frozenset[NodeId]:
        """Whom this node is connected with; costs little, for those who look every second."""
        ...

    def connections(self) -> tuple[Connection, ...]:
        """The same peers, with all that there is to tell about each connection."""
        ...

    async def close(self) -> None:
        """Stop asking and answering; whoever waits in `request` gets TransportClosedError."""
        ...


class Subscription(Protocol):
    """The gossip of one topic; its queue is bounded, and what does not fit is dropped and counted."""

    @property
    def dropped(self) -> int:
        """Messages that found the queue full."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises TransportClosedError."""
        ...

    def close(self) -> None:
        """Take no more messages."""
        ...


class Gossip(Protocol):
    """Small messages to everybody who listens to a topic."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Tell everybody. Raises MessageTooLargeError above MAX_GOSSIP_BYTES, TransportClosedError."""
        ...

    def subscribe(self, topic: str, check: GossipCheck) -> Subscription:
        """Listen. What `check` refuses is not passed on, and whoever forwarded it loses reputation."""
        ...


class Directory(Protocol):
    """Who is where: expiring records that every node signs for itself, under a namespace."""

    async def announce(self, namespace: str, record: bytes) -> None:
        """Store this node's record, an encoded claim with domain "announcement". Raises PeerUnreachableError."""
        ...

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
        """Records whose signature and age were checked, the newest of each node."""
        ...


@dataclass(frozen=True)
class Network:
    """All ways to reach others, and what this node thinks of them."""

    transport: Transport
    gossip: Gossip
    directory: Directory
    reputation: Reputation = field(default_factory=Reputation)


RECORD_DOMAIN = "announcement"
MAX_RECORD_BYTES = 16 * 1024
RECORD_SECONDS = 3600.0  # older ones are gone; nodes announce themselves again well before

RecordCheck: TypeAlias = Callable[[VerifiedClaim], bool]
"""Whether a claim that holds says what a record must; only those who make and read records know that. Pure and fast."""


def any_record(_claim: VerifiedClaim) -> bool:
    """The check of a directory that does not care what its records say."""
    return True


def checked_record(owner: NodeId | None, record: bytes, now: float, accepts: RecordCheck = any_record) -> VerifiedClaim:
    """The claim in a record that lies under `owner` (None: whoever signed it).

    Raises DataError: ClaimTooLargeError, MalformedClaimError also for what `accepts` refuses, ForeignClaimError for a
    record under another's name, SignatureError, ClaimExpiredError or DelegationExpiredError.
    """
    claim = SignedClaim.decode(record, MAX_RECORD_BYTES)
    if now >= claim.delegation.expires_at:  # cheaper than the signatures
        raise DelegationExpiredError(f"The delegation of node {claim.delegation.node_id} expired.")
    verified = verify_claim(claim, RECORD_DOMAIN, now, owner, max_age_seconds=RECORD_SECONDS)
    if not accepts(verified):
        raise MalformedClaimError(f"The record of node {verified.node_id} does not say what a record must.")
    return verified


class NetworkFailedError(NeuroShardError):
    """A background task of the network failed; the cause says how."""
