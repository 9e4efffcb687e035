"""The two votes of a step at one member, and how it ends. Pure. All of the round's safety lies here.

A voter prepares one value a view, commits a value only when a quorum has prepared it in the present view, and from then
on prepares another one only when a quorum has prepared that in a later view. Two quorums share an honest voter, so once
a quorum has committed a value no other one can be prepared by a quorum (the argument of Buchman, Kwon and Milosevic,
"The latest gossip on BFT consensus", 2018, section 4). What a voter must remember is written down before it is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from neuroshard.swarm.certified.ballots import Ballots
from neuroshard.swarm.certified.bodies import Phase, Value, Vote
from neuroshard.swarm.certified.effects import Accuse, Complete, Effect, Persist, Say, VoteRecord
from neuroshard.swarm.certified.known_values import Aggregate, KnownValues
from neuroshard.swarm.certified.messages import (
    AggregateSent,
    AggregateWanted,
    CertificateSaid,
    IntentSaid,
    Message,
    NewViewSaid,
    Quorum,
    Signed,
    VoteSaid,
)
from neuroshard.swarm.certified.setting import Setting
from neuroshard.types import NodeId


class Voting:
    """Belongs to one RoundMember."""

    def __init__(self, setting: Setting, record: VoteRecord | None, completed: Complete | None) -> None:
        """`record` is what this node has written down of its votes in this step, `completed` how the step has ended."""
        self.completed = completed
        self.values = KnownValues(setting.is_result)
        self.record = record or VoteRecord(setting.step.id, -1, "")
        self._setting = setting
        self._ballots = Ballots(setting.step)
        self._asked = 0  # times
        self._certificate: Quorum | None = None  # of a value whose aggregate may still be on its way
        if self.lock is not None:
            self.values.add(self.lock.value, self.record.aggregate)
        if completed is not None:
            self.values.add(completed.certificate.value, completed.aggregate)

    @property
    def lock(self) -> Quorum | None:
        """What this node has voted to commit, so that the step may have ended with it elsewhere."""
        return self.record.lock

    @property
    def last_view(self) -> int:
        """Of a vote of this node; -1 before the first."""
        return max(self.record.view, -1 if self.lock is None else self.lock.view)

    @property
    def knows_end(self) -> bool:
        """Whether the step has ended by a certificate, whose aggregate may still be on its way."""
        return self.completed is not None or self._certificate is not None

    def prepare(self, view: int, value: Value, proof: Quorum | None) -> list[Effect]:
        """Vote for a value in this view, unless this node has another vote in it or supports something else.

        `proof` is what the view's proposal shows: that a quorum prepared the value in an earlier view.
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
        """Lock and commit what a quorum has prepared in the present view; end with what a quorum has committed."""
        effects = list[Effect]()
        prepared = self.values.get(self._ballots.decided(view, Phase.PREPARE))
        may_lock = self._is_voter and not self.knows_end and (self.lock is None or self.lock.view < view)
        if prepared is not None and may_lock:
            value, aggregate = prepared
            lock = self._ballots.quorum(view, Phase.PREPARE, value)
            self.record = replace(self.record, lock=lock, aggregate=aggregate)
            effects += [Persist(self.record), *self._vote(view, Phase.COMMIT, value)]
        return [*effects, *self._end()]

    def take(self, sender: NodeId, message: VoteSaid | CertificateSaid | AggregateSent, view: int) -> list[Effect]:
        """What others say of values; `view` is the present one."""
        match message:
            case VoteSaid(signed):
                return self._take_vote(signed, view)
            case CertificateSaid(certificate):
                return self._take_certificate(sender, certificate)
            case AggregateSent(value, slices):
                return self.count(view) if self.values.take(value, slices) else []

    def is_lock(self, quorum: Quorum) -> bool:
        """Whether a quorum has prepared this."""
        return quorum.phase is Phase.PREPARE and self._counts(quorum)

    def ask(self, whom: NodeId | None = None) -> list[Effect]:
        """Ask somebody for aggregates of values that others hold: another one each time, unless `whom` is said."""
        others = sorted(self._setting.others)
        if self.completed is not None or not others:
            return []
        wanted = self.values.wanted()
        self._asked += bool(wanted)
        to = frozenset({others[self._asked % len(others)] if whom is None else whom})
        return [Say(to, AggregateWanted(self._setting.step.id, value, missing)) for value, missing in wanted.items()]

    def help(self, sender: NodeId, message: Message) -> list[Effect]:
        """What others lack: the end of the step, and the slices of an aggregate."""
        if self.completed is not None:
            told = certificate_for(self.completed.certificate, sender, message)
            if told:
                return told
        known = self.values.get(message.value) if isinstance(message, AggregateWanted) else None
        return [] if known is None else slices_for(known[1], sender, message)

    def _counts(self, quorum: Quorum) -> bool:
        """Whether enough voters said this, of an aggregate of all slices: of fewer, the others would be anything."""
        is_whole = len(quorum.value.aggregate) == self._setting.plan.count
        return is_whole and quorum.is_valid_for(self._setting.step)

    @property
    def _is_voter(self) -> bool:
        return self._setting.member in self._setting.step.roster.members

    def _supports(self, value: Value, proof: Quorum | None) -> bool:
        if self.lock is None or self.lock.value.digest == value.digest:
            return True
        return proof is not None and proof.value.digest == value.digest and proof.view > self.lock.view

    def _vote(self, view: int, phase: Phase, value: Value) -> list[Effect]:
        signed = self._setting.sign(Vote(self._setting.step.id, view, phase, value.digest))
        return [Say(self._setting.others, VoteSaid(signed))] if self._ballots.add(signed) else []

    def _take_vote(self, signed: Signed[Vote], view: int) -> list[Effect]:
        return self.count(view) if self._ballots.add(signed) else self._contradictions([signed])

    def _take_certificate(self, sender: NodeId, certificate: Quorum) -> list[Effect]:
        if certificate.phase is not Phase.COMMIT or not self._counts(certificate):
            return []
        lies, is_first = self._contradictions(certificate.votes), self._certificate is None
        self._certificate = certificate  # a liar's vote in it may be another one than was heard here
        self.values.want(certificate.value)
        # an aggregate is large: who says the same later is asked only when nothing comes
        return [*lies, *(self._end() or (self.ask(sender) if is_first else []))]

    def _contradictions(self, votes: Iterable[Signed[Vote]]) -> list[Effect]:
        others = [(vote, self._ballots.other_vote(vote)) for vote in votes]
        what = "It voted for two values in one view."
        return [Accuse(vote.member.node_id, what, (one.claim, vote.claim)) for vote, one in others if one is not None]

    def _end(self) -> list[Effect]:
        if self.completed is not None:
            return []
        view, digest = self._ballots.committed() or (0, None)
        known = self.values.get(digest)
        if known is not None:
            self._certificate = self._ballots.quorum(view, Phase.COMMIT, known[0])
        certificate = self._certificate
        known = None if certificate is None else self.values.get(certificate.value.digest)
        if certificate is None or known is None:
            return []
        value, aggregate = known
        self.completed = Complete(certificate, aggregate)
        to = self._setting.others | {member.node_id for member in value.members} - {self._setting.self_id}
        return [Say(to, CertificateSaid(certificate)), self.completed]  # nobody says anything after the end


def certificate_for(certificate: Quorum, sender: NodeId, message: Message) -> list[Effect]:
    """The certificate of a step, for somebody for whom it has not ended yet."""
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
    """The slices of an aggregate that somebody wants."""
    if not isinstance(message, AggregateWanted):
        return []
    sent = {index: aggregate[index] for index in message.slices if 0 <= index < len(aggregate)}
    return [Say(frozenset({sender}), AggregateSent(message.value, sent))]
