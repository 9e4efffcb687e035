"""The rounds of a stage that may have several replicas, and the request handlers for the rounds of all stages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_bytes

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from torch import Tensor

from neuroshard.aggregation import aggregator_name
from neuroshard.compression import is_sparse
from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.effects import Complete, EncodedContribution, RoundConfig, ViewTiming
from neuroshard.consensus.lone_steps import LOST_STATE, LoneSteps
from neuroshard.consensus.matchmaking import DueStep, Look, Matchmaking, Replica
from neuroshard.consensus.message_queue import PART, PART_LIMITS, PARTS_AT_ONCE, MessagePart
from neuroshard.consensus.round_messages import EvidenceSaid, IntentSaid
from neuroshard.consensus.round_runner import RoundDependencies, RoundRunner
from neuroshard.consensus.round_status import NO_ANSWER, NO_QUORUM, RoundEnd, RoundMonitor, RoundTerms, with_round
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.seat_changes import LOST_LOG, RoundSetting, SeatChanges
from neuroshard.consensus.stage_chain import CHAIN, CHAIN_LIMITS, ChainRequest, StageChain, chain_answer
from neuroshard.consensus.sync_strategies import (
    Abandoned,
    Agreed,
    Outcome,
    UnderWay,
    part_at,
)
from neuroshard.consensus.vote_log import ContributionRecovery, SavedContribution
from neuroshard.messages import Frame
from neuroshard.network import RequestRefusedError, Transport
from neuroshard.optim.outer import duration_code
from neuroshard.state.replica_status import ReplicaStatus, query_statuses
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.rounds import StageRoundsStatus
from neuroshard.types import NodeId
from neuroshard.waiting import Signal, first_of, sleep_to_tick

_LOG = logging.getLogger(__name__)

WAITING_VIEWS = 2.0  # durations of a view for which training waits for a round; then both continue
KEPT_DURATIONS = 20
UNMEASURED_UPLOAD = 1_000_000  # bytes per second
ANSWER_SECONDS = 10.0  # time for a peer that knows how a step has ended to answer


@dataclass
class _Sent:
    """The contribution of this node to a round."""

    step_id: str
    contribution: Tensor
    promised: EncodedContribution
    monitor: RoundMonitor
    is_outgrown: bool  # training has continued since
    is_late: bool = False  # this node no longer waits for the end of the round


class GroupRounds:
    """One stage's rounds: matchmaking, the protocol, and the exchange for the outer step."""

    def __init__(self, replica: Replica, around: RoundDependencies) -> None:
        self.stage = replica.stage
        self.chain = around.chain
        self.must_follow = anyio.Event()  # set once the chain proves a newer state that this node must download
        self.due: DueStep | None = None  # the step to enter, or in progress
        self.in_round = False
        self._replica = replica
        self._swarm = around.swarm
        self._matchmaking = Matchmaking(replica, around.swarm, around.times)
        self._asking = around.asking
        self._earlier = ContributionRecovery(around.book, around.offload)
        self._offload, self._now, self._most_members = around.offload, around.now, around.most_members
        self._sent: _Sent | None = None
        self._called = Signal()
        self._returned = Signal()  # replicas that had not answered lately
        self._behind_since: float | None = None
        self._replaces_lost_state = False  # whether the next step of this node alone may replace a lost state
        self._lost_state = ""  # why no step completes without a lost state, in words for people
        self._absent = ""  # the seats that are missing, in words for people, as of the last look
        self._is_learning = False  # whether replicas are being asked for their chain
        self._adopted_at = 0.0  # when the last value with an aggregate was adopted, by the event loop's clock
        self._exchange_seconds: float | None = None  # of this member's last round
        self._beside: TaskGroup | None = None  # task group for rounds during training, while `run` is active
        self.status = around.reported or StageRoundsStatus(replica.terms.stage, replica.stage.layers)
        self._mailed = (0, 0)  # bytes sent and received, as of the last record
        self._has_loaded = anyio.Event()
        # Seconds of the views in which rounds completed. If failed views counted, every later round would wait longer.
        self._durations = deque[float](maxlen=KEPT_DURATIONS)
        self.actor = RoundRunner(replica, around, self._heard)
        self.seats = SeatChanges(replica.member, around.swarm, around.chain, self.actor)
        self.lone = LoneSteps(replica, around, self.actor, self.seats)

    @property
    def is_called(self) -> bool:
        """Whether this node should enter a round now, or adopt the end of one."""
        return not self.in_round and (self.due is not None or self._end_to_take is not None)

    @property
    def is_alone(self) -> bool:
        """Whether a step of this node alone is allowed."""
        if self.in_round or self.due is not None or not self.seats.may_vote:
            return False
        step = self.lone.pending() if self.lone.is_ahead else self._present_step()
        if self._replaces_lost_state:
            step = step or self.lone.after_lost_state()
        return self._matchmaking.is_alone(step, anyio.current_time())

    def peers(self) -> Sequence[NodeId]:
        """The other nodes that train the stage, as known here."""
        return self._swarm.replicas(self._replica.terms.stage)

    def feed(self, signal: Signal) -> None:
        """Signal there whenever `is_called` may have changed."""
        self._called.feed(signal)
        self.actor.changed.feed(signal)

    async def called(self) -> None:
        """Wait until `is_called`."""
        while not self.is_called:
            await first_of(self._called.wait, self.actor.changed.wait)

    def replica_status(self) -> ReplicaStatus:
        """This replica's status, for other nodes."""
        own, chain = self._replica.outer.own_status(), self.chain.chain
        return replace(
            own,
            is_certified=self.chain.is_newest(own),
            is_ready=self._matchmaking.may_take_part,
            in_round=self.in_round or self.due is not None,
            height=0 if chain is None else chain.standing.height,
            kept=self.actor.kept_before(own.root),
        )

    @property
    def obstacle(self) -> str:
        """The reason why no step can complete now, and the action that helps; "" if there is none."""
        votes = LOST_LOG if self.seats.has_lost_votes else ""
        return self.chain.obstacle or self.lone.obstacle or self._lost_state or self._absent or votes

    def certified_root(self, outer_step: int) -> str:
        """The newest certified root if it is the state after this outer step; otherwise ""."""
        standing = None if self.chain.chain is None else self.chain.chain.standing
        return standing.root or "" if standing is not None and standing.outer_step == outer_step else ""

    async def leave(self) -> bool:
        """Give this node's seat up before it goes. Returns whether it is given up; otherwise it counts as absent."""
        return await self.seats.leave(self._free_step)

    def withdraw(self) -> None:
        """Do not enter the step that is due; the other members continue without this node."""
        if not self.in_round:
            self.due = None

    async def run(self) -> None:
        """Look at the replicas, enter steps and run them until cancelled. Raises StorageError."""
        await self.chain.load()
        ended = await self.actor.load()
        await self.seats.open_log(self._present_step())
        for certificate in ended:
            await self.chain.extend(certificate)
        self.chain.add_earlier(ended)
        await self.lone.finish_locked()
        self._matchmaking.ended(anyio.current_time(), completed=True)
        self._adopted_at = anyio.current_time()
        self._has_loaded.set()
        async with anyio.create_task_group() as tasks:
            self._beside = tasks
            try:
                tasks.start_soon(self.actor.run)
                tasks.start_soon(self._keep_probing)
                if self.lone.is_ahead:  # killed before the certificate
                    tasks.start_soon(self.lone.follow)
                await self._keep_looking()
            finally:
                self._beside = None

    async def _keep_looking(self) -> None:
        while True:
            count = self._returned.count
            await self.look()
            pause = self._matchmaking.pause_seconds(anyio.current_time(), is_soon=self._is_learning or self.in_round)
            # without a replica to query it looks together with the node's other tasks
            sleep = anyio.sleep if self.peers() else sleep_to_tick
            await first_of(partial(sleep, pause), partial(self._returned.wait, count))

    async def _keep_probing(self) -> None:
        """Ask the replicas that have not answered lately, apart from the others: nobody waits for them."""
        while True:
            now = anyio.current_time()
            unproven = self._matchmaking.unproven(self.chain.ledger, now)
            if unproven:
                found = await query_statuses(self._asking, self.stage, unproven)
                if not found.keys() <= set(self._matchmaking.responsive(anyio.current_time())):
                    self._returned.notify()
                self._matchmaking.note_probed(found, anyio.current_time())
            self._matchmaking.has_probed = True
            await sleep_to_tick(self._matchmaking.times.near_seconds)

    async def look(self) -> None:
        """Ask the replicas that answer for their status once, and act on it. During a round nothing is asked."""
        if self.in_round:
            if self.due and not self.due.step.is_quorum({self._replica.member.node_id, *self.peers()}):
                self.actor.give_up(NO_QUORUM)
            return
        peers = self._matchmaking.asked(self.chain.ledger, anyio.current_time())
        others = await query_statuses(self._asking, self.stage, peers) if peers else {}
        now = anyio.current_time()
        others = self._matchmaking.with_probed(peers, others, now)
        look = Look(self.replica_status(), others, self._present_step(), now)
        self._absent = self._matchmaking.obstacle(look.step, now)
        self.status = replace(self.status, voters=self._matchmaking.voters(self.chain.chain, now))
        is_asked = self._matchmaking.unheard or self.actor.failed or not self.seats.may_vote or self._swarm.revoked
        if look.step and (is_asked or self._swarm.changes or look.step.committee.is_open):
            await self.seats.look(look.step, self._matchmaking, now)
        ahead = self._matchmaking.ahead(self.chain.ledger, look)
        if ahead and not self._is_learning and self._beside is not None:
            self._beside.start_soon(self._learn, ahead)  # a node that does not answer delays no look
        if await self._is_behind(look):
            return
        due = self._matchmaking.looked(look)
        if due is not None:
            self._enter_soon(due)

    def _heard(self, message: IntentSaid | EvidenceSaid) -> None:
        """Another member has entered a step: enter it, too, if it is this node's and the member has a seat."""
        if isinstance(message, EvidenceSaid):
            if (terms := self._free_step()) is not None:
                self.seats.asked(message.evidence, terms)
            return
        signed, step = message.signed, self._present_step()
        if step is None or signed.body.step_id != step.id or self.in_round:
            return
        due = self._matchmaking.heard_intent(signed.member.node_id, step, anyio.current_time())
        if due is not None:
            self._enter_soon(due)

    def _free_step(self) -> RoundSetting | None:
        """The terms of the step from this replica's state, unless this node is in it or about to enter it."""
        step = None if self.in_round or self.due is not None else self._present_step()
        here = frozenset(self._matchmaking.responsive(anyio.current_time()))
        return None if step is None else self._setting(step, here)

    def _enter_soon(self, due: DueStep) -> None:
        if not self.in_round and self.due is None:
            self.due = due
            self._called.notify()

    def _present_step(self) -> Step | None:
        """The step from this replica's state, if that is the newest certified one."""
        own = self._replica.outer.own_status()
        return self.chain.step(self._replica.terms, own) if self.chain.is_newest(own) else None

    async def _learn(self, peers: list[NodeId]) -> None:
        self._is_learning = True
        try:
            await self.chain.learn_from(self._asking, self.stage, peers)
        finally:
            self._is_learning = False

    async def _is_behind(self, look: Look) -> bool:
        """Whether the chain proves a newer state than this replica's; then catch up, or ask for a download.

        Nobody waits for a state that no replica here has: without a say of others, the next step replaces it.
        """
        own, chain, now = self._replica.outer.own_status(), self.chain.chain, anyio.current_time()
        is_settled = self.chain.fork is not None or self.chain.is_newest(own) or self.lone.is_ahead
        if chain is None or not own.root or is_settled or self.in_round:
            self._behind_since, self._lost_state, self._replaces_lost_state = None, "", False
            return False
        if chain.has_aggregate(own.root) and await self.catch_up():
            self._behind_since = None
            return True
        chain = self.chain.chain or chain  # it may have been learned meanwhile
        self._behind_since = now if self._behind_since is None else self._behind_since
        if now - self._behind_since < self._matchmaking.times.behind_seconds and chain.has_aggregate(own.root):
            return True
        if not self._matchmaking.has_newer(chain, look, self._asking.failed.doubted(now)):
            self._lost_state = LOST_STATE if self.lone.after_lost_state() is None else ""
            has_waited = now - self._behind_since >= self._matchmaking.times.absent_seconds
            self._replaces_lost_state = has_waited and self._lost_state == ""
            return not self._replaces_lost_state
        self._lost_state = ""
        if not self.must_follow.is_set():
            first, last = self.stage.layers.start + 1, self.stage.layers.stop
            _LOG.info("The chain of layers %d-%d is ahead: downloading its state.", first, last)
            self.must_follow.set()
        return True

    async def catch_up(self) -> bool:
        """Ask how the step from this replica's state has ended. Returns True if the end is known and can be adopted.

        A replica that missed steps adopts their aggregates in this way, one after the other.
        """
        await self._has_loaded.wait()
        own = self._replica.outer.own_status()
        if self._end_to_take is not None or await self.actor.recall_from(own.root):
            return self._end_to_take is not None
        step = self.chain.step(self._replica.terms, own)
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
        is_own = ended is not None and ended.certificate.value.root == self._replica.outer.own_status().root
        return ended if is_own else None

    def knows(self, node: NodeId) -> bool:
        """Whether a node may have a role in this stage's rounds; the queue keeps no message of other nodes."""
        ledger = self.chain.ledger
        seats = () if ledger is None else ledger.committee.seats
        return node in self.peers() or any(node == seat.node_id for seat in seats)

    async def exchange(self, contribution: Tensor, outer_step: int) -> Outcome:
        """Run the round of one outer step; implements RunRound."""
        due, ended = self.due, self._end_to_take
        if ended is not None:
            self._leave(completed=True)
            return await self._agreed(ended)
        if due is None:
            return await self.lone.exchange(contribution, outer_step, self._beside)
        present = self._present_step()
        if due.step.number != outer_step or present is None or present.id != due.step.id:
            self.withdraw()
            return Abandoned("the stage's chain has moved on", is_soon_again=True)
        self.in_round = True
        sequences = self._replica.outer.own_status().sequences
        if self._replica.terms.parameters_at(outer_step).overlap and self._beside is not None:
            self._beside.start_soon(self._go_on_beside, contribution, due, sequences)
            return UnderWay()
        completed = False
        try:
            outcome = await self._with_group(contribution, due, sequences, is_beside=False)
            if isinstance(outcome, Abandoned):
                return outcome
            agreed = await self._agreed(outcome)
            completed = True
            return agreed
        finally:
            self._leave(completed=completed)

    async def _go_on_beside(self, contribution: Tensor, due: DueStep, sequences: int) -> None:
        """Run the round while training continues. `exchange` adopts its end between two microbatches."""
        completed = False
        try:
            outcome = await self._with_group(contribution, due, sequences, is_beside=True)
            completed = isinstance(outcome, Complete)
        finally:
            self._leave(completed=completed)
        if isinstance(outcome, Abandoned):
            self._replica.outer.note_abandoned(outcome)
        self.actor.changed.notify()

    def _leave(self, *, completed: bool) -> None:
        if self._sent is not None and not completed:
            self._sent.is_outgrown = self._sent.is_late = True
        answered = [] if self.due is None else [member.node_id for member in self.due.members]
        self.in_round, self.due = False, None
        self._matchmaking.note_answers(answered, anyio.current_time())
        self._matchmaking.ended(anyio.current_time(), completed=completed)

    async def _with_group(
        self, contribution: Tensor, due: DueStep, sequences: int, *, is_beside: bool
    ) -> Complete | Abandoned:
        """Run the step that is due. `sequences` is the number of sequences in the contribution."""
        await self._has_loaded.wait()  # no vote without knowing this node's earlier votes
        step, expected = due.step, frozenset(member.node_id for member in due.members)
        if not self.seats.may_vote:  # an intent can bring this node in before its first look
            await self.seats.open_log(step)
        terms, work = self._setting(step, expected)
        setting = replace(terms, invited=due.invited, newcomer_seconds=due.newcomer_seconds)
        monitor, before = self._monitor(due, work), self._sent
        if before is not None and before.step_id == step.id and self.actor.has_voted_in(step.id):
            # a voted value may contain the earlier contribution: work since then waits for the next round
            before.monitor = monitor
        else:
            self._sent = before = await self._sending(
                step.id, contribution, sequences, work=work, monitor=monitor, is_beside=is_beside
            )
        if self._end_to_take is None and self.actor.has_ended(step.id) and not await self.actor.recall(step.id):
            return self._abandoned(monitor, "its aggregate, which was kept here, is damaged")
        if (ended := self._end_to_take) is not None:
            return ended
        locked = self.actor.locked_in(step.root, step.height)
        if locked is not None and locked.step_id != step.id:
            return self._abandoned(monitor, "this node has voted to end another step from the same state")
        self.actor.enter(setting, step.number, work, before.promised, monitor)
        outcome: Complete | str | None = None
        with anyio.move_on_after(WAITING_VIEWS * setting.timing.view_seconds):
            outcome = await self.actor.outcome()
        if isinstance(outcome, Complete):
            self._durations.append(anyio.current_time() - monitor.view_began)
            return outcome
        return self._abandoned(monitor, outcome)

    async def _sending(
        self,
        step_id: str,
        contribution: Tensor,
        sequences: int,
        *,
        work: RoundWork,
        monitor: RoundMonitor,
        is_beside: bool,
    ) -> _Sent:
        """The contribution to a step. After a restart it is the one sent before the restart."""
        upload = self.actor.mail.upload or UNMEASURED_UPLOAD
        is_known = self._sent is not None and self._sent.step_id == step_id
        earlier = None if is_known else await self._earlier.sent(step_id, work)
        if earlier is None:
            parts = await self._offload(partial(work.encoded, contribution))
        else:
            contribution, parts, sequences = earlier.contribution, earlier.offer.parts, earlier.offer.sequences
        now = anyio.current_time()
        pace = self._matchmaking.work(now).seconds_per_sequence
        promised = EncodedContribution(
            parts,
            sequences,
            upload,
            seconds=int(now - self._adopted_at),
            made_at=int(1000 * self._now()),
            exchange=None if self._exchange_seconds is None else duration_code(self._exchange_seconds),
            sequence=duration_code(pace) if pace > 0 else None,
        )
        await self._offload(lambda: promised.digests)
        if is_beside and earlier is None:
            await self._earlier.keep(SavedContribution(step_id, sequences, parts))
        return _Sent(step_id, contribution, promised, monitor, is_outgrown=is_beside or earlier is not None)

    def _abandoned(self, monitor: RoundMonitor, reason: str | None) -> Abandoned:
        self.status = with_round(self.status, monitor.abandoned(reason, self._end()))
        return Abandoned(NO_ANSWER if reason is None else reason, is_soon_again=True)

    def _monitor(self, due: DueStep, work: RoundWork) -> RoundMonitor:
        aggregator, seats = aggregator_name(work.aggregator), len(due.step.committee.seats)
        rounds, number = self._replica.terms, due.step.number
        parameters = rounds.parameters_at(number)
        scheme = parameters.strategy, part_at(parameters, rounds.schema, number), parameters.codec, aggregator
        return RoundMonitor(RoundTerms(number, due.members, seats, *scheme), anyio.current_time(), self._earlier)

    def _end(self, *, is_late: bool = False) -> RoundEnd:
        mail, (sent, received) = self.actor.mail, self._mailed
        self._mailed = mail.sent_bytes, mail.received_bytes
        moved = mail.sent_bytes - sent, mail.received_bytes - received
        return RoundEnd(self._now(), anyio.current_time(), *moved, is_late)

    def _setting(self, step: Step, expected: frozenset[NodeId]) -> RoundSetting:
        work = self._work(step.number)
        timing = ViewTiming.after(self._durations, work.encoded_bytes)
        fits = partial(work.is_slice, work.codec), partial(work.is_slice, work.results)
        setting = RoundConfig(
            *(step, work.plan, self._replica.member, expected, self._swarm.sign, *fits, timing),
            self._replica.outer.measured_candidates(),
            self._most_members,
            self.seats.may_vote,
            revoked=self._swarm.revoked,
            secret=token_bytes(32),
            excerpts=None if is_sparse(work.codec) else work.excerpts,
        )
        return setting, work

    async def _agreed(self, complete: Complete) -> Agreed:
        """The meaning of the end of this replica's step, including a contribution from before a restart."""
        value, number = complete.certificate.value, self._replica.outer.own_status().outer_step
        sent = None if self._sent is None or self._sent.step_id != value.step_id else self._sent
        work, own = self._work(number), self._replica.member.node_id
        aggregate, count = complete.vector, len(value.members)
        if aggregate is None:
            aggregate = await self._offload(partial(work.decoded, complete.aggregate))
        decoded, is_accepted = None, own in value.accepted
        is_judged = is_accepted or any(own == node for node, _ in value.refused)
        if sent is not None and is_accepted:
            decoded, parts = sent.contribution, sent.promised.parts
            if work.codec.name != "fp32":
                decoded = await self._offload(partial(work.decoded, parts, work.codec))
        earlier = await self._earlier.judged(value, sent and sent.promised, work) if is_judged else None
        # Only now, after the last await: if the task is cancelled earlier, the next call finds the same end again.
        self._adopted_at = anyio.current_time()
        self.actor.ended = self._sent = None
        self._earlier.offered.clear()
        if sent is not None:
            record = sent.monitor.completed(complete.certificate, self._end(is_late=sent.is_late))
            self.status = with_round(self.status, record)
            self._exchange_seconds = record.phases.exchange
        agreed = Agreed(aggregate, count, work=value.work, is_certified=True)
        if earlier is not None:
            vector, offered = earlier.contribution, earlier.offer.sequences
            return replace(agreed, sent=vector if is_accepted else None, late_for=vector, offered=offered)
        if sent is None or not is_judged:  # the work of a member without a verdict stays in its next contribution
            return replace(agreed, is_without_own=not is_judged)
        late_for = sent.contribution if sent.is_outgrown else None
        return replace(agreed, sent=decoded, late_for=late_for, offered=sent.promised.sequences)

    def _work(self, outer_step: int) -> RoundWork:
        rounds, length = self._replica.terms, self._replica.terms.exchanged_at(outer_step).length
        return RoundWork.of(rounds.parameters_at(outer_step), length, outer_step=outer_step)


class RoundRequestHandlers:
    """The request handlers for the rounds of all stages of one node."""

    def __init__(self) -> None:
        self.groups: dict[StageName, GroupRounds] = {}
        self._copied: dict[StageName, StageChain] = {}  # next to copies of stages that are trained elsewhere
        self._earlier: dict[StageName, StageRoundsStatus] = {}

    def add(self, group: GroupRounds) -> None:
        """Accept messages of this stage's rounds."""
        self.groups[group.stage] = group

    def add_copied(self, stage: StageName, chain: StageChain) -> None:
        """Answer for the chain of a stage of which this node keeps a copy, while it does not hold the stage."""
        self._copied[stage] = chain

    def clear(self) -> None:
        """Refuse all requests about rounds."""
        self._earlier |= {stage: group.status for stage, group in self.groups.items()}
        self.groups.clear()

    def earlier(self, stage: StageName) -> StageRoundsStatus | None:
        """The status of a stage's rounds from before `clear`, for when the stage is hosted here again."""
        return self._earlier.get(stage)

    def last_chain(self, stage: StageName) -> Chain | None:
        """The chain of a stage held here; while its foundations contradict each other, the one before them."""
        group = self.groups.get(stage)
        return None if group is None else group.chain.last

    def serve(self, transport: Transport) -> None:
        """Register the handlers. Raises ValueError if this transport already has them."""
        transport.serve(CHAIN, self.give_chain, CHAIN_LIMITS)
        transport.serve(PART, self.take_part, PART_LIMITS, max_concurrent=PARTS_AT_ONCE)

    async def take_part(self, sender: NodeId, frame: Frame) -> Frame:
        """Accept a part of a message. Raises RequestRefusedError."""
        group = self._held(frame.read(MessagePart).stage)
        if not group.knows(sender):
            raise RequestRefusedError("Only nodes that train these layers take part in their rounds.")
        return await group.actor.mail.take(sender, frame)

    async def give_chain(self, _sender: NodeId, frame: Frame) -> Frame:
        """Return what proves the newest certified state of a stage. Raises RequestRefusedError.

        Any member of the run may ask: a newcomer checks the state with it before it downloads the state.
        """
        await anyio.lowlevel.checkpoint()
        request = frame.read(ChainRequest)
        copied = None if request.stage in self.groups else self._copied.get(request.stage)
        chain = (copied or self._held(request.stage).chain).chain
        if chain is None or chain.statement != request.statement:
            raise RequestRefusedError("This node knows another foundation of the run.")
        return chain_answer(chain.proof(request.height))

    def _held(self, stage: StageName) -> GroupRounds:
        group = self.groups.get(stage)
        if group is None:
            raise RequestRefusedError("This node does not hold these layers.")
        return group
