"""The views of a step at one member: intents, view changes, and messages that arrive before their round. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import filterfalse
from statistics import median_low

from neuroshard.aggregation import MemberFacts, statistics_size
from neuroshard.consensus.chain import Step
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import RoundConfig
from neuroshard.consensus.round_messages import (
    MAX_MEMBERS,
    ChoicesSaid,
    ContributionSent,
    Intent,
    NewView,
    Quorum,
    ResultSaid,
    StatementSaid,
    VerifiedBody,
)
from neuroshard.consensus.slices import MAX_SLICES
from neuroshard.identity import hash_parts
from neuroshard.types import NodeId

MAX_EARLY = 2 * MAX_SLICES + 1  # messages per sender for a round not known here yet: its parts and its results
EARLY_SLICES = 3  # slices per sender, in multiples of a vector: one each of contributions, statistics and results
# slices of all senders, in the same unit; a member's own share does not grow with the number of members
EARLY_SLICES_OF_ALL = 6
EARLY_OF_EACH = 4
SPOILT_AFTER = 2.0  # times the wait for a newcomer's intent: the view is given up without its contribution
_Part = ContributionSent | StatementSaid | ResultSaid | ChoicesSaid


class Views:
    """The view state of one RoundStateMachine."""

    def __init__(self, setting: RoundConfig) -> None:
        self.view = 0
        self.is_first = True  # of the views in which this member takes part
        self.intents: dict[NodeId, VerifiedBody[Intent]] = {}
        self.has_proposed = False
        self.has_proposal = False
        self._setting = setting
        self._first: int | None = None
        self._begun = 0.0
        self._timing = setting.timing
        self._new_views: dict[NodeId, VerifiedBody[NewView]] = {}  # the newest of each node
        self._accusers: dict[NodeId, set[NodeId]] = {}
        self._locks: dict[NodeId, Quorum] = {}
        self._early: dict[NodeId, deque[tuple[str, _Part]]] = {}

    def begin(self, view: int, now: float) -> None:
        """Enter a view."""
        self._first = view if self._first is None else self._first
        self.is_first = view == self._first
        self.view, self._begun, self._timing = view, now, self._setting.timing_of(view, self._first)
        self.has_proposed = self.has_proposal = False

    def is_over(self, now: float) -> bool:
        """Whether it is the next proposer's turn."""
        return self._first is not None and now - self._begun >= self._timing.view_seconds

    @property
    def is_ahead(self) -> bool:
        """Whether no honest seat may be in this view or a later one, where seats may lie.

        A liar can lead a member into a far view. If that counted on from there, the others would never meet it.
        """
        return self._setting.step.committee.faults > 0 and self.view > self.view_of_others()

    def wait_again(self, now: float) -> None:
        """Stay in this view for as long as a view lasts."""
        self._begun = now

    def must_explain(self, now: float) -> bool:
        """Whether a reducer that waits for others must say so."""
        return now - self._begun >= self._timing.gather_seconds

    def must_redo(self, now: float) -> bool:
        """Whether the members must compute the slices that have no result."""
        return now - self._begun >= self._timing.redo_seconds

    def add_intent(self, signed: VerifiedBody[Intent]) -> None:
        """Store an intent of this step if it is newer than its author's last. A wallet has one node in the round."""
        step, intent = self._setting.step, signed.body
        if intent.step_id != step.id or not step.may_meet([signed.member]):
            return
        known = self.intents.get(signed.member.node_id)
        if known is None or (known.body.view, known.body.made_at) < (intent.view, intent.made_at):
            self.intents[signed.member.node_id] = signed

    def add_new_view(self, signed: VerifiedBody[NewView], lock: Quorum | None) -> None:
        """Store a new view if it is newer than its author's last one."""
        node = signed.member.node_id
        known = self._new_views.get(node)
        if known is None or known.body.view < signed.body.view:
            self._new_views[node] = signed
        for missing in self.intents.keys() & set(signed.body.missing) if node in self._setting.step.seats else ():
            self._accusers.setdefault(missing, set()).add(node)
        if lock is not None and (node not in self._locks or self._locks[node].view < lock.view):
            self._locks[node] = lock

    @property
    def in_later_views(self) -> set[NodeId]:
        """Nodes that have given up this view."""
        return {node for node, said in self._new_views.items() if said.body.view > self.view}

    def view_of_others(self) -> int:
        """The highest view that at least one honest voter has reached."""
        seats = self._setting.step.seats
        views = sorted([said.body.view for node, said in self._new_views.items() if node in seats], reverse=True)
        tolerated = self._setting.step.committee.faults
        return views[tolerated] if len(views) > tolerated else 0

    def highest_lock(self, own: Quorum | None) -> Quorum | None:
        """The value that must be voted on again, if there is one."""
        locks = [*self._locks.values(), *([] if own is None else [own])]
        return max(locks, key=lambda lock: lock.view, default=None)

    def may_propose(self, now: float) -> bool:
        """Whether a quorum of seats is here, and all expected members are here or have had their time."""
        if self.has_proposed or self._first is None:
            return False
        here, accused = self._here(), self._accused()
        is_patient = now - self._begun < self._timing.gather_seconds
        awaited = self._setting.awaited - accused  # the proposal leaves these out anyway
        if not self._setting.step.is_quorum(here) or (is_patient and not here >= awaited):
            return False
        if is_patient and not self._locks and any(one.member.node_id in accused for one in self.chosen_intents()):
            return False  # an honest seat may follow into this view, and with the accused this one would be lost, too
        is_early = now - self._begun < self._setting.newcomer_seconds
        if self._setting.invited and is_early and self._setting.step.may_join(self._members(here), self.view, more=1):
            return False
        return bool(self._locks) or self.are_fit(self.chosen_intents(), self.view)

    def _members(self, nodes: Iterable[NodeId]) -> list[GroupMember]:
        return [self.intents[node].member for node in nodes if node in self.intents]

    def is_spoilt(self, missing: Collection[NodeId], now: float) -> bool:
        """Whether only members that do not count are missing, for longer than a step waits for them."""
        may_wait = now - self._begun < SPOILT_AFTER * self._setting.newcomer_seconds
        return bool(missing) and not may_wait and not any(map(self._setting.step.ledger.counts, missing))

    def chosen_intents(self) -> tuple[VerifiedBody[Intent], ...]:
        """The intents for a proposal, without accused members if enough others remain.

        An accusation alone can never block the step.
        """
        here = self._here() & self.intents.keys()
        without_accused = self._fitting(here - self._accused())
        return without_accused if self.are_fit(without_accused, self.view) else self._fitting(here)

    def are_fit(self, intents: Sequence[VerifiedBody[Intent]], view: int) -> bool:
        """Whether these intents can form a round: each member once, one of them a reducer, one node per wallet, and not
        too many newcomers.
        """
        step, members = self._setting.step, [one.member for one in intents]
        nodes = [member.node_id for member in members]
        return (
            1 <= len(members) <= self._setting.most_members
            and len(set(nodes)) == len(nodes)
            and step.may_meet(members)
            and all(one.body.step_id == step.id for one in intents)
            and any(map(step.may_reduce, nodes))
            and step.may_join(members, view)
            # where members may lie, no proposer can leave out the work of the seats
            and (not step.committee.is_open or step.is_quorum(nodes))
        )

    def keep_early(self, sender: NodeId, message: _Part, round_id: str) -> None:
        """Store a message of a round that is not known here yet: its proposal may be under way."""
        if isinstance(message, ChoicesSaid):
            is_fit = True
        elif isinstance(message, StatementSaid):
            most = statistics_size(MAX_MEMBERS, with_gram=True)
            is_fit = all(len(one) <= most for one in message.statistics.values())
        else:
            setting, count = self._setting, self._setting.plan.count
            is_slice = setting.is_part if isinstance(message, ContributionSent) else setting.is_result
            is_fit = all(index < count and is_slice(index, part) for index, part in message.slices.items())
        if not is_fit:
            return
        kept = self._early.setdefault(sender, deque(maxlen=MAX_EARLY))
        kept.append((round_id, message))
        while _slices_in(kept) > EARLY_SLICES * self._setting.plan.count:
            kept.popleft()
        most = EARLY_SLICES_OF_ALL * self._setting.plan.count + EARLY_OF_EACH * MAX_MEMBERS
        counts = self._setting.step.ledger.counts
        while sum(map(_slices_in, self._early.values())) > most:
            # of names that cost nothing first, however little each of them has sent
            largest = max(self._early, key=lambda node: (not counts(node), _slices_in(self._early[node])))
            self._early[largest].popleft()
            if not self._early[largest]:
                del self._early[largest]

    def take_early(self, round_id: str) -> Iterable[tuple[NodeId, _Part]]:
        """Return the stored messages of this round and drop the others."""
        early, self._early = self._early, {}
        return [(sender, message) for sender, kept in early.items() for name, message in kept if name == round_id]

    def _here(self) -> set[NodeId]:
        """The members that take part in this view."""
        if self.view == self._first and self.view == 0:
            return set(self.intents)
        return {node for node, said in self._new_views.items() if said.body.view == self.view}

    def _fitting(self, nodes: Iterable[NodeId]) -> tuple[VerifiedBody[Intent], ...]:
        """A round's worth of intents: seats first; if there are too few places, others get a quarter of them."""
        step, most, chosen = self._setting.step, self._setting.most_members, dict[GroupMember, VerifiedBody[Intent]]()
        order = sorted(nodes, key=partial(hash_parts, "neuroshard/places", step.id))
        known = list(filter(step.may_reduce, order))
        # of the others, those that the owner has named come first
        others = filterfalse(step.may_reduce, order)
        others = sorted(others, key=lambda node: step.is_free_name(self.intents[node].member))
        count = most * 3 // 4 if len(order) > most else len(known)
        for node in (*known[:count], *others, *known[count:]):
            signed = self.intents[node]
            members = [*chosen, signed.member]
            if len(members) <= most and step.may_meet(members) and step.may_join(members, self.view):
                chosen[signed.member] = signed
        return tuple(map(chosen.__getitem__, sorted(chosen)))

    def _accused(self) -> set[NodeId]:
        """Members that were missing, in any view so far, at more voters than may lie."""
        tolerated = self._setting.step.committee.faults
        return {node for node, accusers in self._accusers.items() if len(accusers) > tolerated}


def facts_of(step: Step, intents: Sequence[VerifiedBody[Intent]]) -> MemberFacts:
    """The facts about the authors that the judgement of contributions needs, in row order."""
    commitments = [one.body.commitment for one in intents]
    return MemberFacts(
        work=tuple([float(one.body.sequences) for one in intents]),
        established=tuple([step.ledger.counts(one.member.node_id) for one in intents]),
        originals=tuple(map(commitments.index, commitments)),
        are_friends=not step.committee.is_open,
    )


def known_median(numbers: Iterable[int | None]) -> int | None:
    """Lower median of the known numbers; None without one."""
    known = [number for number in numbers if number is not None]
    return median_low(known) if known else None


def _slices_in(kept: Iterable[tuple[str, _Part]]) -> int:
    """Number of slices in these messages; a message without slices counts as one."""
    count = 0
    for _, message in kept:
        match message:
            case ChoicesSaid():
                count += 1
            case StatementSaid(statistics=slices) | ContributionSent(slices=slices) | ResultSaid(slices=slices):
                count += max(1, len(slices))
    return count
