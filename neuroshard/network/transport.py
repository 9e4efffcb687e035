"""The interfaces of the network (requests, gossip, directory), their errors, and the check of a directory record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeAlias, TypeVar

from msgspec import Meta, Struct

from neuroshard.errors import NeuroShardError
from neuroshard.identity import (
    DelegationExpiredError,
    MalformedClaimError,
    VerifiedClaim,
    read_claim,
    verify_claim,
)
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.reputation import Reputation
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import MAX_ADDRESS_CHARACTERS, NodeId


class Requester(Protocol):
    """The part of a Transport that a stage client needs."""

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Ask a peer and wait for its answer, as `Transport.request` does."""
        ...


MAX_GOSSIP_BYTES = 64 * 1024
MAX_REASON_CHARACTERS = 500


class PeerUnreachableError(NeuroShardError):
    """The peer cannot be reached now; a later attempt may succeed."""


class NobodyListensError(PeerUnreachableError):
    """The peer's computer is there and answers at once that nobody listens at the port: its process is gone."""


class RequestTimeoutError(PeerUnreachableError):
    """The peer was reached but did not answer in time."""


class TransportClosedError(NeuroShardError):
    """This node's own transport is closed."""


class MessageTooLargeError(NeuroShardError):
    """The message exceeds the transport's limit and was not sent."""


class PeerRefusedError(NeuroShardError):
    """The peer refused the request; the message contains its reason."""


class RequestRefusedError(NeuroShardError):
    """Raised by a request handler to refuse; the peer gets the reason."""


RequestHandler: TypeAlias = Callable[[NodeId, Frame], Awaitable[Frame]]
Admission: TypeAlias = Callable[[int], None]
"""Called with the byte count of a peer's tensors before they are received; refuses by raising RequestRefusedError."""
GossipCheck: TypeAlias = Callable[[NodeId, bytes], bool]
"""Whether gossip of a node is valid and should be forwarded; pure and fast."""


@dataclass(frozen=True)
class Connection:
    """A peer that this node is connected with now."""

    peer: NodeId
    address: str
    kind: ConnectionKind
    is_outbound: bool
    since: float  # seconds since the epoch
    bytes_sent: int = 0
    bytes_received: int = 0
    rtt_seconds: float | None = None
    bulk_connections: int = 0  # direct connections for tensors
    is_far: bool = False  # the peer is outside this computer's own networks
    bytes_arrived: int = 0  # that these sent and the peer's system acknowledged, where this system reports it
    busy_seconds: float = 0.0  # with data on its way over them; 0 where this system does not report it


class Transport(Protocol):
    """Requests between nodes. A kind without a handler is refused before memory is allocated.

    There are no streams: docs/decisions/0013 explains how large tensors travel instead.
    """

    @property
    def local_id(self) -> NodeId: ...

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Ask a peer and wait for its answer, within the limits of `reply` (None: a header without tensors).

        The peer's handler runs at most once per call, whatever breaks; after an error it may or may not have run.
        Raises PeerUnreachableError (RequestTimeoutError if the peer was reached), PeerRefusedError, WireError for an
        answer beyond the limits, MessageTooLargeError or TransportClosedError.
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
        for_anyone: bool = False,
    ) -> None:
        """Answer requests of a kind that `admit` accepts. Raises ValueError for a second handler of a kind.

        Only peers that the membership gate lets in are answered, unless the kind is `for_anyone`.

        A handler refuses by raising RequestRefusedError. Its other errors are logged here; the peer gets "internal
        error".
        """
        ...

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        """Connect to a multiaddr that ends with /p2p/<node id>. Raises PeerUnreachableError, UsageError.

        `is_given` marks an address from this node's owner, which is obeyed. Others must be public, or reported by a
        node on a private network or on this computer.
        """
        ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which peers may reach this node."""
        ...

    def peers(self) -> frozenset[NodeId]:
        """The nodes this one is connected with. Cheap enough to call every second."""
        ...

    def connections(self) -> tuple[Connection, ...]:
        """The same peers, with the details of each connection."""
        ...

    async def close(self) -> None:
        """Stop sending and answering requests. Pending `request` calls raise TransportClosedError."""
        ...


class Subscription(Protocol):
    """The gossip of one topic. Its queue is bounded; messages that do not fit are dropped and counted."""

    @property
    def dropped(self) -> int:
        """Number of messages dropped because the queue was full."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises TransportClosedError."""
        ...

    def close(self) -> None:
        """Accept no more messages."""
        ...


class Gossip(Protocol):
    """Small messages to all nodes that listen to a topic."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Send to all listeners. Raises MessageTooLargeError above MAX_GOSSIP_BYTES, TransportClosedError."""
        ...

    def subscribe(self, topic: str, check: GossipCheck) -> Subscription:
        """Listen to a topic. A message refused by `check` is not forwarded, and its sender loses reputation."""
        ...


class Directory(Protocol):
    """Expiring records that every node signs for itself, under a namespace. They say where nodes are."""

    async def announce(self, namespace: str, record: bytes) -> None:
        """Store this node's record, an encoded claim with domain "announcement". Raises PeerUnreachableError."""
        ...

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
        """Find records with checked signature and age, the newest of each node."""
        ...


@dataclass(frozen=True)
class Network:
    """Everything one node needs to reach its peers, the reputation of those peers, and the gate before them."""

    transport: Transport
    gossip: Gossip
    directory: Directory
    reputation: Reputation = field(default_factory=Reputation)
    gate: MembershipGate = field(default_factory=MembershipGate)


RECORD_KIND = "announcement"
MAX_RECORD_BYTES = 16 * 1024
RECORD_SECONDS = 3600.0  # lifetime of a record; nodes announce themselves again well before

MAX_RECORD_ADDRESSES = 16
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS, pattern=r"\A/[!-~]*\Z")]  # the transport parses it


class DirectoryRecord(Struct, frozen=True, kw_only=True):
    """The content of a record in the directory. Its readers declare more fields in a subclass."""

    # multiaddrs that end with /p2p/<node>
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_RECORD_ADDRESSES)] = ()

    def leads_to(self, node_id: NodeId) -> bool:
        """Return whether every address ends with /p2p/ and this node's id."""
        return all(node_of_address(address) == node_id for address in self.addresses)


def node_of_address(address: str) -> NodeId:
    """Return the node id after the last /p2p/ of an address, or an empty one."""
    return NodeId(address.rpartition("/p2p/")[2] if "/p2p/" in address else "")


RecordT = TypeVar("RecordT", bound=DirectoryRecord)


def checked_record(owner: NodeId | None, record: bytes, now: float, form: type[RecordT]) -> VerifiedClaim[RecordT]:
    """Return the claim in a record stored under `owner` (None: any signer), with content of type `form`.

    Raises DataError: ClaimTooLargeError, MalformedClaimError also for addresses of other nodes, ForeignClaimError for a
    record under another node's name, SignatureError, ClaimExpiredError or DelegationExpiredError.
    """
    claim = read_claim(record, form, MAX_RECORD_BYTES)
    if now >= claim.delegation.grant.expires_at:  # cheaper than the signatures
        raise DelegationExpiredError(f"The delegation of node {claim.delegation.node_id} expired.")
    verified = verify_claim(claim, RECORD_KIND, now, owner, max_age_seconds=RECORD_SECONDS)
    if not verified.payload.leads_to(verified.node_id):
        raise MalformedClaimError(f"The record of node {verified.node_id} has addresses of other nodes.")
    return verified


class NetworkFailedError(NeuroShardError):
    """A background task of the network failed; `__cause__` is its error."""
