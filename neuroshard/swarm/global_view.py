"""GlobalView: what all reports together say about the run, as a pure fold of verified reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from neuroshard.status.snapshot import NodeState
from neuroshard.swarm.claim_reading import Statement
from neuroshard.swarm.report_times import silence_limit
from neuroshard.swarm.training_report import TrainingReport
from neuroshard.types import NodeId, WalletId

MAX_MEMBERS = 10_000
MAX_DEPARTED = 16_384


@dataclass(frozen=True)
class Contribution:
    """The most that one node ever reported, so that a node that goes back to a checkpoint is not counted twice.

    Steps and tokens are what it did itself while it held the first layers, through which every microbatch goes once:
    nodes with later layers and trainers report the same microbatches again.
    """

    sequence: int = -1  # of its newest report
    steps: int = 0
    tokens: int = 0
    shards: int = 0


NOTHING = Contribution()


@dataclass(frozen=True)
class Member:
    """A node that reports."""

    node_id: NodeId
    wallet_id: WalletId
    report: TrainingReport
    best: Contribution
    first_seen: float  # seconds since the epoch by this computer's clock, as all times here
    last_seen: float
    is_local: bool = False


@dataclass(frozen=True)
class GlobalView:
    """Everybody of one run. `total_steps` and `total_tokens` never fall, whoever leaves and comes back.

    They rise by what a node reports above the most it had reported before. Nodes that left stay known for that; only
    when more than MAX_DEPARTED left is the one that left first forgotten: should it return, it counts as new.
    """

    members: Mapping[NodeId, Member] = field(default_factory=dict[NodeId, Member])
    departed: Mapping[NodeId, Contribution] = field(default_factory=dict[NodeId, Contribution])  # first gone first
    total_steps: int = 0
    total_tokens: int = 0
    min_loss: float | None = None  # the lowest ever reported

    def with_reports(self, heard: Iterable[tuple[Statement[TrainingReport], float]]) -> GlobalView:
        """The view after verified reports, each with the time at which it came.

        One that is not newer than the node's last changes nothing.
        """
        fold = _Fold(self)
        for said, now in heard:
            fold.add(said.node_id, said.wallet_id, said.value, now, is_local=False)
        return fold.view()

    def with_local(self, node_id: NodeId, wallet_id: WalletId, report: TrainingReport, now: float) -> GlobalView:
        """The view after a report of this very node, which does not fall silent."""
        fold = _Fold(self)
        fold.add(node_id, wallet_id, report, now, is_local=True)
        return fold.view()

    def expired(self, now: float) -> GlobalView:
        """The view without nodes that have been silent for too long."""
        count = len(self.members)
        last_heard = now - silence_limit(0, count)  # who was heard since then needs no closer look
        quiet = (member for member in self.members.values() if member.last_seen < last_heard and not member.is_local)
        silent = [m for m in quiet if now - m.last_seen > silence_limit(m.report.interval_seconds, count)]
        if not silent:
            return self
        gone = {member.node_id: member.best for member in silent}
        members = {node: member for node, member in self.members.items() if node not in gone}
        return replace(self, members=members, departed=_bounded({**self.departed, **gone}))

    def without(self, node_id: NodeId) -> GlobalView:
        """The view without a node that is gone; its next report brings it back."""
        member = self.members.get(node_id)
        if member is None or member.is_local:
            return self
        members = {node: other for node, other in self.members.items() if node != node_id}
        return replace(self, members=members, departed=_bounded({**self.departed, node_id: member.best}))

    @property
    def global_loss(self) -> float | None:
        """Mean of the nodes' loss EMAs weighted by their tokens; plain while nobody has any; None without a loss."""
        known = [(m.report.loss_ema, m.report.tokens) for m in self.members.values() if m.report.loss_ema is not None]
        total = sum(tokens for _, tokens in known)
        if total > 0:
            return sum(loss * (tokens / total) for loss, tokens in known)
        return sum(loss for loss, _ in known) / len(known) if known else None

    @property
    def tokens_per_second(self) -> float:
        """Of all nodes that train now."""
        return sum(m.report.tokens_per_second for m in self.members.values() if m.report.state is NodeState.TRAINING)

    @property
    def training_nodes(self) -> int:
        """How many train now."""
        return sum(member.report.state is NodeState.TRAINING for member in self.members.values())

    @property
    def model_hashes(self) -> Mapping[NodeId, str]:
        """The state after each node's last outer step, where there was one."""
        return {node: member.report.state_hash for node, member in self.members.items() if member.report.state_hash}


class _Fold:
    """A view in the making: copied once, however many reports come."""

    def __init__(self, view: GlobalView) -> None:
        self._members = dict(view.members)
        self._departed = view.departed
        self._steps = view.total_steps
        self._tokens = view.total_tokens
        self._min_loss = view.min_loss

    def view(self) -> GlobalView:
        """The result."""
        return GlobalView(self._members, self._departed, self._steps, self._tokens, self._min_loss)

    def add(self, node_id: NodeId, wallet_id: WalletId, report: TrainingReport, now: float, *, is_local: bool) -> None:
        """Count one report."""
        known = self._members.get(node_id)
        before = known.best if known else self._departed.get(node_id, NOTHING)
        if report.sequence <= before.sequence or (known is None and len(self._members) >= MAX_MEMBERS):
            return
        best = _better(before, report)
        self._steps += best.steps - before.steps
        self._tokens += best.tokens - before.tokens
        self._min_loss = _least(self._min_loss, report.loss_ema)
        if node_id in self._departed:
            self._departed = {node: other for node, other in self._departed.items() if node != node_id}
        if report.leaving:
            self._members.pop(node_id, None)
            self._departed = _bounded({**self._departed, node_id: best})
        else:
            first_seen = known.first_seen if known else now
            self._members[node_id] = Member(node_id, wallet_id, report, best, first_seen, now, is_local)


def _better(best: Contribution, report: TrainingReport) -> Contribution:
    steps = tokens = 0
    if report.layers is not None and report.layers.start == 0:
        steps, tokens = report.steps - report.inherited_steps, report.tokens - report.inherited_tokens
    return Contribution(
        report.sequence,
        max(best.steps, steps),
        max(best.tokens, tokens),
        max(best.shards, report.shards_seen),
    )


def _least(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _bounded(departed: dict[NodeId, Contribution]) -> dict[NodeId, Contribution]:
    for node_id in list(departed)[: max(0, len(departed) - MAX_DEPARTED)]:
        del departed[node_id]
    return departed
