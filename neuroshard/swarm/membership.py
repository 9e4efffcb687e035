"""What one node knows about the others of its run at this moment: the one place where the folds are kept. Bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

import anyio

from neuroshard.network.records import RECORD_SECONDS
from neuroshard.swarm.announcement import Announcement
from neuroshard.swarm.claim_reading import Statement
from neuroshard.swarm.global_view import GlobalView
from neuroshard.swarm.training_report import TrainingReport
from neuroshard.types import NodeId, WalletId

MAX_ANNOUNCED_BYTES = 16 * 1024 * 1024
ENTRY_BYTES = 1024  # of an announcement besides its addresses
MOST_UNFOLDED = 1000  # reports; a fold copies the table of members, so several at once cost little more than one


class Membership:
    """The view of all reports and everybody's newest announcement. Belongs to one event loop."""

    def __init__(self, node_id: NodeId, wallet_id: WalletId, max_announced_bytes: int = MAX_ANNOUNCED_BYTES) -> None:
        self.node_id = node_id
        self._wallet_id = wallet_id
        self._view = GlobalView()
        self._announced: dict[NodeId, Statement[Announcement]] = {}
        self._announced_bytes = 0
        self._max_announced_bytes = max_announced_bytes
        self._heard: list[tuple[Statement[TrainingReport], float]] = []  # not folded yet
        self._strangers: set[NodeId] = set()  # among them, who is no member of the view yet
        self._meeting: anyio.Event | None = None  # while somebody waits for it
        self.own_report: bytes | None = None  # the newest, as it travels
        self.met_at: float | None = None  # when a node was last heard of that was not known, by the callers' clock

    @property
    def view(self) -> GlobalView:
        """The fold of all reports."""
        if self._heard:
            self._view = self._view.with_reports(self._heard)
            self._heard = []
            self._strangers = set()
        return self._view

    async def next_meeting(self) -> None:
        """Wait until the next node appears."""
        self._meeting = self._meeting or anyio.Event()
        await self._meeting.wait()

    def tell(self, report: TrainingReport, packed_report: bytes, now: float) -> None:
        """Count this node's own report; to itself, it is a member also when it leaves."""
        self.own_report = packed_report
        report = replace(report, leaving=False)
        self._view = self.view.with_local(self.node_id, self._wallet_id, report, now)

    def hear_report(self, said: Statement[TrainingReport], now: float) -> None:
        """Count another node's report; this node's own, come back, changes nothing."""
        if said.node_id == self.node_id:
            return
        self._heard.append((said, now))
        known = self._view.members.get(said.node_id)
        has_just_started = known is None or known.report.started_at < said.value.started_at
        if has_just_started and said.node_id not in self._strangers:
            self._strangers.add(said.node_id)
            self.met_at = now
            if self._meeting is not None:
                self._meeting.set()
                self._meeting = None
        if len(self._heard) >= MOST_UNFOLDED:
            _ = self.view

    def hear_announcement(self, said: Statement[Announcement]) -> None:
        """Keep another node's announcement, unless a newer one is known."""
        known = self._announced.get(said.node_id)
        if said.node_id == self.node_id or (known is not None and known.issued_at >= said.issued_at):
            return
        self._drop_announcement(said.node_id)
        self._announced_bytes += _memory_of(said.value)
        while self._announced and self._announced_bytes > self._max_announced_bytes:
            self._drop_announcement(next(iter(self._announced)))  # heard the longest time ago
        self._announced[said.node_id] = said

    def forget_silent(self, now: float) -> None:
        """Drop nodes that have been silent for too long, and announcements that are too old."""
        self._view = self.view.expired(now)
        old = [node for node, said in self._announced.items() if said.issued_at < now - RECORD_SECONDS]
        for node_id in old:
            self._drop_announcement(node_id)

    def drop(self, node_id: NodeId) -> None:
        """A node is gone without a good-bye; its next report brings it back."""
        self._view = self.view.without(node_id)

    def knows(self, node_id: NodeId) -> bool:
        """Whether a node has reported or announced itself for this run, and not too long ago."""
        return node_id in self._announced or node_id in self.view.members

    @property
    def announcements(self) -> Mapping[NodeId, Announcement]:
        """Everybody's newest announcement."""
        return MappingProxyType({node: said.value for node, said in self._announced.items()})

    def addresses(self, random: Random, most: int, but: NodeId) -> tuple[str, ...]:
        """One address each of a random choice of known nodes, for a peer (`but`) that looks for others."""
        known = [node for node, said in self._announced.items() if said.value.addresses and node != but]
        chosen = random.sample(known, min(most, len(known)))
        return tuple(_first_of(self._announced[node].value.addresses) for node in chosen)

    def _drop_announcement(self, node_id: NodeId) -> None:
        dropped = self._announced.pop(node_id, None)
        if dropped is not None:
            self._announced_bytes -= _memory_of(dropped.value)


def _memory_of(announcement: Announcement) -> int:
    """What it takes, rather more than less."""
    return ENTRY_BYTES + sum(map(len, announcement.addresses))


def _first_of(addresses: tuple[str, ...]) -> str:
    return next(_direct_first(addresses))


def _direct_first(addresses: tuple[str, ...]) -> Iterator[str]:
    """An address through a relay is the second choice."""
    yield from (address for address in addresses if "/p2p-circuit" not in address)
    yield from (address for address in addresses if "/p2p-circuit" in address)
