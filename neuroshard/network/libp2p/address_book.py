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
from neuroshard.network.libp2p.addresses import PeerAddress, Scope, parse_address, scope_of
from neuroshard.network.limits import TokenBucket
from neuroshard.types import NodeId

ENTRY_BYTES = 400  # of a peer besides its addresses, rather more than less
ADDRESS_BYTES = 400  # of an address besides its text and host


class Addressed(Protocol):
    """Something that holds addresses."""

    @property
    def addresses(self) -> Iterable[PeerAddress]:
        """All of them."""
        ...


V = TypeVar("V", bound=Addressed)


class AddressTable(Generic[V]):
    """Values by peer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[NodeId, V] = OrderedDict()

    def keys(self) -> KeysView[NodeId]:
        """The peers."""
        return self._values.keys()

    def get(self, peer: NodeId) -> V | None:
        """What is known of a peer."""
        return self._values.get(peer)

    def touch(self, peer: NodeId) -> None:
        """A peer was asked for."""
        if peer in self._values:
            self._values.move_to_end(peer)

    def put(self, peer: NodeId, value: V) -> None:
        """Keep a value instead of the one before; the last one always finds room."""
        self.drop(peer)
        self._values[peer] = value
        self._bytes += _memory_of(value)
        while self._bytes > self._max_bytes and len(self._values) > 1:
            self.drop(next(iter(self._values)))

    def drop(self, peer: NodeId) -> None:
        """Forget a peer, if it is known."""
        dropped = self._values.pop(peer, None)
        if dropped is not None:
            self._bytes -= _memory_of(dropped)


def _memory_of(value: Addressed) -> int:
    return ENTRY_BYTES + sum(ADDRESS_BYTES + len(one.text) + len(one.host) for one in value.addresses)


MAX_BYTES = 64 * 1024 * 1024
HEARSAY_SHARE = 4  # of the memory, one part in so many
MAX_ADDRESSES = 8  # that a peer says of itself
MAX_WORKED = 4  # of one peer
MAX_HEARSAY = 2  # of one peer
HEARSAY_DIALS = 64  # at once; anybody may name anybody's address, and this node shall not dial a list of targets
HEARSAY_DIALS_A_SECOND = 1.0


@dataclass(frozen=True)
class _Known:
    worked: tuple[PeerAddress, ...] = ()  # when dialled from here, the last first
    told: tuple[PeerAddress, ...] = ()  # by the peer itself
    told_at: float = -inf  # seconds since 1970

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """All of them."""
        return (*self.worked, *self.told)


@dataclass(frozen=True)
class _Heard:
    addresses: tuple[PeerAddress, ...] = ()


class PeerAddressBook:
    """Addresses by peer. What others say of a peer never replaces what it says itself or what worked.

    The peer asked for longest ago is forgotten first.
    """

    def __init__(self, local_id: NodeId, max_bytes: int = MAX_BYTES, *, has_neighbours: bool = False) -> None:
        """`has_neighbours`: peers are on this computer, as when only it can reach this node."""
        self._local_id = local_id
        self._has_neighbours = has_neighbours
        hearsay_bytes = max_bytes // HEARSAY_SHARE
        self._known = AddressTable[_Known](max_bytes - hearsay_bytes)
        self._heard = AddressTable[_Heard](hearsay_bytes)
        self._hearsay_dials = TokenBucket(HEARSAY_DIALS, HEARSAY_DIALS_A_SECOND)

    def __len__(self) -> int:
        return len(self._known.keys() | self._heard.keys())

    def note_worked(self, address: PeerAddress) -> None:
        """This node reached the peer there."""
        known = self._known.get(address.peer) or _Known()
        others = (other for other in known.worked if other.text != address.text)
        self._known.put(address.peer, replace(known, worked=(address, *others)[:MAX_WORKED]))

    def note_failed(self, address: PeerAddress) -> None:
        """Nobody, or somebody else, was reached there: others may say better."""
        left = tuple(other for other in self._heard_of(address.peer) if other.text != address.text)
        self._heard.drop(address.peer)
        if left:
            self._heard.put(address.peer, _Heard(left))

    def learn_texts(
        self, peer: NodeId, texts: Iterable[str], at: float | None = None, *, host: str | None = None
    ) -> None:
        """What a peer says of itself, over a connection or signed, at a time (None: now); what is false is left out.

        `host`: the IP address of a direct connection over which it says so. See `may_follow`.
        """
        known = self._known.get(peer) or _Known()
        if peer == self._local_id or (at is not None and at < known.told_at):
            return
        addresses = _addresses_of(peer, texts, known.told)
        told = tuple(islice((one for one in addresses if self.may_follow(one, host)), MAX_ADDRESSES))
        if told:
            self._known.put(peer, replace(known, told=told, told_at=known.told_at if at is None else at))

    def may_follow(self, address: PeerAddress, host: str | None = None) -> bool:
        """Whether an address that its own node tells, from `host` if that is known, is worth a dial.

        One on the local network is: both may be behind one router, and meet through a relay or the directory. One on
        this computer, or a name, which may stand for one, is not: anybody could have this node knock at the doors of
        its own computer. Unless the other node is on it as well.
        """
        is_neighbour = self._has_neighbours or (host is not None and scope_of(host) is Scope.COMPUTER)
        return is_neighbour or scope_of(address.host) is not Scope.COMPUTER

    def hear_texts(self, peer: NodeId, texts: Iterable[str], teller_host: str | None) -> None:
        """What somebody says of a peer; `teller_host`: the IP address the teller is at, None behind a relay.

        It counts only while room is left, and only for places that the teller can have in common with this node.
        """
        heard = self._heard_of(peer)
        if peer == self._local_id or len(heard) >= MAX_HEARSAY:
            return
        scope = Scope.WORLD if teller_host is None else scope_of(teller_host)
        known = {address.text for address in (*heard, *self.vouched(peer))}
        unknown = (text for text in islice(texts, 2 * MAX_ADDRESSES) if text not in known)
        new = [address for address in _addresses_of(peer, unknown) if scope_of(address.host) <= scope]
        direct, relayed = [a for a in new if not a.is_relayed], [a for a in new if a.is_relayed]
        chosen = (*heard, *direct[:1], *relayed[:1], *direct[1:], *relayed[1:])[:MAX_HEARSAY]
        if chosen:
            self._heard.put(peer, _Heard(chosen))

    def of(self, peer: NodeId) -> tuple[PeerAddress, ...]:
        """Known ways to a peer, hearsay last, else direct ones first."""
        return _each_once((*self.vouched(peer), *self._heard_of(peer)))

    def vouched(self, peer: NodeId) -> tuple[PeerAddress, ...]:
        """As `of` without hearsay: what may be told to others."""
        known = self._known.get(peer) or _Known()
        return _each_once(sorted(known.addresses, key=lambda address: address.is_relayed))

    def to_dial(self, peer: NodeId, now: float) -> tuple[PeerAddress, ...]:
        """As `of`, but hearsay only as long as not too much of it is dialled; `now` by any monotonic clock."""
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
    """What is an address of that peer, among as many texts as an honest node tells; what is known is not read again."""
    parsed = {address.text: address for address in known}
    for text in islice(texts, 2 * MAX_ADDRESSES):
        try:
            address = parsed.get(text) or parse_address(text)
        except UsageError:
            continue
        if address.peer == peer:
            yield address
