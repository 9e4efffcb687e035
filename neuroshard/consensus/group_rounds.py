"""The rounds of a stage that may have several replicas, and the request handlers for the rounds of all stages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from torch import Tensor

from neuroshard.aggregation import aggregator_name
from neuroshard.compression import MalformedVectorError, make_codec
from neuroshard.consensus.effects import Check, Checked, Complete, EncodedContribution, RoundConfig, Sign, ViewTiming
from neuroshard.consensus.matchmaking import Agreement, Matchmaker, Replica
from neuroshard.consensus.message_queue import PART, PART_LIMITS, PARTS_AT_ONCE, MessagePart, RoundMessageQueue
from neuroshard.consensus.roster import Roster, Step
from neuroshard.consensus.round_messages import Quorum, most_message_bytes
from neuroshard.consensus.round_requests import (
    CALL,
    CALL_LIMITS,
    CERTIFICATE,
    REQUEST_LIMITS,
    Call,
    CertificateRequest,
    RoundTimes,
    certificate_answer,
    certificate_of,
)
from neuroshard.consensus.round_runner import RoundDependencies, RoundRunner
from neuroshard.consensus.round_status import NO_ANSWER, RoundEnd, RoundMonitor, RoundTerms, with_round
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.stage_rounds import Abandoned, Agreed, Outcome, RunRound, UnderWay
from neuroshard.consensus.vote_log import ContributionRecovery, SavedContribution, VoteLog
from neuroshard.messages import Frame
from neuroshard.network import RequestRefusedError, Transport
from neuroshard.network.blocking import BlockingRunner
from neuroshard.optim.outer import CertifiedWork, duration_code
from neuroshard.state.download import ReplicaClient
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.rounds import StageRoundsStatus
from neuroshard.types import NodeId
from neuroshard.waiting import Signal, first_of

_LOG = logging.getLogger(__name__)

LEAST_VIEW_SECONDS = 20.0
SLOWEST_BYTES_PER_SECOND = 250_000
DEVIATIONS = 4.0  # median absolute deviations above the median, see `_timing`
# training waits this number of view durations for a round; then it continues, and so does the round
WAITING_VIEWS = 2.0
KEPT_DURATIONS = 20
UNMEASURED_UPLOAD = 1_000_000  # bytes per second
ANSWER_SECONDS = 10.0  # time for a peer that knows how a step has ended to answer


@dataclass(frozen=True)
class AcceptanceCheck:
    """Decides whether this node votes for an aggregate."""

    # the root after an aggregate (k,) of this work at an outer step; "" for another step
    root_after: Callable[[Tensor, int, CertifiedWork], Awaitable[str]]
    # the reason not to vote for an aggregate that leads to this root; "" for none
    objection: Callable[[Tensor, str], Awaitable[str]] | None = None


@dataclass
class _Sent:
    """The contribution of this node to a round."""

    step_id: str
    contribution: Tensor
    promised: EncodedContribution
    watch: RoundMonitor
    is_outgrown: bool  # training has continued since
    is_late: bool = False  # this node no longer waits for the end of the round


class GroupRounds:
    """One stage's rounds: matchmaking, the protocol, and the exchange for the outer step."""

    def __init__(
        self,
        replica: Replica,
        asking: ReplicaClient,
        alone: RunRound,
        sign: Sign,
        judging: AcceptanceCheck,
        *,
        book: VoteLog,
        times: RoundTimes | None = None,
        told: StageRoundsStatus | None = None,
        offload: BlockingRunner = anyio.to_thread.run_sync,
    ) -> None:
        """`told` is the status before a restart."""
        self.stage = replica.stage
        self._replica = replica
        self._voters: dict[str, Roster] = {}  # by the root of the state that they vote on
        self._before: dict[str, str] = {}  # maps the root after a certificate to the root before it
        self.gathering = Matchmaker(replica, asking, self._voters.get, times)
        self._alone = alone
        self._asking = asking
        self._sign = sign
        self.judging = judging
        self._earlier_life = ContributionRecovery(book, offload)
        self._offload = offload
        self._sent: _Sent | None = None
        self._exchange_seconds: float | None = None  # of this member's last round
        # called with rounds that were abandoned while training continued
        self.abandoned: Callable[[Abandoned], None] = lambda _why: None
        self._beside: TaskGroup | None = None  # task group for rounds during training, while `run` is active
        self._certified = (-1, "")  # outer step and root that the newest certificate led to
        self.status = told or StageRoundsStatus(replica.rounds.stage, replica.stage.layers)
        self._mailed = (0, 0)  # bytes sent and received, as of the last record
        self._has_loaded = anyio.Event()
        # Durations in seconds of the views in which rounds completed. Views before them failed because a member was
        # missing. If they counted, every later round would wait longer for missing members.
        self._durations = deque[float](maxlen=KEPT_DURATIONS)
        most_bytes = most_message_bytes(make_codec("fp32").encoded_size(replica.rounds.schema.total_size))
        self.actor = RoundRunner(
            lambda received: RoundMessageQueue(replica.stage, asking.requester, most_bytes, received),
            RoundDependencies(book, self._check, asking.report, offload, replica.rounds.kept_steps),
        )
        self.gathering.locked_step = self.actor.locked_step
        self.gathering.step_of, self.gathering.catch_up = self._step_of, self.catch_up
        self.gathering.past = self._past

    @property
    def is_called(self) -> bool:
        """Whether this node should enter a round now, or adopt the end of one."""
        return self.gathering.is_called or (self._end_to_take is not None and not self.gathering.in_round)

    def feed(self, signal: Signal) -> None:
        """Signal there whenever `is_called` may have changed."""
        self.gathering.feed(signal)
        self.actor.changed.feed(signal)

    async def called(self) -> None:
        """Wait until `is_called`."""
        while not self.is_called:
            await first_of(self.gathering.called, self.actor.changed.wait)

    async def run(self) -> None:
        """Match replicas, call rounds and run them until cancelled. Raises StorageError."""
        for certificate in await self.actor.load():
            self._note(certificate)
        self._has_loaded.set()
        async with anyio.create_task_group() as tasks:
            self._beside = tasks
            try:
                tasks.start_soon(self.actor.run)
                await self.gathering.run()
            finally:
                self._beside = None

    async def exchange(self, contribution: Tensor, outer_step: int) -> Outcome:
        """Run the round of one outer step; implements RunRound."""
        agreement, ended = self.gathering.agreement, self._end_to_take
        if ended is not None:
            self.gathering.ended(completed=True)
            return await self._agreed(ended)
        if agreement is None:
            return await self._alone(contribution, outer_step)
        if agreement.outer_step != outer_step:
            self.withdraw()
            return Abandoned("it was called for another outer step", is_soon_again=True)
        self.gathering.in_round = True
        sequences = self._replica.replica_status().sequences
        if self._replica.rounds.parameters_at(outer_step).overlap and self._beside is not None:
            self._beside.start_soon(self._go_on_beside, contribution, agreement, sequences)
            return UnderWay()
        completed = False
        try:
            outcome = await self._with_group(contribution, agreement, sequences, is_beside=False)
            if isinstance(outcome, Abandoned):
                return outcome
            agreed = await self._agreed(outcome)
            completed = True
            return agreed
        finally:
            self._leave(completed=completed)

    async def _go_on_beside(self, contribution: Tensor, agreement: Agreement, sequences: int) -> None:
        """Run the round while training continues. `exchange` adopts its end between two microbatches."""
        completed = False
        try:
            outcome = await self._with_group(contribution, agreement, sequences, is_beside=True)
            completed = isinstance(outcome, Complete)
        finally:
            self._leave(completed=completed)
        if isinstance(outcome, Abandoned):
            self.abandoned(outcome)
        self.actor.wake()

    def _leave(self, *, completed: bool) -> None:
        if self._sent is not None and not completed:
            self._sent.is_outgrown = self._sent.is_late = True
        self.gathering.ended(completed=completed)

    async def catch_up(self) -> bool:
        """Ask how the step from this replica's state has ended. Returns True if the end is known and can be adopted.

        A replica that missed rounds adopts their aggregates in this way, one after the other. It asks
        about a step whose voters it knows: by the certificate before, which other replicas have too, or because it
        voted.
        """
        await self._has_loaded.wait()
        own = self._replica.replica_status()
        if self._end_to_take is not None or await self.actor.recall_from(own.root):
            return self._end_to_take is not None
        step = self._step_of(own)
        # it downloaded its state, so it has no certificate
        if step is None and own.root and own.root not in self._voters:
            certificate = await certificate_of(self._asking, self.stage, own.root, self._replica.peers())
            if certificate is not None:
                self._note(certificate)
                step = self._step_of(own)
        if step is None:
            return False
        setting, work = self._setting(step, frozenset())
        self.actor.ask(setting, own.outer_step, work)
        await self.actor.end(ANSWER_SECONDS, setting.timing.view_seconds)
        return self._end_to_take is not None

    @property
    def _end_to_take(self) -> Complete | None:
        """The end of the step from this replica's state, if it has not been adopted."""
        ended = self.actor.ended
        is_own = ended is not None and ended.certificate.value.root == self._replica.replica_status().root
        return ended if is_own else None

    def _step_of(self, own: ReplicaStatus) -> Step | None:
        """The step that certified voters decide on from this state, or the one in which this node is locked."""
        lock, voters = self.actor.lock(own.root), self._voters.get(own.root)
        rosters = [] if voters is None else [voters]
        if lock is not None:
            rosters.append(Roster(lock.value.members, is_founding=True))  # all members that found a line contribute
        rounds, is_open = self._replica.rounds, self._replica.is_open
        steps = [rounds.step(own.outer_step, own.root, roster, is_open=is_open) for roster in rosters]
        return next((step for step in steps if lock is None or step.id == lock.value.step_id), None)

    def knows(self, node: NodeId) -> bool:
        """Whether a node may have a role in this stage's rounds; the queue keeps no message of other nodes."""
        agreement = self.gathering.agreement
        return node in self._replica.peers() or (
            agreement is not None and any(node == member.node_id for member in agreement.members)
        )

    def certified_root(self, outer_step: int) -> str:
        """The root in the newest certificate if it led to this outer step; otherwise ""."""
        led_to, root = self._certified
        return root if led_to == outer_step else ""

    def withdraw(self) -> None:
        """Leave the agreed round before it begins; the other members continue without this node."""
        if self.gathering.is_called:
            self.gathering.withdraw()

    async def _with_group(
        self, contribution: Tensor, agreement: Agreement, sequences: int, *, is_beside: bool
    ) -> Complete | Abandoned:
        """Run the agreed round. `sequences` is the number of sequences in the contribution."""
        await self._has_loaded.wait()  # no vote without knowing this node's earlier votes
        setting, work = self._round(agreement)
        step = setting.step
        watch, before = self._watch(agreement, setting, work), self._sent
        if before is not None and before.step_id == step.id and self.actor.has_voted_in(step.id):
            # a voted value may contain the earlier contribution: work since then waits for the next round
            before.watch = watch
        else:
            self._sent = before = await self._sending(
                step.id, contribution, sequences, work=work, watch=watch, is_beside=is_beside
            )
        if self._end_to_take is None and self.actor.has_ended(step.id) and not await self.actor.recall(step.id):
            return self._abandoned(watch, "its aggregate, which was kept here, is damaged")
        if (ended := self._end_to_take) is not None:
            return ended
        if self.actor.locked_step(step.root) not in (None, step.id) and not self.gathering.is_cut_off:
            return self._abandoned(watch, "this node has voted to end another step from the same state")
        self.actor.enter(setting, agreement.outer_step, work, before.promised)
        outcome: Complete | str | None = None
        with anyio.move_on_after(WAITING_VIEWS * setting.timing.view_seconds):
            outcome = await self.actor.outcome()
        if isinstance(outcome, Complete):
            self._durations.append(anyio.current_time() - watch.view_began)
            return outcome
        return self._abandoned(watch, outcome)

    async def _sending(
        self,
        step_id: str,
        contribution: Tensor,
        sequences: int,
        *,
        work: RoundWork,
        watch: RoundMonitor,
        is_beside: bool,
    ) -> _Sent:
        """The contribution to a step. After a restart it is the one sent before the restart."""
        upload = self.actor.mail.upload or UNMEASURED_UPLOAD
        is_known = self._sent is not None and self._sent.step_id == step_id
        earlier = None if is_known else await self._earlier_life.sent(step_id, work)
        if earlier is None:
            parts = await self._offload(lambda: work.encoded(contribution))
        else:
            contribution, parts, sequences = earlier.contribution, earlier.offer.parts, earlier.offer.sequences
        seconds = self.gathering.sequence_seconds
        promised = EncodedContribution(
            parts,
            sequences,
            upload,
            made_at=int(1000 * self._replica.now()),
            exchange=None if self._exchange_seconds is None else duration_code(self._exchange_seconds),
            sequence=duration_code(seconds) if seconds > 0 else None,
        )
        await self._offload(lambda: promised.digests)
        if is_beside and earlier is None:
            await self._earlier_life.keep(SavedContribution(step_id, sequences, parts))
        return _Sent(step_id, contribution, promised, watch, is_outgrown=is_beside or earlier is not None)

    def _abandoned(self, watch: RoundMonitor, reason: str | None) -> Abandoned:
        self.status = with_round(self.status, watch.abandoned(reason, self._end()))
        return Abandoned(NO_ANSWER if reason is None else reason, is_soon_again=True)

    def _watch(self, agreement: Agreement, setting: RoundConfig, work: RoundWork) -> RoundMonitor:
        aggregator, voters = aggregator_name(work.aggregator), len(setting.step.roster.members)
        rounds, number = self._replica.rounds, agreement.outer_step
        parameters, part = rounds.parameters_at(number), rounds.part_at(number)
        scheme = parameters.strategy, part, parameters.codec, aggregator
        watch = RoundMonitor(RoundTerms(number, agreement.members, voters, *scheme), anyio.current_time())
        self.actor.watch = lambda progress: watch.look(progress, anyio.current_time())
        return watch

    def _end(self, *, is_late: bool = False) -> RoundEnd:
        mail, (sent, received) = self.actor.mail, self._mailed
        self._mailed = mail.sent_bytes, mail.received_bytes
        sent, received = mail.sent_bytes - sent, mail.received_bytes - received
        return RoundEnd(self._replica.now(), anyio.current_time(), sent, received, is_late)

    def _round(self, agreement: Agreement) -> tuple[RoundConfig, RoundWork]:
        rounds, is_open = self._replica.rounds, self._replica.is_open
        step = rounds.step(agreement.outer_step, agreement.root, agreement.voters, is_open=is_open)
        return self._setting(step, frozenset(member.node_id for member in agreement.members))

    def _setting(self, step: Step, expected: frozenset[NodeId]) -> tuple[RoundConfig, RoundWork]:
        work = self._work(step.number, step.tolerated)
        timing = self._timing(work)
        own, most = self._replica.member, self._replica.most_members
        return RoundConfig(step, work.plan, own, expected, self._sign, work.is_part, work.is_result, timing, most), work

    def _timing(self, work: RoundWork) -> ViewTiming:
        """Deadlines from the durations of earlier rounds: median + k MAD; before the first round from the size."""
        if self._durations:
            middle = median(self._durations)
            usual = middle + DEVIATIONS * median(abs(one - middle) for one in self._durations)
        else:
            usual = 4 * work.encoded_bytes / SLOWEST_BYTES_PER_SECOND
        view = max(LEAST_VIEW_SECONDS, 3 * usual)
        return ViewTiming(gather_seconds=view / 4, redo_seconds=view / 2, view_seconds=view)

    async def _check(self, job: Check, work: RoundWork) -> Checked:
        try:
            aggregate = await self._offload(lambda: work.decoded(job.aggregate))
        except MalformedVectorError as error:
            return Checked("", str(error))
        root = await self.judging.root_after(aggregate, work.outer_step, job.work)
        if not root:
            return Checked("", "This node has continued to another step.")
        objection = "" if self.judging.objection is None else await self.judging.objection(aggregate, root)
        return Checked(root, objection)

    async def _agreed(self, complete: Complete) -> Agreed:
        """The meaning of the end of this replica's step, including a contribution from before a restart."""
        value, sent, number = complete.certificate.value, self._sent, self._replica.replica_status().outer_step
        if sent is not None and sent.step_id != value.step_id:
            sent = None
        work, own = self._work(number), self._replica.node_id
        aggregate, count = await self._offload(lambda: work.decoded(complete.aggregate)), len(value.members)
        is_judged = own in value.accepted or any(own == node for node, _ in value.refused)
        decoded = None
        if sent is not None and own in value.accepted:
            decoded, parts = sent.contribution, sent.promised.parts
            if work.codec.name != "fp32":
                decoded = await self._offload(lambda: work.decoded_parts(parts))
        is_of_earlier_life = sent is None and own in value.accepted
        earlier = await self._earlier_life.sent(value.step_id, work) if is_of_earlier_life else None
        # Only now, after the last await: if the task is cancelled earlier, the next call finds the same end again.
        self._note(complete.certificate)
        self._certified = number + 1, value.next_root
        self.actor.ended = self._sent = None
        if sent is not None:
            record = sent.watch.completed(complete.certificate, self._end(is_late=sent.is_late))
            self.status = with_round(self.status, record)
            self._exchange_seconds = record.phases.exchange
        if earlier is not None:
            vector, offered = earlier.contribution, earlier.offer.sequences
            return Agreed(aggregate, count, vector, vector, work=value.work, offered=offered)
        if sent is None or not is_judged:  # the work of a member without a verdict stays in its next contribution
            return Agreed(aggregate, count, is_without_own=not is_judged, work=value.work)
        late_for = sent.contribution if sent.is_outgrown else None
        offered = sent.promised.sequences
        return Agreed(aggregate, count, decoded, late_for, work=value.work, offered=offered)

    def _work(self, outer_step: int, tolerated: int = 0) -> RoundWork:
        rounds = self._replica.rounds
        length, parameters = rounds.exchanged_at(outer_step).length, rounds.parameters_at(outer_step)
        return RoundWork.of(parameters, length, tolerated=tolerated, outer_step=outer_step)

    def _note(self, certificate: Quorum) -> None:
        """Store a certificate: its members are the voters for the step from its state."""
        value = certificate.value
        self._voters[value.next_root], self._before[value.next_root] = value.next_roster(), value.root
        kept = self._replica.rounds.kept_steps(self._replica.replica_status().outer_step)
        for old in list(self._voters)[:-kept]:
            del self._voters[old], self._before[old]

    def _past(self, root: str) -> list[str]:
        past = list[str]()
        while (before := self._before.get(root)) is not None and before not in past:
            past.append(root := before)
        return past


class RoundRequestHandlers:
    """The request handlers for the rounds of all stages of one node."""

    def __init__(self) -> None:
        self._groups: dict[StageName, GroupRounds] = {}
        self._earlier: dict[StageName, StageRoundsStatus] = {}

    def add(self, group: GroupRounds) -> None:
        """Accept calls to rounds of this stage."""
        self._groups[group.stage] = group

    def clear(self) -> None:
        """Refuse all requests."""
        self._earlier |= {stage: group.status for stage, group in self._groups.items()}
        self._groups.clear()

    def earlier(self, stage: StageName) -> StageRoundsStatus | None:
        """The status of a stage's rounds from before `clear`, for when the stage is hosted here again."""
        return self._earlier.get(stage)

    def serve(self, transport: Transport) -> None:
        """Register the handlers. Raises ValueError if this transport already has them."""
        transport.serve(CALL, self.answer_call, CALL_LIMITS)
        transport.serve(CERTIFICATE, self.give_certificate, REQUEST_LIMITS)
        transport.serve(PART, self.take_part, PART_LIMITS, max_concurrent=PARTS_AT_ONCE)

    async def answer_call(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer a call. Raises RequestRefusedError."""
        call = frame.read(Call)
        return await self._of(call.stage, sender).gathering.answer(sender, call)

    async def take_part(self, sender: NodeId, frame: Frame) -> Frame:
        """Accept a part of a message. Raises RequestRefusedError."""
        return await self._of(frame.read(MessagePart).stage, sender).actor.mail.take(sender, frame)

    async def give_certificate(self, sender: NodeId, frame: Frame) -> Frame:
        """Return the certificate that led to the requested root. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        request = frame.read(CertificateRequest)
        certificate = self._of(request.stage, sender).actor.certificate_to(request.root)
        if certificate is None:
            raise RequestRefusedError("This node has no certificate for this state.")
        return certificate_answer(certificate)

    def _of(self, stage: StageName, sender: NodeId) -> GroupRounds:
        group = self._groups.get(stage)
        if group is None:
            raise RequestRefusedError("This node does not hold these layers.")
        if not group.knows(sender):
            raise RequestRefusedError("Only nodes that train these layers take part in their rounds.")
        return group
