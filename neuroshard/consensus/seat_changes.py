"""Changes of a stage's seats that this node asks for, and the leaves that others ask for.

the node                              asks the seats for             which happens
shuts down                            its leave                      at once, in a value without an aggregate
has lost its vote log                 its seat with a new log        with the next aggregate
replaces the wallet's silent node,    the seat for itself            with the next aggregate
or one that the wallet has revoked
misses a seat for long                the removal of that seat       with the next aggregate, if a quorum agrees
knows that the owner named wallets    the owner's list               with the next aggregate
knows a newer version of the run      the version                    with the next aggregate
gets no or false results of a node    that it reduces nothing        with the next aggregate, if a quorum agrees
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import anyio

from neuroshard.consensus.chain import Chain, LogStart, Step
from neuroshard.consensus.committee import LEAST_OPEN_SEATS, GroupMember, Seat
from neuroshard.consensus.effects import RoundConfig
from neuroshard.consensus.entries import newer_word, next_change
from neuroshard.consensus.foundation import SignedFoundation
from neuroshard.consensus.matchmaking import Matchmaking, RunSwarm
from neuroshard.consensus.round_messages import (
    CertificateSaid,
    Departure,
    EntryEvidence,
    EvidenceSaid,
    ReducerFaults,
    Silence,
    VerifiedBody,
    VotingKey,
)
from neuroshard.consensus.round_runner import RoundRunner
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.stage_chain import StageChain
from neuroshard.types import NodeId

LEAVE_SECONDS = 5.0
ASK_AGAIN_SECONDS = 1.0
LEAST_SEATS = 3  # fewer would leave one seat, and all others would wait if that one did not come back
LOST_LOG = (
    "This node does not know all votes that it has sent: its vote log is lost. It votes again after the next step that "
    "the other voting nodes complete. If they are too few: `neuroshard run refound`."
)

RoundSetting: TypeAlias = tuple[RoundConfig, RoundWork]


class SeatChanges:
    """Belongs to the event loop."""

    def __init__(self, member: GroupMember, swarm: RunSwarm, chain: StageChain, actor: RoundRunner) -> None:
        """`member` is this node."""
        self._member = member
        self._swarm = swarm
        self._chain = chain
        self._actor = actor
        self._asked_at = ""  # id of the last step for which this node has asked for changes
        # Whether this node knows all votes that it has sent for its seat. Its later seats begin above the log's start.
        self.may_vote = False

    @property
    def has_lost_votes(self) -> bool:
        """Whether this node may have sent votes for its seat that are not in its log."""
        return self._actor.log_start is not None and not self.may_vote

    async def open_log(self, step: Step | None) -> None:
        """Begin the vote log if there is none, and decide by it and the newest chain whether this node may vote.

        `step` is the next one; None while the chain does not lead to this node's state.
        """
        if self._actor.log_start is None and step is not None:
            await self._actor.begin_log(LogStart(step.standing.epoch, step.standing.height))
        chain, log = self._chain.chain, self._actor.log_start
        if chain is not None and log is not None:
            self.may_vote = self._member not in chain.ledger.committee.members or chain.is_covered(self._member, log)

    async def look(self, step: Step, matchmaking: Matchmaking, now: float) -> None:
        """Ask for the changes of the committee that this step needs."""
        await self.open_log(step)
        silent, removed, word = matchmaking.silent_seats(step, now), self._removed(step), self._newer_word(step)
        faults, version = self._faults(step), self._newer_version(step)
        wants_seat = self._wants_seat(step, silent)
        is_settled = not (wants_seat or silent or removed or faults or word or version)
        if self._asked_at == step.id or is_settled:
            return
        self._asked_at = step.id
        gone = [*removed, *(silent if len(step.committee.seats) >= LEAST_SEATS else ())]
        keys = (self._swarm.sign(VotingKey(step.id)),) if wants_seat else ()
        silences = self._silences(step, gone)
        evidence = EntryEvidence(silences=silences, keys=keys, word=word, faults=faults, version=version)
        if evidence != EntryEvidence():
            self._actor.keep(self._member.node_id, EvidenceSaid(evidence))
            self._actor.notify(step.seats - {self._member.node_id}, EvidenceSaid(evidence))

    def _removed(self, step: Step) -> list[Seat]:
        return [seat for seat in step.committee.seats if self._swarm.is_removed(seat.wallet_id)]

    def _faults(self, step: Step) -> tuple[VerifiedBody[ReducerFaults], ...]:
        """The word of this node's seat about the reducers of the step before."""
        failed = self._actor.failed
        if failed is None or failed.value != step.standing.value or self._member not in step.committee.members:
            return ()
        return (self._swarm.sign(ReducerFaults(step.id, failed.silent, failed.wrong)),)

    def _newer_word(self, step: Step) -> SignedFoundation | None:
        """The owner's list of wallets, if the chain does not contain it yet. Only a seat hands it in."""
        is_seated = step.ledger.strangers is not None and self._member in step.committee.members
        return newer_word(step, self._swarm.word) if is_seated else None

    def _newer_version(self, step: Step) -> bytes | None:
        """The next version of the run's parameters that the chain does not contain yet. Only a seat hands it in."""
        change = next_change(step, self._swarm.changes)
        return None if change is None or self._member not in step.committee.members else change.signed

    @property
    def advice(self) -> str:
        """Seats that the owner can help with, in words for people; "" if nothing is missing."""
        chain = self._chain.chain
        return "" if chain is None else _advice(chain)

    def _silences(self, step: Step, gone: Sequence[Seat]) -> tuple[VerifiedBody[Silence], ...]:
        """The agreement of this node's seat to remove others."""
        wallets = sorted({seat.wallet_id for seat in gone} - {self._member.wallet_id})
        is_seated = self._member in step.committee.members
        return tuple(self._swarm.sign(Silence(step.id, wallet)) for wallet in wallets) if is_seated else ()

    def _wants_seat(self, step: Step, silent: Sequence[Seat]) -> bool:
        """Whether this node asks to vote with a new log, or for the seat of its wallet whose other node is gone."""
        own = step.committee.seat_of(self._member.wallet_id)
        is_revoked = own is not None and (own.wallet_id, own.node_id) in self._swarm.revoked
        return is_revoked or own in silent or not self.may_vote

    async def leave(self, free_step: Callable[[], RoundSetting | None]) -> bool:
        """Give this node's seat up before it goes, so that the others need no vote of it.

        `free_step` returns the terms of the step from this node's state, unless a round of it is under way.

        Returns whether the seat is given up. Without the certificate, which may take at most LEAVE_SECONDS, the seat
        only counts as absent. Where participants may be strangers, seats are only absent.
        """
        with anyio.move_on_after(LEAVE_SECONDS):
            while self._may_leave:
                terms = free_step()
                if terms is not None:
                    step_id = terms[0].step.id
                    evidence = EntryEvidence(leave_requests=(self._swarm.sign(Departure(step_id)),))
                    self._actor.notify(terms[0].others, EvidenceSaid(evidence))
                    self._vote(terms, evidence)
                with anyio.move_on_after(ASK_AGAIN_SECONDS):
                    await self._chain.changed.wait()
                if terms is not None and not self._is_seated:
                    await self._hand_over(terms[0].others)
                    return True
        return False

    def asked(self, evidence: EntryEvidence, terms: RoundSetting) -> None:
        """Vote on the leave that another seat asks for, in the step with these terms."""
        step = terms[0].step
        if any(one.body.step_id == step.id and one.member in step.committee.members for one in evidence.leave_requests):
            self._vote(terms, evidence)

    def _vote(self, terms: RoundSetting, evidence: EntryEvidence) -> None:
        setting, work = terms
        self._actor.propose_entries(setting, setting.step.number, work, evidence)

    async def _hand_over(self, others: frozenset[NodeId]) -> None:
        """Send the certificate to the seats that remain: they may not have received all votes."""
        chain = self._chain.chain
        if chain is not None and chain.tip is not None:
            self._actor.notify(others, CertificateSaid(chain.tip))
        while not self._actor.mail.is_empty():
            await anyio.sleep(0.02)

    @property
    def _is_seated(self) -> bool:
        chain = self._chain.chain
        return chain is not None and self._member in chain.ledger.committee.members

    @property
    def _may_leave(self) -> bool:
        chain = self._chain.chain
        if chain is None or chain.ledger.committee.is_open or self._chain.fork is not None:
            return False
        return self._is_seated and len(chain.ledger.committee.seats) >= LEAST_SEATS


def _advice(chain: Chain) -> str:
    """The conditions that are missing for more seats among strangers, or for the end of some."""
    ledger, committee = chain.ledger, chain.ledger.committee
    if ledger.strangers is None:
        return ""
    lacking = LEAST_OPEN_SEATS - len(committee.seats)
    if lacking > 0:
        whose = "the owner's seats vote" if committee.wallets <= {chain.owner} else f"{len(committee.seats)} seats vote"
        named = len(set(ledger.strangers.trusted) - committee.wallets - {chain.owner})
        ready = len(ledger.due_admissions())
        return (
            f"Only {whose}: name wallets with `neuroshard run trust`, as the run's owner. When {lacking} of them have "
            f"worked for 30 minutes, they get seats together; {named} are named, {ready} have. Until then no step "
            "completes while the voting nodes are offline."
        )
    unfit = ", ".join(wallet[:8] for wallet in ledger.strangers.unfit(committee))
    if not unfit:
        return ""
    return f"The seats of {unfit} end when others can replace them: name wallets with `neuroshard run trust`."
