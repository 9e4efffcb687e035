"""The two votes of a step at one member, and how the step ends. Pure. The safety of a round depends on this file alone.

A member votes twice on a value: to prepare it, then to commit it. A quorum of prepare votes locks the value. Ballots
counts the votes, and KnownValues has the aggregates that belong to the values.

The invariants, in the order in which the code keeps them:

    1. A voter prepares at most one value per view (`prepare`: record.view, record.prepared).
    2. A locked voter prepares another value only with the proof of a lock of a later view (`_supports`).
    3. It locks, and then commits, only a value whose whole aggregate it has (`count`).
    4. Every Persist comes before the Say of its vote: after a crash the voter knows at least what its peers know.
    5. A voter that sees a vote of its own which it does not know votes no more in the step (`check_memory`).

Any two quorums share an honest voter. With 1 and 2 that voter keeps two values from being committed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from neuroshard.consensus.chain import Step
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import Accuse, Complete, Effect, GiveUp, Persist, RoundConfig, Say, VoteRecord
from neuroshard.consensus.round_messages import (
    AggregateSent,
    AggregateWanted,
    CertificateSaid,
    IntentSaid,
    Message,
    NewViewSaid,
    Phase,
    ProposalSaid,
    Quorum,
    Value,
    VerifiedBody,
    Vote,
    VoteSaid,
)
from neuroshard.consensus.slices import Encoded, digest_of
from neuroshard.types import NodeId

MAX_VIEWS = 64  # per voter the newest are kept: a liar's votes can only displace its own


class Ballots:
    """The votes of one step. Only the first vote of a seat in a phase and view counts."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._votes: dict[tuple[int, Phase], dict[NodeId, VerifiedBody[Vote]]] = {}

    def add(self, signed: VerifiedBody[Vote]) -> bool:
        """Store a vote. Returns True if it is a voter's and new."""
        vote = signed.body
        if vote.step_id != self._step.id or signed.member not in self._step.committee.members:
            return False
        said = self._votes.setdefault((vote.view, vote.phase), {})
        if signed.member.node_id in said:
            return False
        said[signed.member.node_id] = signed
        own = sorted(key for key, of_all in self._votes.items() if signed.member.node_id in of_all)
        for old in own[: -2 * MAX_VIEWS]:
            del self._votes[old][signed.member.node_id]
            if not self._votes[old]:
                del self._votes[old]
        return True

    def other_vote(self, signed: VerifiedBody[Vote]) -> VerifiedBody[Vote] | None:
        """The vote for another value by this voter in the same phase and view, which proves that it lies."""
        vote = signed.body
        first = self._votes.get((vote.view, vote.phase), {}).get(signed.member.node_id)
        is_other = first is not None and vote.step_id == self._step.id and first.body.value != vote.value
        return first if is_other else None

    def decided(self, view: int, phase: Phase) -> str:
        """The value (hex digest) with a quorum of votes, or ""."""
        voters: dict[str, list[GroupMember]] = {}
        for signed in self._votes.get((view, phase), {}).values():
            voters.setdefault(signed.body.value, []).append(signed.member)
        for value, said in voters.items():
            if self._step.committee.is_quorum(said):
                return value
        return ""

    def committed(self) -> tuple[int, str]:
        """View and value with a quorum of commits in any view; the value is "" if there is none."""
        for view, phase in self._votes:
            if phase is Phase.COMMIT and (value := self.decided(view, phase)):
                return view, value
        return 0, ""

    def quorum(self, view: int, phase: Phase, value: Value) -> Quorum:
        """The votes for this value as a quorum."""
        said = self._votes.get((view, phase), {})
        return Quorum(
            value, view, phase, tuple(said[node] for node in sorted(said) if said[node].body.value == value.digest)
        )


Aggregate = tuple[Encoded, ...]
"""All encoded slices."""


class KnownValues:
    """Values and their aggregates by digest."""

    def __init__(self, is_slice: Callable[[int, Encoded], bool]) -> None:
        """`is_slice` returns whether bytes can be the slice of this number of an aggregate."""
        self._is_slice = is_slice
        self.complete: dict[str, tuple[Value, Aggregate]] = {}
        self._wanted: dict[str, tuple[Value, dict[int, Encoded]]] = {}

    def add(self, value: Value, aggregate: Aggregate) -> None:
        """Store a value with its complete aggregate."""
        self.complete[value.digest] = value, aggregate
        self._wanted.pop(value.digest, None)

    def forget(self, aggregates: Collection[tuple[str, ...]]) -> None:
        """Drop the values with these aggregates, by the digests of their slices."""
        for digest, (value, _) in list(self.complete.items()):
            if value.aggregate in aggregates:
                del self.complete[digest]

    def want(self, value: Value) -> None:
        """Start to collect the aggregate of this value."""
        if not value.aggregate:
            self.add(value, ())
        elif value.digest not in self.complete:
            self._wanted.setdefault(value.digest, (value, {}))

    def wanted(self) -> Mapping[str, tuple[int, ...]]:
        """The missing slices by the value's digest."""
        return {
            digest: tuple(index for index in range(len(value.aggregate)) if index not in come)
            for digest, (value, come) in sorted(self._wanted.items())
        }

    def take(self, digest: str, slices: Mapping[int, Encoded]) -> bool:
        """Store received slices. Returns True if the aggregate is now complete.

        Slices that do not match their digest are dropped. So are bytes that are not a slice at all: lying voters
        together could agree on such bytes, and no node could decode them.
        """
        if digest not in self._wanted:
            return False
        value, come = self._wanted[digest]
        for index, content in slices.items():
            is_named = 0 <= index < len(value.aggregate) and digest_of(content).hex() == value.aggregate[index]
            if is_named and self._is_slice(index, content):
                come[index] = content
        if len(come) < len(value.aggregate):
            return False
        self.add(value, tuple(come[index] for index in range(len(value.aggregate))))
        return True


class Voting:
    """The votes and the lock of one RoundStateMachine."""

    def __init__(self, setting: RoundConfig, record: VoteRecord | None, completed: Complete | None) -> None:
        """`record` contains this node's stored votes in this step; `completed` is the end of the step, if known."""
        self.completed = completed
        self.values = KnownValues(setting.is_result)
        self.record = record or VoteRecord(setting.step.id, -1, "")
        self._setting = setting
        self._ballots = Ballots(setting.step)
        self._asked = 0  # number of requests
        self._certificate: Quorum | None = None  # of a value whose aggregate may still be under way
        if self.record.lock is not None:
            self.values.add(self.record.lock.value, self.record.aggregate)
        if completed is not None:
            self.values.add(completed.certificate.value, completed.aggregate)

    @property
    def last_view(self) -> int:
        """The view of this node's last vote; -1 before the first."""
        return max(self.record.view, -1 if self.record.lock is None else self.record.lock.view)

    @property
    def knows_end(self) -> bool:
        """Whether a certificate shows the end of the step, even if its aggregate is still under way."""
        return self.completed is not None or self._certificate is not None

    def prepare(self, view: int, value: Value, proof: Quorum | None) -> list[Effect]:
        """Vote for a value in this view, unless this node has voted for another one in it or is locked on another one.

        `proof` is the lock in the view's proposal: it shows that a quorum prepared the value in an earlier view.
        """
        record = self.record
        has_other_vote = record.view >= view and record.prepared != value.digest
        if not self._is_voter or self.knows_end or has_other_vote or not self._supports(value, proof):
            return []
        effects = list[Effect]()
        if record.view < view:
            self.record = replace(record, view=view, prepared=value.digest)
            effects.append(Persist(self.record))
        return [*effects, *self._vote(view, Phase.PREPARE, value), *self.count(view)]

    def count(self, view: int) -> list[Effect]:
        """Lock and commit a value prepared by a quorum in the current view.

        End the step with one committed by a quorum.
        """
        effects = list[Effect]()
        prepared = self.values.complete.get(self._ballots.decided(view, Phase.PREPARE))
        may_lock = self._is_voter and not self.knows_end and (self.record.lock is None or self.record.lock.view < view)
        if prepared is not None and may_lock:
            value, aggregate = prepared
            lock = self._ballots.quorum(view, Phase.PREPARE, value)
            self.record = replace(self.record, lock=lock, aggregate=aggregate)
            effects += [Persist(self.record), *self._vote(view, Phase.COMMIT, value)]
        return [*effects, *self._end()]

    def doubt(self, aggregates: Collection[tuple[str, ...]]) -> None:
        """Forget values that may be false, by the digests of their slices: this node then locks none of them."""
        if self.record.lock is None:
            self.values.forget(aggregates)

    def take(self, message: VoteSaid | CertificateSaid | AggregateSent, view: int) -> list[Effect]:
        """Handle votes, certificates and slices of others; `view` is the current one."""
        match message:
            case VoteSaid(signed):
                return self.count(view) if self._ballots.add(signed) else self._contradictions([signed])
            case CertificateSaid(certificate):
                return self._take_certificate(certificate)
            case AggregateSent(value, slices):
                return self.count(view) if self.values.take(value, slices) else []

    def take_known(self, slices: Mapping[str, Encoded], view: int) -> list[Effect]:
        """Complete the certified aggregate with slices that have come before, by their digests (hex)."""
        if self._certificate is None:
            return []
        value, found = self._certificate.value, dict[int, Encoded]()
        for index in self.values.wanted().get(value.digest, ()):
            if (digest := value.aggregate[index]) in slices:
                found[index] = slices[digest]
        return self.count(view) if self.values.take(value.digest, found) else []

    def check_memory(self, message: Message) -> list[Effect]:
        """Stop voting in this step if the message contains a vote of this node that its record does not include.

        The record was restored from an old copy: the node does not know which votes it has sent.
        """
        own, record = self._setting.member, self.record
        for vote in () if record.is_incomplete else votes_in(message):
            if vote.member == own and vote.body.step_id == record.step_id and not record.includes(vote.body):
                self.record = replace(record, is_incomplete=True)
                reason = "this node's vote log is older than a vote that the node has sent"
                return [Persist(self.record), GiveUp(reason)]
        return []

    def is_lock(self, quorum: Quorum) -> bool:
        """Whether this is a valid lock: a quorum of prepare votes."""
        return quorum.phase is Phase.PREPARE and self._counts(quorum)

    def ask(self, whom: NodeId | None = None) -> list[Effect]:
        """Request missing aggregates from another node, a different one each time unless `whom` is given."""
        others = sorted(self._setting.others)
        if self.completed is not None or not others:
            return []
        wanted = self.values.wanted()
        self._asked += bool(wanted)
        to = frozenset({others[self._asked % len(others)] if whom is None else whom})
        return [Say(to, AggregateWanted(self._setting.step.id, value, missing)) for value, missing in wanted.items()]

    def help(self, sender: NodeId, message: Message) -> list[Effect]:
        """Answer with the end of the step, or with the requested slices of an aggregate."""
        if self.completed is not None:
            certificate = certificate_for(self.completed.certificate, sender, message)
            if certificate:
                return certificate
        known = self.values.complete.get(message.value) if isinstance(message, AggregateWanted) else None
        return [] if known is None else slices_for(known[1], sender, message)

    def _counts(self, quorum: Quorum) -> bool:
        """Whether enough voters signed this, for an aggregate with all slices.

        With fewer slices the rest would be undefined.
        """
        value, step = quorum.value, self._setting.step
        is_whole = len(value.aggregate) == (0 if value.round_id is None else self._setting.plan.count)
        return is_whole and value.step_id == step.id and quorum.is_decided_by(step.committee)

    @property
    def _is_voter(self) -> bool:
        return self._setting.is_seat and not self.record.is_incomplete

    def _supports(self, value: Value, proof: Quorum | None) -> bool:
        if self.record.lock is None or self.record.lock.value.digest == value.digest:
            return True
        return proof is not None and proof.value.digest == value.digest and proof.view > self.record.lock.view

    def _vote(self, view: int, phase: Phase, value: Value) -> list[Effect]:
        signed = self._setting.sign(Vote(self._setting.step.id, view, phase, value.digest))
        return [Say(self._setting.others, VoteSaid(signed))] if self._ballots.add(signed) else []

    def _take_certificate(self, certificate: Quorum) -> list[Effect]:
        if certificate.phase is not Phase.COMMIT or not self._counts(certificate):
            return []
        self._certificate = certificate  # it may contain another vote of a liar than the one received here
        self.values.want(certificate.value)
        return [*self._contradictions(certificate.votes), *self._end()]

    def _contradictions(self, votes: Iterable[VerifiedBody[Vote]]) -> list[Effect]:
        effects = list[Effect]()
        for vote in votes:
            other = self._ballots.other_vote(vote)
            if other is not None:
                proof = other.claim, vote.claim
                effects.append(Accuse(vote.member.node_id, "It voted for two values in one view.", proof))
        return effects

    def _end(self) -> list[Effect]:
        if self.completed is not None:
            return []
        view, digest = self._ballots.committed()
        known = self.values.complete.get(digest)
        if known is not None:
            self._certificate = self._ballots.quorum(view, Phase.COMMIT, known[0])
        certificate = self._certificate
        known = None if certificate is None else self.values.complete.get(certificate.value.digest)
        if certificate is None or known is None:
            return []
        value, aggregate = known
        self.completed = Complete(certificate, aggregate)
        to = self._setting.others.union(map(attrgetter("node_id"), value.members)) - {self._setting.member.node_id}
        return [Say(to, CertificateSaid(certificate)), self.completed]  # a member sends nothing after the end


def votes_in(message: Message) -> Sequence[VerifiedBody[Vote]]:
    """The votes in a message, by any signer."""
    match message:
        case VoteSaid(signed):
            return [signed]
        case CertificateSaid(certificate=quorum) | NewViewSaid(lock=quorum) | ProposalSaid(lock=quorum):
            return () if quorum is None else quorum.votes
        case _:
            return ()


def certificate_for(certificate: Quorum, sender: NodeId, message: Message) -> list[Effect]:
    """The certificate of a step, for a node whose step has not ended yet."""
    step_id, is_known = certificate.value.step_id, False
    match message:
        case IntentSaid(signed) | NewViewSaid(signed):
            is_known = signed.body.step_id == step_id
        case AggregateWanted(wanted_of, value):
            is_known = wanted_of == step_id and value != certificate.value.digest
        case _:
            pass
    return [Say(frozenset({sender}), CertificateSaid(certificate))] if is_known else []


def slices_for(aggregate: Aggregate, sender: NodeId, message: Message) -> list[Effect]:
    """The requested slices of an aggregate."""
    if not isinstance(message, AggregateWanted):
        return []
    sent = {index: aggregate[index] for index in message.slices if 0 <= index < len(aggregate)}
    return [Say(frozenset({sender}), AggregateSent(message.value, sent))]
