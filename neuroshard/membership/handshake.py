"""Handshake and peer exchange: announcements, reports and addresses pass between a node and each peer it connects to.

The node also stores its own record in the directory and reads the records of others, so a newcomer is known at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import Annotated, TypeAlias

import anyio
from msgspec import Meta, Struct

from neuroshard.errors import DataError, NeuroShardError
from neuroshard.identity import NodeIdentity
from neuroshard.membership.announcements import Announcement, DirectoryGroups
from neuroshard.membership.claim_intake import (
    ANNOUNCEMENT_RULES,
    REPORT_RULES,
    ClaimIntake,
    Refusal,
    signed_announcement,
)
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.download_rights import READING, ReaderHandshake, Readers, signed_reading
from neuroshard.membership.reports import MAX_REPORT_BYTES, TrainingReport
from neuroshard.membership.run_members import Papers, RunMembers
from neuroshard.membership.swarm_view import Membership
from neuroshard.messages import Frame, FrameLimits, WireError
from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError, RequestRefusedError, ScoreReason
from neuroshard.network.transport import MAX_RECORD_BYTES, Address
from neuroshard.types import NodeId, RunId
from neuroshard.waiting import sleep_to_tick

HANDSHAKE = "handshake"
MAX_SHARED_ADDRESSES = 32
MAX_HANDSHAKE_BYTES = 32 * 1024
MAX_PAPER_BYTES = 8 * 1024  # of one handshake; more spread by gossip
HANDSHAKE_TIMEOUT_SECONDS = 10.0
_LOG = logging.getLogger(__name__)


class HandshakeRefusedError(NeuroShardError):
    """A peer's handshake is not accepted: it is of another run, or a claim is false, stale or malformed."""


class HandshakeMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """The claims and addresses that each side of a handshake sends."""

    announcement: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]  # signed
    report: Annotated[bytes, Meta(max_length=MAX_REPORT_BYTES)] | None  # signed; None before the first one
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_SHARED_ADDRESSES)]  # of other nodes
    papers: Papers = Papers()  # that the sender vouches for


HANDSHAKE_LIMITS = FrameLimits(max_header_bytes=MAX_HANDSHAKE_BYTES, message=HandshakeMessage)
READER_LIMITS = FrameLimits(max_header_bytes=8 * 1024, message=ReaderHandshake)


@dataclass(frozen=True)
class ClaimIntakes:
    """The intakes for the two kinds of claims of one run."""

    announcements: ClaimIntake[Announcement]
    reports: ClaimIntake[TrainingReport]


class Handshaker:
    """Starts and answers handshakes, for one node in one run."""

    def __init__(
        self,
        identity: NodeIdentity,
        membership: Membership,
        intakes: ClaimIntakes,
        make_announcement: Callable[[], Announcement],
        members: RunMembers | None = None,
        *,
        now: Callable[[], float] = time.time,
        random: Random,
    ) -> None:
        """`members` decides who may take part; None: any node."""
        self._identity = identity
        self._members = members
        self._membership = membership
        self._intakes = intakes
        self._make_announcement = make_announcement
        self._now = now
        self._random = random

    def serve(self, network: Network) -> None:
        """Answer the handshakes of all peers on this network."""

        async def answer(sender: NodeId, request: Frame) -> Frame:
            try:
                self._hear(network, sender, request.read(HandshakeMessage))
            except HandshakeRefusedError as error:
                raise RequestRefusedError(str(error)) from None
            return Frame(HANDSHAKE, self._message_to(sender))

        network.transport.serve(HANDSHAKE, answer, HANDSHAKE_LIMITS, for_anyone=True)
        if self._members is not None and self._members.readers is not None:
            self._serve_readers(network, self._members.readers)

    def _serve_readers(self, network: Network, readers: Readers) -> None:
        """Answer waiting nodes that show a right to download. They learn what they need to find donors."""

        async def answer(sender: NodeId, request: Frame) -> Frame:
            try:
                readers.note(sender, request.read(ReaderHandshake))
            except DataError as error:
                raise RequestRefusedError(str(error)) from None
            others = self._membership.addresses(self._random, MAX_SHARED_ADDRESSES, sender)
            announced = self.signed(self.announcement())
            return Frame(HANDSHAKE, HandshakeMessage(announced, self._membership.own_report, others))

        network.transport.serve(READING, answer, READER_LIMITS, for_anyone=True)

    async def greet(self, network: Network, peer: NodeId) -> tuple[str, ...]:
        """Exchange handshakes with a peer and return addresses of other nodes that it knows.

        Raises HandshakeRefusedError, and the errors of Transport.request: PeerRefusedError names the peer's reason.
        """
        answer = await network.transport.request(
            peer,
            Frame(HANDSHAKE, self._message_to(peer)),
            reply=HANDSHAKE_LIMITS,
            timeout_seconds=HANDSHAKE_TIMEOUT_SECONDS,
        )
        message = answer.read(HandshakeMessage)
        self._hear(network, peer, message)
        network.reputation.report(peer, ScoreReason.GOOD_ANSWER)
        return message.addresses

    @property
    def news(self) -> int:
        """Number of reasons to exchange papers with all peers at once."""
        return 0 if self._members is None else self._members.news

    def announcement(self) -> Announcement:
        """Return this node's announcement as of now."""
        return self._make_announcement()

    def signed(self, announcement: Announcement) -> bytes:
        """Sign an announcement of this node and encode it for sending."""
        return signed_announcement(self._identity, announcement, self._now())

    def _message_to(self, peer: NodeId) -> HandshakeMessage:
        announced = self.signed(self.announcement())
        if self._members is not None and self._members.refusal(peer):
            return HandshakeMessage(announced, None, ())  # a stranger, or a member that has not shown its pass yet
        others = self._membership.addresses(self._random, MAX_SHARED_ADDRESSES, peer)
        papers = Papers() if self._members is None else self._members.papers().part(MAX_PAPER_BYTES, self._random)
        return HandshakeMessage(announced, self._membership.own_report, others, papers)

    def _hear(self, network: Network, peer: NodeId, message: HandshakeMessage) -> None:
        announced = self._intakes.announcements.take(message.announcement, peer)
        if isinstance(announced, Refusal):
            _score(network, peer, announced)
            raise HandshakeRefusedError(announced.explanation)
        self._membership.hear_announcement(announced)
        if self._members is not None:
            self._members.learn(message.papers)
        if message.report is None:
            return
        reported = self._intakes.reports.take(message.report, peer)
        if not isinstance(reported, Refusal):
            self._membership.hear_report(reported, self._now())
        elif reported.reason is not None:
            _score(network, peer, reported)
            raise HandshakeRefusedError(reported.explanation)


def _score(network: Network, peer: NodeId, refusal: Refusal) -> None:
    """Report a refused claim to the reputation. A peer of another run does nothing wrong by asking."""
    if refusal.reason is not None and not refusal.is_other_run:
        network.reputation.report(refusal.culprit or peer, refusal.reason)
        _LOG.debug("The handshake of node %s is refused: %s", peer, refusal.explanation)


WANTED_PEERS = 16  # greeted peers; other nodes are known by their reports
HANDSHAKES_AT_ONCE = 8
LOOK_SECONDS = 0.5  # for new connections
GREET_AGAIN_SECONDS = 600.0  # announcement and addresses may have changed
FIRST_RETRY_SECONDS = 5.0  # after a failed handshake; a node that has just started may not answer yet
LONGEST_RETRY_SECONDS = 300.0
ANNOUNCE_SECONDS = 600.0
DIRECTORY_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0, 120.0)  # between two looks; the last one repeats
MOST_RECORDS = 64  # of one group
LATER_RECORDS = 16  # after the looks listed above; other records each time

AddressSink: TypeAlias = Callable[[Iterable[str]], None]
"""Takes addresses from peers and the directory; the owner of the connections decides what to do with them."""


class KnownPeers:
    """The connected peers that were greeted, and the time at which each may be greeted next.

    Times are those of one monotonic clock.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._due: dict[NodeId, float] = {}
        self._failures: dict[NodeId, int] = {}
        self._known: set[NodeId] = set()

    def next_to_greet(self, connected: set[NodeId], now: float) -> list[NodeId]:
        """Return a random few of the connected peers that are due, while fewer than WANTED_PEERS are known.

        A disconnected peer is forgotten, so that it is greeted at once when it comes back.
        """
        self._due = {peer: due for peer, due in self._due.items() if peer in connected}
        self._failures = {peer: failures for peer, failures in self._failures.items() if peer in connected}
        self._known &= connected
        strangers = sorted(peer for peer in connected if self._due.get(peer, now) <= now)
        missing = max(0, WANTED_PEERS - len(self._known.difference(strangers)))
        return self._random.sample(strangers, min(len(strangers), missing, HANDSHAKES_AT_ONCE))

    def greet_again(self) -> None:
        """Greet all connected peers as soon as possible: there is news for them."""
        self._due = {peer: due for peer, due in self._due.items() if due == inf}

    def note_begun(self, peer: NodeId) -> None:
        """Record that a greeting has begun: the peer counts as known until the result is clear."""
        self._due[peer] = inf
        self._known.add(peer)

    def note_success(self, peer: NodeId, now: float) -> None:
        """Record that the peer is known; it is due again after GREET_AGAIN_SECONDS."""
        self._due[peer] = now + GREET_AGAIN_SECONDS
        self._failures.pop(peer, None)
        self._known.add(peer)

    def note_failure(self, peer: NodeId, now: float) -> int:
        """Record that the peer did not answer or refused; return the number of failures in a row.

        The next try comes later each time.
        """
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        self._due[peer] = now + min(FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_RETRY_SECONDS)
        self._known.discard(peer)
        return failures


@dataclass(frozen=True)
class _Announced:
    words: Announcement
    at: float


class Meeting:
    """One node's handshakes with its peers and its records in the directory, in one run."""

    def __init__(
        self,
        handshaker: Handshaker,
        membership: Membership,
        intake: ClaimIntake[Announcement],
        groups: DirectoryGroups,
        learned: AddressSink,
        *,
        random: Random,
    ) -> None:
        self._handshaker = handshaker
        self._membership = membership
        self._intake = intake
        self._groups = groups
        self._learned = learned
        self._random = random
        self.announced = anyio.Event()  # set once this node's record is in the directory

    async def handshake_forever(self, network: Network) -> None:
        """Greet new connections. Ends with TransportClosedError when the network closes."""
        known_peers, reported = KnownPeers(self._random), self._handshaker.news
        async with anyio.create_task_group() as tasks:
            while True:
                if self._handshaker.news != reported:
                    reported = self._handshaker.news
                    known_peers.greet_again()
                allowed = {peer for peer in network.transport.peers() if not network.reputation.is_banned(peer)}
                for peer in known_peers.next_to_greet(allowed, anyio.current_time()):
                    known_peers.note_begun(peer)
                    tasks.start_soon(self._greet, network, peer, known_peers)
                await sleep_to_tick(LOOK_SECONDS)

    async def announce_forever(self, network: Network) -> None:
        """Keep this node's records in the directory and read the others'. Ends with TransportClosedError."""
        announced: dict[str, _Announced] = {}
        first = self._random.randrange(self._groups.count)  # nodes that start together read different groups
        for look in count():
            await self._announce(network, announced)
            most = MOST_RECORDS if look < len(DIRECTORY_SECONDS) else LATER_RECORDS
            for namespace in self._groups.asked(first + look):
                await self._look_around(network, namespace, most)
            await anyio.sleep(DIRECTORY_SECONDS[min(look, len(DIRECTORY_SECONDS) - 1)])

    async def _announce(self, network: Network, announced: dict[str, _Announced]) -> None:
        """Store the announcement in the directory where this node's stages are searched for.

        Records that it stored in other namespaces before expire without further action.
        """
        current = self._handshaker.announcement()
        for namespace in self._groups.of(current.layers):
            before = announced.get(namespace)
            now = anyio.current_time()
            if before is not None and before.words == current and now - before.at < ANNOUNCE_SECONDS:
                continue
            try:
                await network.directory.announce(namespace, self._handshaker.signed(current))
            except PeerUnreachableError as error:
                _LOG.debug("The directory cannot be reached yet: %s", error)
            else:
                announced[namespace] = _Announced(current, anyio.current_time())
                self.announced.set()

    async def _greet(self, network: Network, peer: NodeId, known_peers: KnownPeers) -> None:
        try:
            addresses = await self._handshaker.greet(network, peer)
        except (PeerRefusedError, HandshakeRefusedError, WireError) as error:
            is_news = known_peers.note_failure(peer, anyio.current_time()) == 2  # the peer may have just started
            _LOG.log(logging.INFO if is_news else logging.DEBUG, "Node %s is not connected: %s", peer, error)
        except PeerUnreachableError as error:
            _LOG.debug("Node %s does not answer the handshake: %s", peer, error)
            known_peers.note_failure(peer, anyio.current_time())
        else:
            known_peers.note_success(peer, anyio.current_time())
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


SHOW_SECONDS = 10.0  # between two times that a waiting node shows its right


class ReaderClient:
    """Shows the right of this node, which waits for a place in a run, to members. They answer as to a member.

    Their answers are not believed more than reports: they only say whom to ask for a state.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        run_id: RunId,
        membership: Membership,
        now: Callable[[], float],
        right: Callable[[], bytes | None],
    ) -> None:
        """`membership` learns the members that answer; `right` returns the newest right, None without one."""
        self._identity = identity
        self._run_id = run_id
        self._membership = membership
        self._now = now
        self._right = right
        self._announcements = ClaimIntake(ANNOUNCEMENT_RULES, run_id, now)
        self._reports = ClaimIntake(REPORT_RULES, run_id, now)

    async def run(self, networking: Networking) -> None:
        """Show the right to the connected peers again and again, until cancelled."""
        while True:
            network, right = await networking.up(), self._right()
            peers = sorted(network.transport.peers())[:WANTED_PEERS]
            async with anyio.create_task_group() as tasks:
                if right is not None:
                    for peer in peers:
                        tasks.start_soon(self._show, networking, network, peer, right)
            self._membership.forget_silent(self._now())
            await anyio.sleep(SHOW_SECONDS if peers else LOOK_SECONDS)

    async def _show(self, networking: Networking, network: Network, peer: NodeId, right: bytes) -> None:
        shown = signed_reading(self._identity, self._run_id, right, self._now())
        try:
            answer = await network.transport.request(
                peer, Frame(READING, shown), reply=HANDSHAKE_LIMITS, timeout_seconds=HANDSHAKE_TIMEOUT_SECONDS
            )
            message = answer.read(HandshakeMessage)
        except (NeuroShardError, WireError) as error:
            _LOG.debug("Node %s does not let this one download: %s", peer, error)
            return
        announced = self._announcements.take(message.announcement, peer)
        if not isinstance(announced, Refusal):
            self._membership.hear_announcement(announced)
        reported = None if message.report is None else self._reports.take(message.report, peer)
        if reported is not None and not isinstance(reported, Refusal):
            self._membership.hear_report(reported, self._now())
        networking.book.add(message.addresses)
