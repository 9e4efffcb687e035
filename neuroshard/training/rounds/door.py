"""The rounds of all stages that a node holds, behind one door: calls and parts find their stage."""

from __future__ import annotations

import anyio.lowlevel

from neuroshard.network import RequestRefusedError, Transport
from neuroshard.status.rounds import StageRoundsStatus
from neuroshard.training.rounds.calls import CALL, CALL_LIMITS, read_call
from neuroshard.training.rounds.certificates import (
    CERTIFICATE,
    REQUEST_LIMITS,
    certificate_answer,
    read_certificate_request,
)
from neuroshard.training.rounds.group_rounds import GroupRounds
from neuroshard.training.rounds.mail import PART, PART_LIMITS, PARTS_AT_ONCE, read_part
from neuroshard.training.transfer.fields import StageName
from neuroshard.types import NodeId
from neuroshard.wire import Frame


class RoundDoor:
    """One for a node."""

    def __init__(self) -> None:
        self._groups: dict[StageName, GroupRounds] = {}
        self._earlier: dict[StageName, StageRoundsStatus] = {}

    def add(self, group: GroupRounds) -> None:
        """Let others call this stage to rounds."""
        self._groups[group.stage] = group

    def clear(self) -> None:
        """Refuse everything."""
        self._earlier |= {stage: group.status for stage, group in self._groups.items()}
        self._groups.clear()

    def earlier(self, stage: StageName) -> StageRoundsStatus | None:
        """What there is to tell of a stage's rounds from before `clear`: it may be held here again."""
        return self._earlier.get(stage)

    def serve(self, transport: Transport) -> None:
        """Answer from now on. Raises ValueError when this transport has a door already."""
        transport.serve(CALL, self.answer_call, CALL_LIMITS)
        transport.serve(CERTIFICATE, self.give_certificate, REQUEST_LIMITS)
        transport.serve(PART, self.take_part, PART_LIMITS, max_concurrent=PARTS_AT_ONCE)

    async def answer_call(self, sender: NodeId, frame: Frame) -> Frame:
        """See Gathering.answer. Raises RequestRefusedError."""
        stage, call = read_call(frame)
        return await self._of(stage, sender).gathering.answer(sender, call)

    async def take_part(self, sender: NodeId, frame: Frame) -> Frame:
        """See RoundMail.take. Raises RequestRefusedError."""
        stage, _ = read_part(frame)
        return await self._of(stage, sender).actor.mail.take(sender, frame)

    async def give_certificate(self, sender: NodeId, frame: Frame) -> Frame:
        """The certificate that led to the root that is asked for. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        stage, root = read_certificate_request(frame)
        certificate = self._of(stage, sender).actor.certificate_to(root)
        if certificate is None:
            raise RequestRefusedError("This node knows no certificate that led there.")
        return certificate_answer(certificate)

    def _of(self, stage: StageName, sender: NodeId) -> GroupRounds:
        group = self._groups.get(stage)
        if group is None:
            raise RequestRefusedError("This node does not hold these layers.")
        if not group.knows(sender):
            raise RequestRefusedError("Rounds are for the nodes at work on these layers.")
        return group
