"""The address book of peers: addresses that worked, addresses that a peer claims, and hearsay from other peers.

Its memory is bounded. The peer that was requested or updated least recently is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, KeysView
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Generic, Protocol, TypeVar

from neuroshard.errors import UsageError
from neuroshard.network.libp2p.addresses import PeerAddress, may_be_reported, parse_address
from neuroshard.network.limits import TokenBucket
from neuroshard.types import NodeId

ENTRY_BYTES = 430  # overhead per peer, an upper estimate
ADDRESS_BYTES = 430  # overhead per address, an upper estimate


class Addressed(Protocol):
    """A value with addresses."""

    @property
    def addresses(self) -> Iterable[PeerAddress]: ...


V = TypeVar("V", bound=Addressed)


class AddressTable(Generic[V]):
    """Values by peer, in bounded memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[NodeId, V] = OrderedDict()

    def keys(self) -> KeysView[NodeId]:
        """The peers."""
        return self._values.keys()

    def get(self, peer: NodeId) -> V | None:
        """The value of a peer, or None."""
        return self._values.get(peer)

    def touch(self, peer: NodeId) -> None:
        """Mark a peer as used now."""
        if peer in self._values:
            self._values.move_to_end(peer)

    def put(self, peer: NodeId, value: V) -> None:
        """Replace a peer's value. The newest value always fits; older ones are dropped for it."""
        self.drop(peer)
        self._values[peer] = value
        self._bytes += _memory_of(value)
        while self._bytes > self._max_bytes and len(self._values) > 1:
            self.drop(next(iter(self._values)))

    def drop(self, peer: NodeId) -> None:
        """Drop a peer, if it is known."""
        dropped = self._values.pop(peer, None)
        if dropped is not None:
            self._bytes -= _memory_of(dropped)


def _memory_of(value: Addressed) -> int:
    return ENTRY_BYTES + sum(ADDRESS_BYTES + len(one.text) + len(one.host) for one in value.addresses)


MAX_BYTES = 64 * 1024 * 1024
HEARSAY_SHARE = 4  # hearsay gets 1/HEARSAY_SHARE of the memory
MAX_ADDRESSES = 8  # that a peer claims for itself
MAX_WORKED = 4  # per peer
MAX_HEARSAY = 2  # per peer
HEARSAY_DIALS = 64  # in a burst; any peer can claim any address, and must not make this node dial a list of targets
HEARSAY_DIALS_A_SECOND = 1.0


@dataclass(frozen=True)
class _Known:
    worked: tuple[PeerAddress, ...] = ()  # dialled successfully from here, the last first
    claimed: tuple[PeerAddress, ...] = ()  # claimed by the peer itself
    claimed_at: float = -inf  # seconds since the epoch

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        return (*self.worked, *self.claimed)


@dataclass(frozen=True)
class _Heard:
    addresses: tuple[PeerAddress, ...] = ()


class PeerAddressBook:
    """Addresses by peer. Hearsay never replaces addresses that the peer claims itself or that worked.

    The peer requested least recently is dropped first.
    """

    def __init__(self, local_id: NodeId, max_bytes: int = MAX_BYTES, *, has_neighbours: bool = False) -> None:
        """`has_neighbours`: peers run on this computer, as when only it can reach this node."""
        self._local_id = local_id
        self._has_neighbours = has_neighbours
        hearsay_bytes = max_bytes // HEARSAY_SHARE
        self._known = AddressTable[_Known](max_bytes - hearsay_bytes)
        self._heard = AddressTable[_Heard](hearsay_bytes)
        self._hearsay_dials = TokenBucket(HEARSAY_DIALS, HEARSAY_DIALS_A_SECOND)

    def __len__(self) -> int:
        return len(self._known.keys() | self._heard.keys())

    def note_worked(self, address: PeerAddress) -> None:
        """Record that this node reached the peer at an address."""
        known = self._known.get(address.peer) or _Known()
        others = (other for other in known.worked if other.text != address.text)
        self._known.put(address.peer, replace(known, worked=(address, *others)[:MAX_WORKED]))

    def note_failed(self, address: PeerAddress) -> None:
        """Record that the peer was not reached at an address; hearsay may offer a better one."""
        left = tuple(other for other in self._heard_of(address.peer) if other.text != address.text)
        self._heard.drop(address.peer)
        if left:
            self._heard.put(address.peer, _Heard(left))

    def learn_texts(
        self, peer: NodeId, texts: Iterable[str], at: float | None = None, *, host: str | None = None
    ) -> None:
        """Store the addresses that a peer claims for itself, over a connection or signed, at a time (None: now).

        Unusable ones are skipped. `host` is the IP address of the direct connection, if there is one; see
        `may_follow`.
        """
        known = self._known.get(peer) or _Known()
        if peer == self._local_id or (at is not None and at < known.claimed_at):
            return
        addresses = _addresses_of(peer, texts, known.claimed)
        claimed = tuple(islice((one for one in addresses if self.may_follow(one, host)), MAX_ADDRESSES))
        if claimed:
            self._known.put(peer, replace(known, claimed=claimed, claimed_at=known.claimed_at if at is None else at))

    def may_follow(self, address: PeerAddress, teller: str | None = None) -> bool:
        """Whether an address from a peer at the IP address `teller` (None: unknown) may be dialled (`may_be_reported`).

        Otherwise any peer could make this node connect to services of its own computer or local network. An address
        that was accepted before may be dialled when any node repeats it. Peers on this computer may report all.
        """
        if may_be_reported(address.host, "127.0.0.1" if self._has_neighbours else teller):
            return True
        return any(known.text == address.text for known in self.of(address.peer))

    def hear_texts(self, peer: NodeId, texts: Iterable[str], teller_host: str | None) -> None:
        """Store the addresses that one peer reports for another. `teller_host` is its IP address, None behind a relay.

        They are kept only while there is space, and only if `may_follow` allows them.
        """
        heard = self._heard_of(peer)
        if peer == self._local_id or len(heard) >= MAX_HEARSAY:
            return
        known = {address.text for address in (*heard, *self.vouched(peer))}
        unknown = (text for text in islice(texts, 2 * MAX_ADDRESSES) if text not in known)
        new = [address for address in _addresses_of(peer, unknown) if self.may_follow(address, teller_host)]
        direct, relayed = [a for a in new if not a.is_relayed], [a for a in new if a.is_relayed]
        chosen = (*heard, *direct[:1], *relayed[:1], *direct[1:], *relayed[1:])[:MAX_HEARSAY]
        if chosen:
            self._heard.put(peer, _Heard(chosen))

    def of(self, peer: NodeId) -> tuple[PeerAddress, ...]:
        """Known addresses of a peer: direct ones first, hearsay last."""
        return _each_once((*self.vouched(peer), *self._heard_of(peer)))

    def vouched(self, peer: NodeId) -> tuple[PeerAddress, ...]:
        """As `of` without hearsay: the addresses that may be passed on."""
        known = self._known.get(peer) or _Known()
        return _each_once(sorted(known.addresses, key=lambda address: address.is_relayed))

    def to_dial(self, peer: NodeId, now: float) -> tuple[PeerAddress, ...]:
        """As `of`, but hearsay only within its rate limit; `now` is the time of any monotonic clock."""
        self._known.touch(peer)
        self._heard.touch(peer)
        vouched, all_known = self.vouched(peer), self.of(peer)
        hearsay_count = len(all_known) - len(vouched)
        return all_known if hearsay_count == 0 or self._hearsay_dials.take(now, hearsay_count) else vouched

    def _heard_of(self, peer: NodeId) -> tuple[PeerAddress, ...]:
        return (self._heard.get(peer) or _Heard()).addresses


def _each_once(addresses: Iterable[PeerAddress]) -> tuple[PeerAddress, ...]:
    return tuple({address.text: address for address in addresses}.values())


def _addresses_of(peer: NodeId, texts: Iterable[str], known: Iterable[PeerAddress] = ()) -> Iterator[PeerAddress]:
    """The valid addresses of that peer among the first few texts. Known texts are not parsed again."""
    parsed = {address.text: address for address in known}
    for text in islice(texts, 2 * MAX_ADDRESSES):
        try:
            address = parsed.get(text) or parse_address(text)
        except UsageError:
            continue
        if address.peer == peer:
            yield address
