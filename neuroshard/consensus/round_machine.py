"""State machine of one member of a certified round: events and the time in, effects out. Pure.

docs/ROUNDS.md explains the protocol and why two members never complete a step with different bytes.

One view, as the methods here see it:

    GATHER    enter -> intents; the proposer's `_propose` -> _take_proposal
    EXCHANGE  _begin_exchange -> AllReduce: parts, statistics, Judge, results; `_look` when the aggregate is whole
    CHOOSE    if a measurement is due: Choose -> choices to the proposer -> those of a quorum to all
    VOTE      Check -> _checked -> Voting.prepare -> (quorum) commit -> (quorum) Complete
    too late  tick -> _give_up_view -> the next view, whose proposal repeats the highest lock if there is one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from operator import attrgetter
from statistics import median_low

from msgspec import structs

from neuroshard.aggregation import GateVerdict
from neuroshard.consensus.all_reduce import FREE_PARTS, AllReduce
from neuroshard.consensus.committee import Entry
from neuroshard.consensus.effects import (
    Check,
    Checked,
    Choose,
    Chosen,
    CompareBlocks,
    CompareNorms,
    Complete,
    Effect,
    EncodedContribution,
    FailedReducers,
    GiveUp,
    Job,
    JobResult,
    Judge,
    Judged,
    MakeStatistics,
    Reduce,
    RoundConfig,
    RoundPhase,
    RoundProgress,
    Say,
    VoteRecord,
)
from neuroshard.consensus.entries import entries_objection, merged_evidence, supported_entries
from neuroshard.consensus.round_messages import (
    AggregateSent,
    AggregateWanted,
    BlocksSent,
    BlocksWanted,
    CertificateSaid,
    ChoicesSaid,
    ContributionSent,
    EntryEvidence,
    EvidenceSaid,
    Intent,
    IntentSaid,
    Message,
    NewView,
    NewViewSaid,
    OuterChoice,
    PartsWanted,
    ProposalSaid,
    Quorum,
    ResultSaid,
    RoundProposal,
    StatementSaid,
    Value,
    VerifiedBody,
    VoteSaid,
    commitment_of,
    round_id_of,
)
from neuroshard.consensus.views import Views, known_median
from neuroshard.consensus.voting import Aggregate, Voting
from neuroshard.optim.outer import CertifiedWork
from neuroshard.types import NodeId

MAX_AHEAD = 8  # views: a proposer farther ahead of the voters could exhaust the range of views
NO_VALUE = "0" * 64  # requests the certificate
_OfRound = ContributionSent | StatementSaid | ResultSaid | ChoicesSaid | PartsWanted | BlocksWanted | BlocksSent


class RoundStateMachine:
    """Starts with `enter`.

    Its owner must carry out all effects of `hear`, `answered` and `tick` in the returned order.
    """

    def __init__(
        self, setting: RoundConfig, record: VoteRecord | None = None, completed: Complete | None = None
    ) -> None:
        """`record` contains this node's stored votes in this step.

        A member whose step has `completed` only helps members whose step has not.
        """
        self.setting = setting
        self.voting = Voting(setting, record, completed)
        self.views = Views(setting)
        self._own: EncodedContribution | None = None
        self._exchange: AllReduce | None = None
        self._ask_after = -inf
        self._proof: Quorum | None = None  # why the current view votes on an earlier value again
        self._judged: Judged | None = None
        self._liars = set[NodeId]()  # members whose statistics were false in earlier views
        self._is_measuring = False  # the candidates for the outer step
        self._choices: dict[NodeId, VerifiedBody[OuterChoice]] = {}  # of this round
        self._objection = ""
        # by digests and work: the same bytes with other claims lead to another state
        self._checking: dict[tuple[tuple[str, ...], CertifiedWork], Value] = {}
        self._answers: dict[tuple[tuple[str, ...], CertifiedWork], Checked] = {}  # that wait for the audit
        self._evidence: EntryEvidence | None = None  # for entries of this step
        self._proposed_entries: tuple[Entry, ...] = ()  # of the present view

    @property
    def progress(self) -> RoundProgress:
        """The state of the current view."""
        exchange = self._exchange
        if self.voting.completed is not None:
            phase = RoundPhase.ENDED
        elif self._is_measuring or self._checking or self._proof is not None:
            phase = RoundPhase.VOTE
        else:
            phase = RoundPhase.GATHER if exchange is None else RoundPhase.EXCHANGE
        now = RoundProgress(self.views.view, phase, judged=self._judged, objection=self._objection)
        if exchange is None:
            return now
        members, skipped = exchange.members, exchange.skipped
        return replace(now, members=members, skipped_audits=skipped, round_id=exchange.round_id, own=exchange.own)

    @property
    def has_entered(self) -> bool:
        """Whether this node takes part with a contribution."""
        return self._own is not None

    def failed_reducers(self, value: Value) -> FailedReducers | None:
        """The reducers that failed this member in the step that this value ended; None without one."""
        exchange, is_open = self._exchange, self.setting.step.committee.is_open
        # among friends false results are bad memory: they are shown and cost nothing
        wrong, silent = set(self._liars if is_open else ()), set[NodeId]()
        if exchange is not None and exchange.round_id == value.round_id:
            wrong |= exchange.wrong(value.aggregate) if is_open else set()
            silent = exchange.silent - self.views.in_later_views - wrong if exchange.late else silent
        failed = FailedReducers(value.digest, tuple(sorted(silent)), tuple(sorted(wrong)))
        return failed if wrong or silent else None

    def enter(self, contribution: EncodedContribution, now: float, view: int = 0) -> list[Effect]:
        """Take part with this contribution, from this view on. `now` is monotonic and in seconds in all methods."""
        self._own = contribution
        self.views.begin(self.setting.next_view(max(view, self.voting.last_view, 0)), now)
        commitment = commitment_of(contribution.digests)
        intent = Intent(
            self.setting.step.id,
            self.views.view,
            commitment,
            contribution.sequences,
            contribution.upload,
            contribution.seconds,
            contribution.made_at,
            contribution.exchange,
            contribution.sequence,
        )
        signed = self.setting.sign(intent)
        self.views.add_intent(signed)
        effects: list[Effect] = [Say(self.setting.others | self.setting.invited, IntentSaid(signed))]
        if self.views.view > 0:
            effects += self._say_new_view(())
        return [*effects, *self._propose(now)]

    def add_evidence(self, evidence: EntryEvidence, now: float) -> list[Effect]:
        """Keep evidence for entries; the proposer of this view proposes a value that carries only entries."""
        self._evidence = merged_evidence(
            self.setting.step, self._evidence or EntryEvidence(), evidence, self.setting.revoked
        )
        if self.voting.completed is not None or self.views.has_proposal or self._exchange is not None:
            return []
        if self.has_entered and not evidence.leave_requests:
            return []  # only a leave is urgent; other entries go with the aggregate
        return self._propose_entries(now)

    def ask_for_the_end(self) -> list[Effect]:
        """Ask how the step has ended, when the other members continued without this node."""
        return [Say(self.setting.others, AggregateWanted(self.setting.step.id, NO_VALUE, ()))]

    def tick(self, now: float) -> list[Effect]:
        """Check the deadlines. Called about once per second."""
        if self.voting.completed is not None:
            return []
        effects = list[Effect]()
        if now >= self._ask_after:  # an aggregate may need long to arrive
            self._ask_after = now + self.setting.timing.gather_seconds
            effects = self.voting.ask()
        if self.views.is_over(now) and self.views.is_ahead:
            self.views.wait_again(now)
            return [*effects, *self._say_new_view(())]
        exchange = self._exchange
        is_vain = exchange is not None and (exchange.is_void or self.views.is_spoilt(exchange.missing(), now))
        if self.views.is_over(now) or is_vain:
            return [*effects, *self._give_up_view(now)]
        if exchange is not None:
            effects += exchange.explain() if self.views.must_explain(now) else []
            again = exchange.redo(now) if self.views.must_redo(now) else []
            effects += [*again, *exchange.remind(now), *self._look()]
        return [*effects, *self._propose(now)]

    def hear(self, sender: NodeId, message: Message, now: float) -> list[Effect]:
        """Handle a message whose signatures were verified and whose sender is known."""
        if self.voting.completed is not None or isinstance(message, AggregateWanted):
            return self.voting.help(sender, message)
        effects = self.voting.check_memory(message)
        match message:
            case IntentSaid(signed):
                self.views.add_intent(signed)
                effects += self._propose(now)
            case NewViewSaid(signed, lock):
                effects += self._take_new_view(signed, lock, now)
            case ProposalSaid():
                effects += self._take_proposal(message, now)
            case VoteSaid() | CertificateSaid():
                effects += self._take_votes(sender, message, now)
            case EvidenceSaid(evidence):
                effects += self.add_evidence(evidence, now)
            case AggregateSent():
                effects += [*self.voting.take(message, self.views.view), *self._vote_again()]
            case _:
                effects += self._take_part(sender, message)
        return effects

    def answered(self, job: Job, answer: JobResult) -> list[Effect]:
        """Handle the result of a job."""
        if isinstance(job, Check):
            if not isinstance(answer, Checked):
                raise TypeError(f"{type(answer).__name__} is not an answer to Check")
            return self._checked(job, answer) if self.voting.completed is None else []
        exchange = self._exchange
        if self.voting.completed is not None or exchange is None or job.round_id != exchange.round_id:
            return []
        effects = list[Effect]()
        match job, answer:
            case Judge(), Judged():
                self._judged = answer
                if answer.reduction is None:
                    return [GiveUp(answer.abort_reason)]
                effects = exchange.judged(answer)
            case MakeStatistics(), Mapping():
                effects = exchange.made_statistics(answer)
            case Reduce(), Mapping():
                effects = exchange.reduced(answer)
            case CompareBlocks(), frozenset() | None:
                effects = exchange.compared(answer)
            case CompareNorms(), frozenset():
                effects = exchange.check(sorted(answer)[:FREE_PARTS]) if answer else []
            case Choose(), Chosen(choice):
                said = ChoicesSaid((self.setting.sign(OuterChoice(job.round_id, choice)),))
                proposer = self.setting.step.proposer(self.views.view)
                is_mine = proposer == self.setting.member.node_id
                effects = self._take_choices(proposer, said) if is_mine else [Say(frozenset({proposer}), said)]
            case _:
                raise TypeError(f"{type(answer).__name__} is not an answer to {type(job).__name__}")
        return [*effects, *self._look()]

    # Views

    def _propose(self, now: float) -> list[Effect]:
        step, views = self.setting.step, self.views
        if step.proposer(self.views.view) != self.setting.member.node_id or not views.may_propose(now):
            return []
        lock = views.highest_lock(self.voting.record.lock)
        return self._say_proposal(() if lock is not None else views.chosen_intents(), lock, now)

    def _propose_entries(self, now: float) -> list[Effect]:
        """Propose a value without an aggregate, if this node is the proposer and some entries are valid.

        Nothing is awaited: whether a value is valid does not depend on who is here.
        """
        views, is_turn = self.views, self.setting.step.proposer(self.views.view) == self.setting.member.node_id
        if not is_turn or not self.setting.is_seat or views.has_proposed or self.voting.record.lock is not None:
            return []
        if not self._entries or self.views.view > 0:
            return []
        return self._say_proposal((), None, now)

    @property
    def _entries(self) -> tuple[Entry, ...]:
        step = self.setting.step
        if self._evidence is None and not step.ledger.candidates and not step.committee.is_open:
            return ()
        if self.views.view >= len(step.seats):
            return ()  # each proposer has had its turn: seats that see different nodes may refuse different changes
        setting = self.setting
        return supported_entries(step, self._evidence or EntryEvidence(), setting.reachable, setting.revoked)

    def _say_proposal(self, intents: tuple[VerifiedBody[Intent], ...], lock: Quorum | None, now: float) -> list[Effect]:
        step, views = self.setting.step, self.views
        views.has_proposed = True
        round_id = round_id_of(step.id, self.views.view, intents)
        value, entries = (None, self._entries) if lock is None else (lock.value.digest, ())
        proposal = self.setting.sign(RoundProposal(step.id, self.views.view, round_id, value, entries))
        said = ProposalSaid(proposal, intents, lock, (self._evidence or EntryEvidence()) if entries else None)
        to = self.setting.others.union(map(attrgetter("member.node_id"), intents))
        return [Say(to - {self.setting.member.node_id}, said), *self._take_proposal(said, now)]

    def _take_proposal(self, said: ProposalSaid, now: float) -> list[Effect]:
        body, step = said.signed.body, self.setting.step
        is_fit = (
            body.step_id == step.id
            and self.views.view <= body.view <= max(self.views.view, self.views.view_of_others() + MAX_AHEAD)
            and said.signed.member.node_id == step.proposer(body.view)
            and (self.voting.is_lock(said.lock) if said.lock is not None else self._is_fit(said))
            and body.round_id == round_id_of(step.id, body.view, said.intents)
            and body.value == (None if said.lock is None else said.lock.value.digest)
        )
        if not is_fit:
            # Every condition guards against a hostile proposer: the right step, not a view of the past, not too far
            # ahead of the voters, the view's own proposer, a valid lock or a valid set of contributors, and an id and
            # value that match them.
            return []
        if body.view > self.views.view:
            self._enter_view(body.view, now)
        if self.views.has_proposal:
            return []
        self.views.has_proposal, self._proposed_entries = True, body.entries
        if said.lock is not None:
            self._proof = said.lock
            self.voting.values.want(said.lock.value)
            return self._vote_again()
        if self.voting.record.lock is not None:
            return []  # a locked seat supports no other value, so an exchange would be wasted
        if said.intents:
            return self._begin_exchange(body.round_id, said)
        value = structs.replace(self.setting.step.first_value(), entries=self._proposed_entries)
        value = self.setting.step.completed(value)
        self.voting.values.add(value, ())
        return self.voting.prepare(self.views.view, value, None)

    def _is_fit(self, said: ProposalSaid) -> bool:
        """Whether a proposal without a lock has contributions that form a round, or only entries, and all are valid."""
        entries, setting = said.signed.body.entries, self.setting
        if setting.revoked and any(
            (one.member.wallet_id, one.member.node_id) in setting.revoked for one in said.intents
        ):
            return False
        if entries and entries_objection(
            setting.step, entries, said.evidence or EntryEvidence(), setting.reachable, setting.revoked
        ):
            return False
        return self.views.are_fit(said.intents, said.signed.body.view) if said.intents else bool(entries)

    def _begin_exchange(self, round_id: str, said: ProposalSaid) -> list[Effect]:
        # Two friends that contradict each other, of which one has bad memory, spoil one view and not the step.
        compares_norms = self.views.is_first or self.setting.step.committee.is_open
        exchange = AllReduce(self.setting, round_id, said.intents, self._own, compares_norms=compares_norms)
        self._exchange = exchange
        effects = exchange.begin()
        for sender, early in self.views.take_early(round_id):
            effects += self._take_part(sender, early)
        return effects

    def _take_new_view(self, signed: VerifiedBody[NewView], lock: Quorum | None, now: float) -> list[Effect]:
        if signed.body.step_id != self.setting.step.id or (lock is not None and not self.voting.is_lock(lock)):
            return []
        self.views.add_new_view(signed, lock)
        ahead = self.views.view_of_others()
        effects = list[Effect]()
        if ahead > self.views.view:
            effects += self._give_up_view(now, ahead)
        return [*effects, *self._propose(now)]

    def _give_up_view(self, now: float, view: int | None = None) -> list[Effect]:
        missing = tuple[NodeId, ...]()
        # A member that only follows others into their view has not waited long enough to accuse anybody.
        if view is None:
            missing = self._exchange.missing() if self._exchange is not None else ()
        self._enter_view(self.setting.next_view(self.views.view + 1) if view is None else view, now)
        return [*self._say_new_view(missing), *self._propose(now)]

    def _enter_view(self, view: int, now: float) -> None:
        if self._exchange is not None:
            self._liars |= self._exchange.lied
        self._exchange = self._proof = self._judged = None
        self._objection, self._proposed_entries, self._is_measuring = "", (), False
        self._checking.clear()
        self._answers.clear()
        self._choices.clear()
        self.views.begin(view, now)

    def _say_new_view(self, missing: tuple[NodeId, ...]) -> list[Effect]:
        signed = self.setting.sign(NewView(self.setting.step.id, self.views.view, missing))
        self.views.add_new_view(signed, self.voting.record.lock)
        intent = self.views.intents.get(self.setting.member.node_id)
        effects: list[Effect] = [Say(self.setting.others, NewViewSaid(signed, self.voting.record.lock))]
        return effects if intent is None else [Say(self.setting.others, IntentSaid(intent)), *effects]

    # The exchange and its result

    def _take_votes(self, sender: NodeId, message: VoteSaid | CertificateSaid, now: float) -> list[Effect]:
        """Handle a vote or a certificate. An aggregate is large: what has come of it in the exchange, or will come, is
        not asked for. Otherwise the sender of the first certificate is asked at once, and others only after some time.
        """
        voting, exchange, is_first = self.voting, self._exchange, not self.voting.knows_end
        if is_first:
            self._ask_after = max(self._ask_after, now + self.setting.timing.gather_seconds)
        effects = voting.take(message, self.views.view)
        if not is_first or not isinstance(message, CertificateSaid) or not voting.knows_end or voting.completed:
            return effects
        if exchange is None or exchange.round_id != message.certificate.value.round_id:
            return [*effects, *voting.ask(sender)]
        return [*effects, *self._look(), *([] if exchange.expects_results else voting.ask(sender))]

    def _take_part(self, sender: NodeId, message: _OfRound) -> list[Effect]:
        exchange = self._exchange
        is_signed = isinstance(message, StatementSaid | ResultSaid)
        round_id = message.signed.body.round_id if is_signed else message.round_id
        if exchange is None or exchange.round_id != round_id:
            if not isinstance(message, PartsWanted | BlocksWanted | BlocksSent):
                self.views.keep_early(sender, message, round_id)
            return []
        match message:
            case PartsWanted():
                return exchange.parts_for(sender, message)
            case BlocksWanted():
                return exchange.blocks_for(sender, message)
            case BlocksSent():
                return exchange.take_blocks(sender, message)
            case ContributionSent():
                effects = exchange.take_contribution(sender, message)
            case StatementSaid():
                effects = exchange.take_statement(message)
            case ResultSaid():
                effects = exchange.take_result(message)
            case ChoicesSaid():
                effects = self._take_choices(sender, message)
        return [*effects, *self._look()]

    def _take_choices(self, sender: NodeId, said: ChoicesSaid) -> list[Effect]:
        """Collect the seats' choices as the proposer, and send those of a quorum; or take these from the proposer."""
        setting, step, exchange = self.setting, self.setting.step, self._exchange
        proposer, seats = step.proposer(self.views.view), step.committee.members
        are_fit = all(one.member in seats and one.body.choice < setting.candidates for one in said.choices)
        if exchange is None or self._has_chosen or not are_fit or proposer not in {setting.member.node_id, sender}:
            return []
        found = {one.member.node_id: one for one in said.choices}
        if proposer == setting.member.node_id:
            found |= self._choices  # the first choice of a seat counts
        elif not step.is_quorum(found):
            return []
        self._choices = found
        if proposer != setting.member.node_id or not self._has_chosen:
            return []
        return [Say(exchange.others, ChoicesSaid(tuple(found[node] for node in sorted(found))))]

    @property
    def _has_chosen(self) -> bool:
        """Whether the choices of a quorum are here."""
        return self.setting.step.is_quorum(self._choices)

    def _look(self) -> list[Effect]:
        """Check the aggregate once it is complete, and the choices of a quorum are here if they are due."""
        exchange = self._exchange
        if exchange is None:
            return []
        if self.voting.knows_end:  # nothing is left to decide
            return self.voting.take_known(exchange.contents, self.views.view)
        effects = exchange.audit()
        if exchange.verdict is None or (aggregate := exchange.aggregate) is None:
            # A slice may become uncertain again. Until it is checked, this node neither votes nor locks.
            if self._checking:
                self.voting.doubt({digests for digests, _ in self._checking})
                self._checking.clear()
                self._answers.clear()
            return effects
        if self.setting.candidates > 1 and not self._has_chosen:
            measures, self._is_measuring = self.setting.is_seat and not self._is_measuring, True
            return [*effects, Choose(exchange.round_id, aggregate)] if measures else effects
        return [*effects, *self._check(aggregate, self._value_of(exchange, exchange.verdict))]

    def _value_of(self, exchange: AllReduce, verdict: GateVerdict) -> Value:
        """The value to which a complete exchange leads, without the root of the next state and what follows from it.

        Of what members claim it has the lower medians over the established, so that no minority can raise them.
        """
        step, intents, are_established = self.setting.step, exchange.intents, exchange.facts.established
        names = [member.node_id for member in exchange.members]
        claims = [intents[names[row]] for row in verdict.accepted if are_established[row]]
        chosen = self._choices if self.setting.candidates > 1 else {}
        return structs.replace(
            step.first_value(),
            outer_step=step.number + 1,
            round_id=exchange.round_id,
            aggregate=exchange.digests,
            members=exchange.members,
            accepted=tuple([names[row] for row in verdict.accepted]),
            refused=tuple([(names[row], str(why)) for row, why in sorted(verdict.refused.items())]),
            entries=self._proposed_entries,
            uploads=tuple([(node, intents[node].upload) for node in sorted(intents)]),
            sequences=median_low([claim.sequences for claim in claims]),
            exchange=known_median([claim.exchange for claim in claims]),
            sequence=known_median([claim.sequence for claim in claims]),
            seconds=known_median([intents[node].seconds for node in intents if node in step.seats]) or 0,
            choices=tuple([(node, chosen[node].body.choice) for node in sorted(chosen)]),
        )

    def _check(self, aggregate: Aggregate, value: Value) -> list[Effect]:
        """Have an aggregate checked before this node votes for its value."""
        job = Check(aggregate, value.aggregate, value.work)
        key, is_audited = (job.digests, job.work), self._exchange is None or self._exchange.is_audited
        if is_audited and (known := self._answers.pop(key, None)) is not None:
            return self._checked(job, known)
        if key in self._checking:
            return []
        self._checking[key] = value
        return [job]

    def _checked(self, job: Check, checked: Checked) -> list[Effect]:
        if self._exchange is not None and not self._exchange.is_audited:  # no vote before the end of the audit
            self._answers[job.digests, job.work] = checked
            return []
        value = self._checking.get((job.digests, job.work))
        if value is None or not checked.next_root:
            return []
        if self._proof is None:
            value = self.setting.step.completed(structs.replace(value, next_root=checked.next_root))
        elif value.next_root != checked.next_root:
            return []
        # Order matters: the value and its aggregate are stored first, because `prepare` and `count` look them up.
        self.voting.values.add(value, job.aggregate)
        # A locked value may have ended the step elsewhere, so its quality no longer matters.
        if checked.objection and self._proof is None:
            self._objection = checked.objection
            return self.voting.count(self.views.view) or [GiveUp(f"this node votes no: {checked.objection}")]
        return self.voting.prepare(self.views.view, value, self._proof) or self.voting.count(self.views.view)

    def _vote_again(self) -> list[Effect]:
        """Vote again on the value that a quorum prepared in an earlier view, once its aggregate is here."""
        proof = self._proof
        known = None if proof is None else self.voting.values.complete.get(proof.value.digest)
        if known is None:
            return self.voting.ask()
        value, aggregate = known
        if value.round_id is None:  # only entries: the state stays as it is
            return self.voting.prepare(self.views.view, value, proof) or self.voting.count(self.views.view)
        return self._check(aggregate, value)
