"""Keeps a node acquainted: hello to whoever it is connected with, its record in the directory, others' from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import TypeAlias

import anyio

from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError
from neuroshard.swarm.announcement import Announcement
from neuroshard.swarm.claim_reading import Refusal
from neuroshard.swarm.claims_intake import ClaimIntake
from neuroshard.swarm.directory_groups import DirectoryGroups
from neuroshard.swarm.hello import Greeter, HelloRefusedError
from neuroshard.swarm.membership import Membership
from neuroshard.types import NodeId
from neuroshard.wire import WireError

WANTED_ACQUAINTANCES = 16  # greeted peers; the others are known by their reports
GREETINGS_AT_ONCE = 8
LOOK_SECONDS = 0.5  # for new connections
GREET_AGAIN_SECONDS = 600.0  # what was said may have changed
FIRST_RETRY_SECONDS = 5.0  # after a hello that failed; a node that has just begun may not answer yet
LONGEST_RETRY_SECONDS = 300.0
ANNOUNCE_SECONDS = 600.0
DIRECTORY_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0, 120.0)  # between looks into it; then always the last
MOST_RECORDS = 64  # of one group
LATER_RECORDS = 16  # once this node has looked as often as above: other ones each time
_LOG = logging.getLogger(__name__)

Learned: TypeAlias = Callable[[Iterable[str]], None]
"""Takes addresses that peers and the directory told; whoever keeps the connections decides what to do with them."""


class Acquaintances:
    """Which connected peers were greeted, and when each may be greeted next. Times are those of one monotonic clock."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._due: dict[NodeId, float] = {}
        self._failures: dict[NodeId, int] = {}
        self._known: set[NodeId] = set()

    def next_to_greet(self, connected: set[NodeId], now: float) -> list[NodeId]:
        """A random few of the connected that were not greeted lately, as long as acquaintances are missing.

        Who is connected no more is forgotten, so that it is greeted at once when it comes back.
        """
        self._due = {peer: due for peer, due in self._due.items() if peer in connected}
        self._failures = {peer: failures for peer, failures in self._failures.items() if peer in connected}
        self._known &= connected
        strangers = sorted(peer for peer in connected if self._due.get(peer, now) <= now)
        missing = max(0, WANTED_ACQUAINTANCES - len(self._known.difference(strangers)))
        return self._random.sample(strangers, min(len(strangers), missing, GREETINGS_AT_ONCE))

    def note_begun(self, peer: NodeId) -> None:
        """A greeting is under way: the peer counts as known until it is clear how that goes."""
        self._due[peer] = inf
        self._known.add(peer)

    def note_success(self, peer: NodeId, now: float) -> None:
        """The peer is known, and greeted again after a while."""
        self._due[peer] = now + GREET_AGAIN_SECONDS
        self._failures.pop(peer, None)
        self._known.add(peer)

    def note_failure(self, peer: NodeId, now: float) -> int:
        """The peer did not answer or refused: the next try comes later each time. The number of failures in a row."""
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        self._due[peer] = now + min(FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_RETRY_SECONDS)
        self._known.discard(peer)
        return failures


@dataclass(frozen=True)
class _Announced:
    words: Announcement
    at: float


class Meeting:
    """The acquaintances of one node in one run."""

    def __init__(
        self,
        greeter: Greeter,
        membership: Membership,
        intake: ClaimIntake[Announcement],
        groups: DirectoryGroups,
        learned: Learned,
        *,
        random: Random,
    ) -> None:
        self._greeter = greeter
        self._membership = membership
        self._intake = intake
        self._groups = groups
        self._learned = learned
        self._random = random
        self.announced = anyio.Event()  # this node's record lies in the directory

    async def greet_forever(self, network: Network) -> None:
        """Say hello to new connections. Ends with TransportClosedError when the network does."""
        acquaintances = Acquaintances(self._random)
        async with anyio.create_task_group() as tasks:
            while True:
                allowed = {peer for peer in network.transport.peers() if not network.reputation.is_banned(peer)}
                for peer in acquaintances.next_to_greet(allowed, anyio.current_time()):
                    acquaintances.note_begun(peer)
                    tasks.start_soon(self._greet, network, peer, acquaintances)
                await anyio.sleep(LOOK_SECONDS)

    async def appear_forever(self, network: Network) -> None:
        """Keep this node's records in the directory and look for others. Ends with TransportClosedError."""
        announced: dict[str, _Announced] = {}
        first = self._random.randrange(self._groups.count)  # nodes that start together ask for different groups
        for look in count():
            await self._announce(network, announced)
            most = MOST_RECORDS if look < len(DIRECTORY_SECONDS) else LATER_RECORDS
            for namespace in self._groups.asked(first + look):
                await self._look_around(network, namespace, most)
            await anyio.sleep(DIRECTORY_SECONDS[min(look, len(DIRECTORY_SECONDS) - 1)])

    async def _announce(self, network: Network, announced: dict[str, _Announced]) -> None:
        """Tell where this node's stages are looked for; what was told elsewhere before grows too old by itself."""
        current = self._greeter.announcement()
        for namespace in self._groups.of(current.layers):
            before = announced.get(namespace)
            now = anyio.current_time()
            if before is not None and before.words == current and now - before.at < ANNOUNCE_SECONDS:
                continue
            try:
                await network.directory.announce(namespace, self._greeter.signed(current))
            except PeerUnreachableError as error:
                _LOG.debug("The directory cannot be reached yet: %s", error)
            else:
                announced[namespace] = _Announced(current, anyio.current_time())
                self.announced.set()

    async def _greet(self, network: Network, peer: NodeId, acquaintances: Acquaintances) -> None:
        try:
            addresses = await self._greeter.greet(network, peer)
        except (PeerRefusedError, HelloRefusedError, WireError) as error:
            is_news = acquaintances.note_failure(peer, anyio.current_time()) == 2  # it may just have begun
            _LOG.log(logging.INFO if is_news else logging.DEBUG, "Node %s is not met: %s", peer, error)
        except PeerUnreachableError as error:
            _LOG.debug("Node %s does not answer a hello: %s", peer, error)
            acquaintances.note_failure(peer, anyio.current_time())
        else:
            acquaintances.note_success(peer, anyio.current_time())
            self._learned(addresses)

    async def _look_around(self, network: Network, namespace: str, most: int) -> None:
        try:
            records = await network.directory.find(namespace, most)
        except PeerUnreachableError as error:
            _LOG.debug("The directory cannot be asked yet: %s", error)
            return
        for record in records:
            found = self._intake.take(record)
            if not isinstance(found, Refusal) and found.node_id != self._membership.node_id:
                self._membership.hear_announcement(found)
                self._learned(found.value.addresses)
