"""Addresses of members for joiners: the operator's first, then those of nodes that the organiser reached, then others.

An address is the word of its node. A joiner gets those that mean the same place for it (`may_be_reported`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from neuroshard.errors import UsageError
from neuroshard.identity.admissions import ADMISSION_SECONDS
from neuroshard.network.libp2p.addresses import PeerAddress, may_be_reported, parse_address
from neuroshard.network.transport import node_of_address
from neuroshard.types import NodeId

MOST_SEEDS = 8  # in one answer
MOST_GIVEN = 3  # of them: the word of the operator
MOST_OF_NODE = 2  # of them: a direct address and one through a relay
MOST_NODES = 4096
CIRCUIT = "/p2p-circuit/"


@dataclass(frozen=True)
class _Contact:
    """The addresses that a node announced when it joined, and the result of the check from outside."""

    addresses: tuple[str, ...]
    until: float = 0.0  # monotonic time at which its admission ends; 0 while it waits for a place
    reachable: bool | None = None  # None: not checked
    reached: str = ""  # address at which the organiser reached it


class SeedBook:
    """The addresses that one organiser knows. Belongs to the event loop; times are those of one monotonic clock."""

    def __init__(self, given: Sequence[str] = (), joined: Mapping[NodeId, Sequence[str]] | None = None, now: float = 0):
        """`given` are addresses of the operator and the run's owner; `joined` those of nodes with a place."""
        self._given = tuple(dict.fromkeys(given))
        self._contacts: dict[NodeId, _Contact] = {}  # the node that was in an answer last is at the end
        self._reached: dict[NodeId, None] = {}  # those that were reached, in the same order
        for node, addresses in (joined or {}).items():
            self.note_join(node, addresses)
            self.note_admission(node, now)

    def note_join(self, node: NodeId, addresses: Iterable[str]) -> None:
        """Remember the addresses that a node announces for itself. After a change of direct ones no check counts."""
        own = tuple(text for text in addresses if (address := _parsed(text)) is not None and address.peer == node)
        known = self._contacts.pop(node, None)
        if known is None and len(self._contacts) >= MOST_NODES:
            self.forget(next(iter(self._contacts)))
        if known is not None and _direct(known.addresses) != _direct(own):
            known = _Contact((), until=known.until)
            self._reached.pop(node, None)
        self._contacts[node] = replace(known or _Contact(()), addresses=own)

    def note_admission(self, node: NodeId, now: float) -> None:
        """Note that a node got an admission, or a new one: others may be sent to it until that ends."""
        if node in self._contacts:
            self._contacts[node] = replace(self._contacts[node], until=now + ADMISSION_SECONDS)

    def note_check(self, node: NodeId, reached: str) -> None:
        """Note the address at which the organiser reached a node from outside; "" if it did not."""
        if node in self._contacts:
            self._contacts[node] = replace(self._contacts[node], reachable=bool(reached), reached=reached)
            self._reached.pop(node, None)
            if reached:
                self._reached[node] = None

    def forget(self, node: NodeId) -> None:
        """Forget a node that left."""
        self._contacts.pop(node, None)
        self._reached.pop(node, None)

    def reachable(self, node: NodeId) -> bool | None:
        """Whether the last check reached a node; None: not checked."""
        return None if node not in self._contacts else self._contacts[node].reachable

    def seeds_for(self, joiner: NodeId, host: str | None, now: float, seen: Iterable[str] = ()) -> tuple[str, ...]:
        """Addresses for a joiner at an IP address (None: unknown). `seen` are those of nodes that report at present.

        Joiners get different nodes, one after the other.
        """
        contacts = self._contacts
        reached = ((node, contacts[node].reached) for node in self._reached if now < contacts[node].until)
        live = ((node, one) for node, one in contacts.items() if now < one.until and not one.reached)
        others = ((node, text) for node, one in live for text in _worth_trying(one))
        reporting = ((node_of_address(text), text) for text in seen)
        fitting = _fitting(chain(reached, reporting, others), joiner, host)
        given = [text for text in self._given if node_of_address(text) != joiner and _means_the_same(text, host)]
        chosen = list(islice(fitting, MOST_SEEDS - len(given[:MOST_GIVEN])))
        for node in {node: None for node, _ in chosen}:  # the next joiner gets others
            if node in contacts:
                contacts[node] = contacts.pop(node)
            if node in self._reached:
                self._reached[node] = self._reached.pop(node)
        return tuple(dict.fromkeys((*given[:MOST_GIVEN], *(text for _, text in chosen))))


def _worth_trying(contact: _Contact) -> Iterator[str]:
    """The addresses of a node that was not reached: after a check that failed only those through relays."""
    return (text for text in contact.addresses if contact.reachable is None or CIRCUIT in text)


def _direct(addresses: Iterable[str]) -> set[str]:
    return {text for text in addresses if CIRCUIT not in text}


def _fitting(addresses: Iterable[tuple[NodeId, str]], joiner: NodeId, host: str | None) -> Iterator[tuple[NodeId, str]]:
    """The addresses that a joiner at an IP address may be given, at most MOST_OF_NODE of a node."""
    counts: Counter[NodeId] = Counter()
    for node, text in addresses:
        if node == joiner or counts[node] >= MOST_OF_NODE:
            continue
        address = _parsed(text)
        if address is not None and may_be_reported(address.host, host):
            counts[node] += 1
            yield node, text


def _means_the_same(text: str, host: str | None) -> bool:
    """Whether an address of the operator may be given to a joiner at an IP address. A name may, too."""
    address = _parsed(text)
    return address is not None and (text.startswith("/dns") or may_be_reported(address.host, host))


def _parsed(text: str) -> PeerAddress | None:
    try:
        return parse_address(text)
    except UsageError:
        return None
