"""The first words between two nodes: who they are, what they do, whom they know. So a newcomer is known at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from neuroshard.errors import NeuroShardError
from neuroshard.identity import NodeIdentity
from neuroshard.network import Network, RequestRefusedError, ScoreReason
from neuroshard.network.records import MAX_RECORD_BYTES
from neuroshard.swarm.announcement import Announcement, address_field
from neuroshard.swarm.claim_kinds import signed_announcement
from neuroshard.swarm.claim_reading import Refusal
from neuroshard.swarm.claims_intake import ClaimIntake
from neuroshard.swarm.membership import Membership
from neuroshard.swarm.packing import MAX_PACKED_BYTES
from neuroshard.swarm.training_report import TrainingReport
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, WireValue

HELLO = "hello"
MAX_SHARED_ADDRESSES = 32
MAX_HELLO_BYTES = 32 * 1024
HELLO_SECONDS = 10.0
_FIELDS = {"announcement", "report", "addresses"}
_LOG = logging.getLogger(__name__)


class HelloRefusedError(NeuroShardError):
    """A peer's hello that does not count: another run, or a claim that is false, stale or malformed."""


@dataclass(frozen=True)
class Hello:
    """What each side says."""

    announcement: bytes  # signed
    report: bytes | None  # signed and packed; None before the first one
    addresses: tuple[str, ...]  # of others

    def to_frame(self) -> Frame:
        """The message."""
        header: dict[str, WireValue] = {
            "announcement": self.announcement,
            "report": self.report,
            "addresses": list(self.addresses),
        }
        return Frame(HELLO, header)

    @classmethod
    def from_frame(cls, frame: Frame) -> Hello:
        """Strict reading. Raises HelloRefusedError."""
        fields = frame.header
        announcement, report = fields.get("announcement"), fields.get("report")
        if frame.kind != HELLO or set(fields) != _FIELDS:
            raise HelloRefusedError("A hello has announcement, report and addresses, and nothing else.")
        if not isinstance(announcement, bytes) or len(announcement) > MAX_RECORD_BYTES:
            raise HelloRefusedError(f"The announcement must be at most {MAX_RECORD_BYTES} bytes.")
        if report is not None and (not isinstance(report, bytes) or len(report) > MAX_PACKED_BYTES):
            raise HelloRefusedError(f"The report must be at most {MAX_PACKED_BYTES} bytes.")
        try:
            return cls(announcement, report, _addresses(fields["addresses"]))
        except ValueError as error:
            raise HelloRefusedError(f"A hello cannot be read: {error}.") from None


@dataclass(frozen=True)
class Intakes:
    """Where the claims of one run come in."""

    announcements: ClaimIntake[Announcement]
    reports: ClaimIntake[TrainingReport]


class Greeter:
    """Says hello and answers hellos, for one node in one run."""

    def __init__(
        self,
        identity: NodeIdentity,
        membership: Membership,
        intakes: Intakes,
        make_announcement: Callable[[], Announcement],
        *,
        now: Callable[[], float] = time.time,
        random: Random,
    ) -> None:
        self._identity = identity
        self._membership = membership
        self._intakes = intakes
        self._make_announcement = make_announcement
        self._now = now
        self._random = random

    def serve(self, network: Network) -> None:
        """Answer everybody's hello."""

        async def answer(sender: NodeId, request: Frame) -> Frame:
            try:
                self._hear(network, sender, Hello.from_frame(request))
            except HelloRefusedError as error:
                raise RequestRefusedError(str(error)) from None
            return self._hello(sender).to_frame()

        network.transport.serve(HELLO, answer, FrameLimits(max_header_bytes=MAX_HELLO_BYTES))

    async def greet(self, network: Network, peer: NodeId) -> tuple[str, ...]:
        """Exchange hellos; gives addresses of others that the peer knows.

        Raises HelloRefusedError, and what Transport.request raises: PeerRefusedError names the peer's reason.
        """
        answer = await network.transport.request(
            peer,
            self._hello(peer).to_frame(),
            reply=FrameLimits(max_header_bytes=MAX_HELLO_BYTES),
            timeout_seconds=HELLO_SECONDS,
        )
        hello = Hello.from_frame(answer)
        self._hear(network, peer, hello)
        network.reputation.report(peer, ScoreReason.GOOD_ANSWER)
        return hello.addresses

    def announcement(self) -> Announcement:
        """This node's announcement as of now."""
        return self._make_announcement()

    def signed(self, announcement: Announcement) -> bytes:
        """An announcement of this node as others want it."""
        return signed_announcement(self._identity, announcement, self._now())

    def _hello(self, peer: NodeId) -> Hello:
        others = self._membership.addresses(self._random, MAX_SHARED_ADDRESSES, peer)
        return Hello(self.signed(self.announcement()), self._membership.own_report, others)

    def _hear(self, network: Network, peer: NodeId, hello: Hello) -> None:
        announced = self._intakes.announcements.take(hello.announcement, peer)
        if isinstance(announced, Refusal):
            _score(network, peer, announced)
            raise HelloRefusedError(announced.explanation)
        self._membership.hear_announcement(announced)
        if hello.report is None:
            return
        reported = self._intakes.reports.take(hello.report, peer)
        if not isinstance(reported, Refusal):
            self._membership.hear_report(reported, self._now())
        elif reported.reason is not None:
            _score(network, peer, reported)
            raise HelloRefusedError(reported.explanation)


def _score(network: Network, peer: NodeId, refusal: Refusal) -> None:
    """A peer of another run does nothing wrong by asking."""
    if refusal.reason is not None and not refusal.is_other_run:
        network.reputation.report(refusal.culprit or peer, refusal.reason)
        _LOG.debug("A hello of node %s is refused: %s", peer, refusal.explanation)


def _addresses(value: WireValue) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > MAX_SHARED_ADDRESSES:
        raise ValueError(f"addresses must be a list of at most {MAX_SHARED_ADDRESSES}")
    texts = [text for text in value if isinstance(text, str)]
    if len(texts) != len(value):
        raise ValueError("addresses must be text")
    return tuple(address_field(text, "addresses") for text in texts)
