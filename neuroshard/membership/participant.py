"""All membership tasks of one node in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import anyio

from neuroshard.identity import NodeIdentity
from neuroshard.membership.announcements import Announcement, DirectoryGroups, report_topic
from neuroshard.membership.claim_intake import ANNOUNCEMENT_RULES, REPORT_RULES, ClaimCache, ClaimIntake
from neuroshard.membership.clock_skew import ClockSkew
from neuroshard.membership.failure_detector import FailureDetector
from neuroshard.membership.handshake import AddressSink, ClaimIntakes, Handshaker, Meeting
from neuroshard.membership.pass_gossip import PassGossip
from neuroshard.membership.reporting import Listener, Reporter
from neuroshard.membership.reports import ReportNumbers, TrainingReport
from neuroshard.membership.run_members import RunMembers
from neuroshard.membership.swarm_status import ShardCoverage, to_status
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import StagePlan
from neuroshard.network import Network
from neuroshard.status.snapshot import PeerStatus, SwarmStatus
from neuroshard.types import RunId

CLAIM_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class OwnMessages:
    """Makes the messages of a node about itself, new for each sending."""

    report: Callable[[], TrainingReport]
    announcement: Callable[[], Announcement]
    numbers: ReportNumbers = field(default_factory=ReportNumbers)  # of the reports


class Participant:
    """A node's membership in a run. `live` runs once with every network; the membership survives a network."""

    def __init__(
        self,
        identity: NodeIdentity,
        run_id: RunId,
        coverage: ShardCoverage,
        words: OwnMessages,
        learned: AddressSink,
        *,
        plan: StagePlan,
        members: RunMembers | None = None,
        claim_bytes: int = CLAIM_BYTES,
        now: Callable[[], float] = time.time,
        random: Random | None = None,
    ) -> None:
        """`claim_bytes` bounds the memory of the claims that were read and of the known announcements.

        `members` decides who may take part; None: any node.
        """
        chance = random or Random()  # noqa: S311 - when to speak and to whom, no secrets
        topic = report_topic(run_id)
        part = claim_bytes // 4
        self.membership = Membership(identity.node_id, identity.wallet_id, part)
        self._clock_skew = skew = ClockSkew(now)
        announced, reported = ClaimCache(ANNOUNCEMENT_RULES, part), ClaimCache(REPORT_RULES, 2 * part)
        self.intakes = ClaimIntakes(
            ClaimIntake(ANNOUNCEMENT_RULES, run_id, now, announced, members=members, clock_skew=skew),
            ClaimIntake(REPORT_RULES, run_id, now, reported, members=members, clock_skew=skew),
        )
        self._coverage = coverage
        self._members = members
        self._handshaker = Handshaker(
            identity, self.membership, self.intakes, words.announcement, members, now=now, random=chance
        )
        self._papers = PassGossip(members, run_id) if members is not None and members.is_closed else None
        self._reporter = Reporter(
            identity, run_id, topic, words.report, self.membership, now=now, random=chance, numbers=words.numbers
        )
        self._listener = Listener(self.intakes.reports, self.membership, topic, now=now)
        self._failure_detector = FailureDetector(self.membership, now)
        self._meeting = Meeting(
            self._handshaker,
            self.membership,
            self.intakes.announcements,
            DirectoryGroups(run_id, plan),
            learned,
            random=chance,
        )

    @property
    def announced(self) -> anyio.Event:
        """Set as soon as this node's record is in the directory."""
        return self._meeting.announced

    async def live(self, network: Network) -> None:
        """Take part in the run until cancelled; then send a last report that this node leaves.

        Ends with TransportClosedError when the network closes.
        """
        self._handshaker.serve(network)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listener.listen_forever, network)
            tasks.start_soon(self._reporter.report_forever, network)
            tasks.start_soon(self._failure_detector.watch_forever, network)
            tasks.start_soon(self._meeting.handshake_forever, network)
            tasks.start_soon(self._meeting.announce_forever, network)
            if self._members is not None:
                tasks.start_soon(self._drop_refused, self._members)
            if self._papers is not None:
                tasks.start_soon(self._papers.run, network)

    async def _drop_refused(self, members: RunMembers) -> None:
        """After a revocation, forget the nodes that may not take part any more."""
        while True:
            count = members.changed.count
            for node in members.refused_nodes():
                self.membership.drop(node)
            await members.changed.wait(after=count)

    def status(self, network: Network | None) -> tuple[tuple[PeerStatus, ...], SwarmStatus]:
        """Return the peers and the totals of all nodes, for the snapshot."""
        view = self.membership.view
        covered = self._coverage.covered(view)
        if network is None:
            return to_status(view, announcements=self.membership.announcements, shards_covered=covered)
        return to_status(
            view,
            connections=network.transport.connections(),
            announcements=self.membership.announcements,
            score_of=network.reputation.score,
            shards_covered=covered,
        )

    @property
    def clock_warning(self) -> str | None:
        """A warning for the owner if the others' clocks agree that this computer's is wrong, otherwise None."""
        return self._clock_skew.warning
