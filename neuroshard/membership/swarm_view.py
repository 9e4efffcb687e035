"""The view of the swarm: a pure fold of verified reports, and the one object that keeps it for a node. Bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType

import msgspec

from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.reports import TrainingReport, silence_limit
from neuroshard.network.transport import RECORD_SECONDS
from neuroshard.status.snapshot import NodeState
from neuroshard.types import NodeId, WalletId
from neuroshard.waiting import Signal

MAX_MEMBERS = 10_000
MAX_DEPARTED = 16_384


@dataclass(frozen=True)
class ReportedMaximum:
    """The most that one node ever reported, so that a node that returns to a checkpoint is not counted twice.

    Steps and tokens are the node's own while it held the first layers, through which every microbatch passes once.
    Nodes with later layers, and trainers, report the same microbatches again.
    """

    sequence: int = -1  # of its newest report
    steps: int = 0
    tokens: int = 0
    shards: int = 0


NOTHING = ReportedMaximum()


@dataclass(frozen=True)
class Member:
    """A node whose reports arrive, with the times of the first and the last one."""

    node_id: NodeId
    wallet_id: WalletId
    report: TrainingReport
    best: ReportedMaximum
    first_seen: float  # seconds since the epoch by this computer's clock, as all times here
    last_seen: float
    is_local: bool = False


@dataclass(frozen=True)
class GlobalView:
    """All nodes of one run. `total_steps` and `total_tokens` never fall, even if nodes leave and come back.

    They rise by the amount that a node reports above its previous maximum. The maximum of a node that left is kept.
    Only after more than MAX_DEPARTED nodes have left is the first one of them forgotten: if it returns, it counts as
    new.
    """

    members: Mapping[NodeId, Member] = field(default_factory=dict[NodeId, Member])  # the longest silent one first
    departed: Mapping[NodeId, ReportedMaximum] = field(
        default_factory=dict[NodeId, ReportedMaximum]
    )  # in the order of departure
    total_steps: int = 0
    total_tokens: int = 0
    min_loss: float | None = None  # the lowest ever reported

    def with_reports(self, heard: Iterable[tuple[Statement[TrainingReport], float]]) -> GlobalView:
        """Return the view after verified reports, each with the time of its arrival.

        A report that is not newer than the node's last one changes nothing.
        """
        fold = _Fold(self)
        for said, now in heard:
            fold.add(said.node_id, said.wallet_id, said.value, now, is_local=False)
        return fold.view()

    def with_local(self, node_id: NodeId, wallet_id: WalletId, report: TrainingReport, now: float) -> GlobalView:
        """Return the view after a report of this node itself, which never counts as silent."""
        fold = _Fold(self)
        fold.add(node_id, wallet_id, report, now, is_local=True)
        return fold.view()

    def expired(self, now: float) -> GlobalView:
        """Return the view without nodes that have been silent for too long."""
        count = len(self.members)
        last_heard = now - silence_limit(0, count)  # a node heard since then cannot be silent
        quiet = (member for member in self.members.values() if member.last_seen < last_heard and not member.is_local)
        silent = [m for m in quiet if now - m.last_seen > silence_limit(m.report.interval_seconds, count)]
        if not silent:
            return self
        gone = {member.node_id: member.best for member in silent}
        members = {node: member for node, member in self.members.items() if node not in gone}
        return replace(self, members=members, departed=_bounded({**self.departed, **gone}))

    def without(self, node_id: NodeId) -> GlobalView:
        """Return the view without a node that is gone; its next report brings it back."""
        member = self.members.get(node_id)
        if member is None or member.is_local:
            return self
        members = {node: other for node, other in self.members.items() if node != node_id}
        return replace(self, members=members, departed=_bounded({**self.departed, node_id: member.best}))

    @property
    def global_loss(self) -> float | None:
        """Mean of the nodes' loss EMAs, weighted by tokens if there are any; None if no node reports a loss."""
        known = [(m.report.loss_ema, m.report.tokens) for m in self.members.values() if m.report.loss_ema is not None]
        total = sum(tokens for _, tokens in known)
        if total > 0:
            return sum(loss * (tokens / total) for loss, tokens in known)
        return sum(loss for loss, _ in known) / len(known) if known else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that enter the run's pipelines: the sum over the training nodes with the first layers.

        Every microbatch goes once through the first layers. Nodes with later layers report the same tokens again.
        """
        training = (m.report for m in self.members.values() if m.report.state is NodeState.TRAINING)
        return sum(report.tokens_per_second for report in training if _has_first_layers(report))

    @property
    def training_nodes(self) -> int:
        """Number of nodes that train now."""
        return sum(member.report.state is NodeState.TRAINING for member in self.members.values())

    @property
    def model_hashes(self) -> Mapping[NodeId, str]:
        """Hash of the state after the last outer step of each node that has made one."""
        return {node: member.report.state_hash for node, member in self.members.items() if member.report.state_hash}


class _Fold:
    """A view under construction: its tables are copied once for any number of reports."""

    def __init__(self, view: GlobalView) -> None:
        self._members = dict(view.members)
        self._departed = dict(view.departed)
        self._steps = view.total_steps
        self._tokens = view.total_tokens
        self._min_loss = view.min_loss

    def view(self) -> GlobalView:
        return GlobalView(self._members, self._departed, self._steps, self._tokens, self._min_loss)

    def add(self, node_id: NodeId, wallet_id: WalletId, report: TrainingReport, now: float, *, is_local: bool) -> None:
        """Count one report, unless it is not newer than the last one.

        If the table is full, a new node takes the place of the longest silent one: names cost nothing, so no number
        of them may keep others out. A node that lost its place comes back with its next report.
        """
        known = self._members.get(node_id)
        before = known.best if known else self._departed.get(node_id, NOTHING)
        is_full = known is None and len(self._members) >= MAX_MEMBERS
        if report.sequence <= before.sequence or (is_full and report.leaving):
            return
        if is_full:
            self._drop_longest_silent()
        best = _better(before, report)
        self._steps += best.steps - before.steps
        self._tokens += best.tokens - before.tokens
        self._min_loss = _least(self._min_loss, report.loss_ema)
        self._departed.pop(node_id, None)
        self._members.pop(node_id, None)
        if report.leaving:
            self._depart(node_id, best)
        else:
            first_seen = known.first_seen if known else now
            self._members[node_id] = Member(node_id, wallet_id, report, best, first_seen, now, is_local)

    def _drop_longest_silent(self) -> None:
        silent = next(member for member in self._members.values() if not member.is_local)
        del self._members[silent.node_id]
        self._depart(silent.node_id, silent.best)

    def _depart(self, node_id: NodeId, best: ReportedMaximum) -> None:
        self._departed[node_id] = best
        if len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]


def _has_first_layers(report: TrainingReport) -> bool:
    return report.layers is not None and report.layers.start == 0


def _better(best: ReportedMaximum, report: TrainingReport) -> ReportedMaximum:
    steps = tokens = 0
    if _has_first_layers(report):
        steps, tokens = report.steps - report.inherited_steps, report.tokens - report.inherited_tokens
    return ReportedMaximum(
        report.sequence,
        max(best.steps, steps),
        max(best.tokens, tokens),
        max(best.shards, report.shards_seen),
    )


def _least(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _bounded(departed: dict[NodeId, ReportedMaximum]) -> dict[NodeId, ReportedMaximum]:
    for node_id in list(departed)[: max(0, len(departed) - MAX_DEPARTED)]:
        del departed[node_id]
    return departed


MAX_ANNOUNCED_BYTES = 16 * 1024 * 1024
ENTRY_BYTES = 1024  # of an announcement, in addition to its addresses
MOST_UNFOLDED = 1000  # reports; a fold copies the table of members, so several at once cost little more than one


class Membership:
    """The view of all reports and the newest announcement of each node. Use it from one event loop."""

    def __init__(self, node_id: NodeId, wallet_id: WalletId, max_announced_bytes: int = MAX_ANNOUNCED_BYTES) -> None:
        self.node_id = node_id
        self._wallet_id = wallet_id
        self._view = GlobalView()
        self._announced: dict[NodeId, Statement[Announcement]] = {}
        self._announced_bytes = 0
        self._max_announced_bytes = max_announced_bytes
        self._heard: list[tuple[Statement[TrainingReport], float]] = []  # not folded yet
        self._strangers: set[NodeId] = set()  # their nodes that are new or have just restarted
        self._met = Signal()
        self.own_news = Signal()  # this node's own report is outdated: the next one is sent within a second
        self.own_report: bytes | None = None  # the newest, packed as it is sent
        self.met_at: float | None = None  # when a new node was last noticed, by the callers' clock

    @property
    def view(self) -> GlobalView:
        """The view after all reports so far; reading it folds the reports that wait."""
        if self._heard:
            self._view = self._view.with_reports(self._heard)
            self._heard = []
            self._strangers = set()
        return self._view

    async def next_meeting(self) -> None:
        """Wait until the next node appears."""
        await self._met.wait()

    def count_own_report(self, report: TrainingReport, signed_report: bytes, now: float) -> None:
        """Count this node's own report. A node stays a member of its own view even when it leaves."""
        self.own_report = signed_report
        report = msgspec.structs.replace(report, leaving=False)
        self._view = self.view.with_local(self.node_id, self._wallet_id, report, now)

    def count_present(self, report: TrainingReport, now: float) -> None:
        """Count this node's present values, which no report has yet; a node without a network makes no reports."""
        known = self.view.members.get(self.node_id)
        sequence = 0 if known is None else known.best.sequence + 1
        report = msgspec.structs.replace(report, sequence=sequence, leaving=False)
        self._view = self.view.with_local(self.node_id, self._wallet_id, report, now)

    def hear_report(self, said: Statement[TrainingReport], now: float) -> None:
        """Count another node's report; a copy of this node's own report changes nothing."""
        if said.node_id == self.node_id:
            return
        self._heard.append((said, now))
        known = self._view.members.get(said.node_id)
        has_just_started = known is None or known.report.started_at < said.value.started_at
        if has_just_started and said.node_id not in self._strangers:
            self._strangers.add(said.node_id)
            self.met_at = now
            self._met.notify()
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
            self._drop_announcement(next(iter(self._announced)))  # received the longest time ago
        self._announced[said.node_id] = said

    def forget_silent(self, now: float) -> None:
        """Drop nodes that have been silent for too long, and announcements that are too old."""
        self._view = self.view.expired(now)
        old = [node for node, said in self._announced.items() if said.issued_at < now - RECORD_SECONDS]
        for node_id in old:
            self._drop_announcement(node_id)

    def drop(self, node_id: NodeId) -> None:
        """Remove a node that is gone without a last report; its next report brings it back."""
        self._view = self.view.without(node_id)

    def knows(self, node_id: NodeId) -> bool:
        """Return whether a node has reported or announced itself for this run and is not forgotten yet."""
        return node_id in self._announced or node_id in self.view.members

    @property
    def announcements(self) -> Mapping[NodeId, Announcement]:
        """The newest announcement of each other node."""
        return MappingProxyType({node: said.value for node, said in self._announced.items()})

    def addresses(self, random: Random, most: int, but: NodeId) -> tuple[str, ...]:
        """Return one address each of up to `most` random known nodes, for the peer `but` that looks for others."""
        known = [node for node, said in self._announced.items() if said.value.addresses and node != but]
        chosen = random.sample(known, min(most, len(known)))
        return tuple(_first_of(self._announced[node].value.addresses) for node in chosen)

    def _drop_announcement(self, node_id: NodeId) -> None:
        dropped = self._announced.pop(node_id, None)
        if dropped is not None:
            self._announced_bytes -= _memory_of(dropped.value)


def _memory_of(announcement: Announcement) -> int:
    """Bytes of memory that an announcement takes: an estimate on the high side."""
    return ENTRY_BYTES + sum(map(len, announcement.addresses))


def _first_of(addresses: tuple[str, ...]) -> str:
    return next(_direct_first(addresses))


def _direct_first(addresses: tuple[str, ...]) -> Iterator[str]:
    """The addresses with those through a relay last."""
    yield from (address for address in addresses if "/p2p-circuit" not in address)
    yield from (address for address in addresses if "/p2p-circuit" in address)
