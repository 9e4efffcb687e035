"""Where other nodes were seen: given by the owner, told by peers, remembered from earlier starts. Bounded."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import cast

from neuroshard.config.state_file import write_atomically
from neuroshard.types import NodeId

log = logging.getLogger(__name__)

MAX_ADDRESSES = 256
MAX_REMEMBERED = 64
MAX_FILE_BYTES = 64 * 1024
MAX_ADDRESS_CHARACTERS = 256
FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 300.0
GIVEN_AGAIN_SECONDS = 600.0


@dataclass(frozen=True)
class KnownAddress:
    """A multiaddr with /p2p/<node id> at its end, and how dialling it went."""

    text: str
    is_given: bool = False  # by the owner or the run: never forgotten
    is_remembered: bool = False  # it worked in an earlier start
    failures: int = 0  # in a row
    next_try: float = 0.0  # on the monotonic clock
    worked_at: float = -inf  # on the monotonic clock: when it was dialled last with success

    @property
    def node_id(self) -> NodeId:
        """The node it should lead to."""
        return NodeId(self.text.rpartition("/p2p/")[2])

    @property
    def has_worked(self) -> bool:
        """Whether it ever led to its node; else it is only somebody's word."""
        return self.is_remembered or self.worked_at > -inf


class AddressBook:
    """The addresses one node knows. Times are those of one monotonic clock."""

    def __init__(self, own_id: NodeId) -> None:
        self._own_id = own_id
        self._known: dict[str, KnownAddress] = {}

    def add(self, addresses: Iterable[str], *, is_given: bool = False, is_remembered: bool = False) -> None:
        """Note addresses; malformed ones and this node's own are passed over, and strangers' ones are bounded."""
        for text in addresses:
            address = KnownAddress(text, is_given, is_remembered)
            if len(text) > MAX_ADDRESS_CHARACTERS or not address.node_id or address.node_id == self._own_id:
                continue
            if text in self._known:
                self._known[text] = replace(self._known[text], is_given=is_given or self._known[text].is_given)
            elif len(self._known) < MAX_ADDRESSES or is_given or self._forget_worst():
                self._known[text] = address

    def due(self, now: float, connected: Iterable[NodeId]) -> tuple[KnownAddress, ...]:
        """Addresses of unconnected nodes whose turn it is, given ones first, then those that failed least."""
        there = set(connected)
        waiting = [a for a in self._known.values() if a.next_try <= now and a.node_id not in there]
        return tuple(sorted(waiting, key=lambda address: (not address.is_given, address.failures)))

    def given_due(self, now: float, connected: Iterable[NodeId]) -> tuple[KnownAddress, ...]:
        """The given ones among those due, for a node that has enough connections: each only now and then.

        A seed that began anew, or the other half of a swarm that was split, is found again through them; but a seed
        with very many connections ends those that are idle, and shall have peace for a while.
        """
        return tuple(
            address
            for address in self.due(now, connected)
            if address.is_given and now - address.worked_at >= GIVEN_AGAIN_SECONDS
        )

    def note_success(self, text: str, now: float) -> None:
        """An address that worked."""
        if text in self._known:
            self._known[text] = replace(self._known[text], failures=0, next_try=0.0, worked_at=now)

    def note_failure(self, text: str, now: float) -> None:
        """An address that did not work: tried again later and later, and forgotten first when room is needed."""
        if text in self._known:
            known = self._known[text]
            pause = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(known.failures, 10))
            self._known[text] = replace(known, failures=known.failures + 1, next_try=now + pause)

    def try_all_again(self) -> None:
        """Forget the pauses: the line is back, or the computer woke up."""
        self._known = {text: replace(known, next_try=0.0) for text, known in self._known.items()}

    def working(self) -> tuple[str, ...]:
        """Addresses that led to their nodes and did not fail since, those of this start first."""
        good = [address for address in self._known.values() if address.has_worked and address.failures == 0]
        return tuple(a.text for a in sorted(good, key=lambda address: -address.worked_at))[:MAX_REMEMBERED]

    def _forget_worst(self) -> bool:
        """Make room: first by what never worked, and of that by what failed most, else came first.

        False when all is given or works: strangers' words, however many, push out none of it.
        """
        needless = [a for a in self._known.values() if not a.is_given and (a.failures or not a.has_worked)]
        if not needless:
            return False
        del self._known[min(needless, key=lambda address: (address.has_worked, -address.failures)).text]
        return True


def remembered_addresses(file: Path) -> tuple[str, ...]:
    """What an earlier start stored; nothing when the file is missing or damaged: peers will tell others."""
    try:
        with file.open("rb") as stream:
            value = json.loads(stream.read(MAX_FILE_BYTES))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("The remembered addresses in %s cannot be read: %s", file, error)
        return ()
    if not isinstance(value, list):
        return ()
    return tuple(item for item in cast("list[object]", value)[:MAX_REMEMBERED] if isinstance(item, str))


def remember_addresses(file: Path, addresses: Iterable[str]) -> None:
    """Store addresses for the next start; a disk that refuses is only logged."""
    try:
        file.parent.mkdir(exist_ok=True)  # in a data folder, which is not made anew where it was moved away
        write_atomically(file, json.dumps(list(addresses)[:MAX_REMEMBERED]).encode())
    except OSError as error:
        log.warning("The addresses of peers cannot be stored in %s: %s", file, error)
