"""Changes of a stage's seats between two steps: this node's leave, and the leaves that others ask for."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import RoundConfig, Sign
from neuroshard.consensus.round_messages import CertificateSaid, Departure, EntryEvidence, EvidenceSaid
from neuroshard.consensus.round_runner import RoundRunner
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.stage_chain import StageChain
from neuroshard.types import NodeId

LEAVE_SECONDS = 5.0
ASK_AGAIN_SECONDS = 1.0
LEAST_SEATS = 3  # fewer would leave one seat, and all others would wait if that one did not come back


class SeatChanges:
    """Belongs to the event loop."""

    def __init__(
        self,
        member: GroupMember,
        chain: StageChain,
        sign: Sign,
        actor: RoundRunner,
        free_step: Callable[[], tuple[RoundConfig, RoundWork] | None],
    ) -> None:
        """`free_step` returns the terms of the step from this node's state, unless a round of it is under way."""
        self._member = member
        self._chain = chain
        self._sign = sign
        self._actor = actor
        self._free_step = free_step

    async def leave(self) -> bool:
        """Give this node's seat up before it goes, so that the others need no vote of it.

        Returns whether the seat is given up. Without the certificate, which may take at most LEAVE_SECONDS, the seat
        only counts as absent. Where participants may be strangers, seats are only absent.
        """
        with anyio.move_on_after(LEAVE_SECONDS):
            while self._may_leave:
                terms = self._free_step()
                if terms is not None:
                    step_id = terms[0].step.id
                    evidence = EntryEvidence(departures=(self._sign(Departure(step_id)),))
                    self._actor.tell(terms[0].others, EvidenceSaid(evidence))
                    self._vote(terms, evidence)
                with anyio.move_on_after(ASK_AGAIN_SECONDS):
                    await self._chain.changed.wait()
                if terms is not None and not self._is_seated:
                    await self._hand_over(terms[0].others)
                    return True
        return False

    def asked(self, evidence: EntryEvidence) -> None:
        """Vote on the leave that another seat asks for."""
        terms = self._free_step()
        if terms is None:
            return
        step = terms[0].step
        if any(one.body.step_id == step.id and one.member in step.committee.members for one in evidence.departures):
            self._vote(terms, evidence)

    def _vote(self, terms: tuple[RoundConfig, RoundWork], evidence: EntryEvidence) -> None:
        setting, work = terms
        self._actor.propose_entries(setting, setting.step.number, work, evidence)

    async def _hand_over(self, others: frozenset[NodeId]) -> None:
        """Send the certificate to the seats that remain: they may not have received all votes."""
        chain = self._chain.chain
        if chain is not None and chain.tip is not None:
            self._actor.tell(others, CertificateSaid(chain.tip))
        while not self._actor.mail.is_empty():
            await anyio.sleep(0.02)

    @property
    def _is_seated(self) -> bool:
        chain = self._chain.chain
        return chain is not None and self._member in chain.committee.members

    @property
    def _may_leave(self) -> bool:
        chain = self._chain.chain
        if chain is None or chain.committee.is_open or self._chain.fork is not None:
            return False
        return self._is_seated and len(chain.committee.seats) >= LEAST_SEATS
