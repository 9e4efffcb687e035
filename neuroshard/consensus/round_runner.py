"""Runs the certified rounds of a stage: performs the effects of the state machine in their order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from torch import Tensor

from neuroshard.compression import MalformedVectorError, make_codec
from neuroshard.consensus.chain import LogStart
from neuroshard.consensus.effects import (
    Accuse,
    Check,
    Checked,
    Choose,
    Chosen,
    Complete,
    Computation,
    Effect,
    EncodedContribution,
    FailedReducers,
    GiveUp,
    Job,
    JobResult,
    Persist,
    RoundConfig,
    Say,
    VoteRecord,
)
from neuroshard.consensus.matchmaking import Replica, RoundTimes, RunSwarm
from neuroshard.consensus.message_queue import RoundMessageQueue
from neuroshard.consensus.round_machine import RoundStateMachine
from neuroshard.consensus.round_messages import (
    MAX_CALLED,
    MAX_MEMBERS,
    AggregateWanted,
    AuthoredMessage,
    CertificateSaid,
    ChoicesSaid,
    EntryEvidence,
    EvidenceSaid,
    IntentSaid,
    MalformedMessageError,
    Message,
    NewViewSaid,
    ProposalSaid,
    Quorum,
    StatementSaid,
    VoteSaid,
    encode_round_message,
    most_message_bytes,
    read_round_message,
)
from neuroshard.consensus.round_status import RoundMonitor
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import Encoded
from neuroshard.consensus.stage_chain import StageChain
from neuroshard.consensus.vote_log import KEPT_VOTES, VoteLog
from neuroshard.consensus.voting import Aggregate, certificate_for, slices_for
from neuroshard.errors import StorageError
from neuroshard.network import ScoreReason
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.download import ReplicaClient
from neuroshard.status.rounds import StageRoundsStatus
from neuroshard.types import NodeId
from neuroshard.waiting import Signal

_KEPT = IntentSaid | NewViewSaid | ProposalSaid | ChoicesSaid | VoteSaid | CertificateSaid | EvidenceSaid
MOST_MESSAGES = 16  # per node, apart from the large messages of a round: more than a node sends in two views
MOST_BYTES = 1 << 20  # per node: some proposals of 64 members
MOST_FREE_NAMES = MAX_CALLED // 4  # more than may join a step


class MessageBuffer:
    """The newest messages of as many nodes as a round can call, and of some names that cost nothing.

    The node that has been silent longest is dropped first.
    """

    def __init__(self) -> None:
        self._of_all: tuple[dict[NodeId, deque[tuple[Message, int]]], ...] = {}, {}

    def keep(self, sender: NodeId, message: Message, size: int, *, counts: bool) -> None:
        """Store a message that arrived with this number of bytes. No number of free names displaces other nodes."""
        known, most = self._of_all[counts], MAX_CALLED if counts else MOST_FREE_NAMES
        messages = known.pop(sender, None) or deque[tuple[Message, int]](maxlen=MOST_MESSAGES)
        messages.append((message, size))
        while sum(one for _, one in messages) > MOST_BYTES:
            messages.popleft()
        known[sender] = messages
        for longest_silent in list(known)[:-most]:
            del known[longest_silent]

    def __iter__(self) -> Iterator[tuple[NodeId, Message]]:
        """Sender and message, in order of arrival per sender."""
        for known in reversed(self._of_all):
            for sender, messages in known.items():
                for message, _ in messages:
                    yield sender, message


_LOG = logging.getLogger(__name__)

TICK_SECONDS = 1.0


@dataclass(frozen=True)
class RoundDependencies:
    """The parts of this node that the rounds of a stage use."""

    swarm: RunSwarm
    asking: ReplicaClient
    book: VoteLog
    chain: StageChain
    times: RoundTimes = field(default_factory=RoundTimes)
    reported: StageRoundsStatus | None = None  # the status of the rounds before a restart
    most_members: int = MAX_MEMBERS  # per step
    offload: BlockingRunner = anyio.to_thread.run_sync
    now: Callable[[], float] = time.time  # seconds since the epoch


@dataclass
class _Running:
    """The member of a step that has not ended, with the work that it computes."""

    member: RoundStateMachine
    work: RoundWork
    number: int
    monitor: RoundMonitor | None = None  # of the round that this node has entered
    decoded: tuple[Aggregate, Tensor] | None = None  # the aggregate that this node has decoded last


class RoundRunner:
    """Runs one stage's rounds. Belongs to the event loop; `run` must be active."""

    def __init__(
        self, replica: Replica, around: RoundDependencies, heard: Callable[[IntentSaid | EvidenceSaid], None]
    ) -> None:
        """`heard` gets each message that may make this node enter a step."""
        most_bytes = most_message_bytes(make_codec("fp32").encoded_size(replica.terms.schema.total_size))
        asking, chain = around.asking, around.chain
        self.mail = RoundMessageQueue(replica.stage, asking.requester, most_bytes, self._received, chain.counts)
        self.ended: Complete | None = None  # the newest step's end, until it is taken
        self.changed = Signal()
        self.log_start: LogStart | None = None  # of the vote log; no vote is sent before it is on the disk
        self.failed: FailedReducers | None = None  # in the newest step that this node took part in
        self._replica = replica
        self._book, self._chain, self._asking, self._offload = around.book, chain, asking, around.offload
        self._swarm = around.swarm
        self._on_call = heard
        self._running: _Running | None = None
        self._begun = Signal()
        self._heard = MessageBuffer()
        self._effects: deque[tuple[_Running, Effect]] = deque()
        self._effects_added = Signal()
        self._gave_up: str | None = None
        self._records: dict[str, VoteRecord] = {}  # stored votes by step id; the newest last
        self._archive: dict[str, Quorum] = {}  # certificates of ended steps by step id
        self._tasks: TaskGroup | None = None
        self._jobs: deque[tuple[_Running, Computation]] = deque()  # one at a time: the first one's results leave first
        self._job_added = Signal()

    async def load(self) -> Sequence[Quorum]:
        """Read this node's votes and the ends of the last steps. Raises StorageError."""
        book, offload = self._book, self._offload
        self.log_start = await offload(book.start)
        self._records = {record.step_id: record for record in await offload(book.votes)}
        ended = await offload(book.ended)
        self._archive = {certificate.value.step_id: certificate for certificate in ended}
        return ended

    async def begin_log(self, start: LogStart) -> None:
        """Begin the vote log: this node has no votes above this certified height, or does not know them."""
        if await self._is_written(partial(self._book.begin, start), "This node does not vote."):
            self.log_start = start

    async def run(self) -> None:
        """Run rounds until cancelled; call `load` first."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                tasks.start_soon(self.mail.run)
                tasks.start_soon(self._tick)
                tasks.start_soon(self._compute)
                await self._carry_out()
            finally:
                self._tasks = None

    def has_ended(self, step_id: str) -> bool:
        """Whether this node knows the end of a step."""
        return step_id in self._archive

    def kept_before(self, root: str) -> int:
        """Number of steps, one after the other up to the state with this root, whose aggregates are kept here."""
        count = 0
        for certificate in reversed(self._archive.values()):
            value = certificate.value
            if value.next_root == root and value.round_id is not None:
                root, count = value.root, count + 1
        return count

    def has_voted_in(self, step_id: str) -> bool:
        """Whether this node has voted for a value of this step, so that the value may become its end."""
        running, records = self._running, [self._records.get(step_id)]
        if running is not None:
            records.append(running.member.voting.record)  # its votes may not be on the disk yet
        return any(record is not None and record.step_id == step_id and record.prepared != "" for record in records)

    async def recall(self, step_id: str) -> bool:
        """Adopt the known end of a step. Returns True if its aggregate is stored here as well."""
        certificate = self._archive.get(step_id)
        has_aggregate = certificate is not None and certificate.value.round_id is not None
        aggregate = await self._aggregate(certificate) if certificate is not None and has_aggregate else None
        if certificate is None or aggregate is None:
            return False
        self.ended = Complete(certificate, aggregate)
        self.changed.notify()
        return True

    async def recall_from(self, root: str) -> bool:
        """Adopt the known end of the step from this state: this node stored its end, but returned to the state before
        it.
        """
        ids = [step_id for step_id, certificate in self._archive.items() if certificate.value.root == root]
        return bool(ids) and await self.recall(ids[-1])

    def locked_in(self, root: str, height: int) -> VoteRecord | None:
        """The votes in the step at this height in which this node is locked. Others may have completed it."""
        for record in reversed(self._records.values()):
            value = None if record.lock is None else record.lock.value
            if value is not None and (value.root, value.height) == (root, height) and not self.has_ended(value.step_id):
                return record
        return None

    def enter(
        self,
        setting: RoundConfig,
        number: int,
        work: RoundWork,
        contribution: EncodedContribution,
        monitor: RoundMonitor | None = None,
    ) -> None:
        """Take part in a round of this step; the node may have been in it before. `monitor` follows its progress."""
        before = self._running
        if before is not None and before.member.setting.step.id != setting.step.id:
            before = None
        if before is not None and before.member.voting.completed is not None:
            self._gave_up = None  # the effects of its end are still to be carried out
            return
        running = self._begin(setting, number, work, monitor)
        view = before.member.views.view + 1 if before is not None and before.member.has_entered else 0
        self._put(running, running.member.enter(contribution, anyio.current_time(), view))
        self._hear_again(running)

    def ask(self, setting: RoundConfig, number: int, work: RoundWork) -> None:
        """Ask how this step has ended. This node need not have taken part."""
        running = self._running
        if running is None or running.member.setting.step.id != setting.step.id:
            running = self._begin(setting, number, work)
            self._hear_again(running)
        self._put(running, running.member.ask_for_the_end())

    def propose_entries(self, setting: RoundConfig, number: int, work: RoundWork, evidence: EntryEvidence) -> None:
        """Take part in the votes on a value of this step that carries only entries."""
        running = self._running
        if running is None or running.member.setting.step.id != setting.step.id:
            running = self._begin(setting, number, work)
            self._hear_again(running)
        self._put(running, running.member.add_evidence(evidence, anyio.current_time()))

    def keep(self, own: NodeId, evidence: EvidenceSaid) -> None:
        """Keep this node's own evidence, as if it had been received, for the step that the node enters next."""
        self._heard.keep(own, evidence, 0, counts=True)

    def notify(self, nodes: frozenset[NodeId], message: EvidenceSaid | CertificateSaid) -> None:
        """Send a message that belongs to no running step of this node."""
        self._say(nodes, message)

    async def end(self, answer_seconds: float, aggregate_seconds: float) -> Complete | None:
        """Wait for the end of the step asked about; None if no node sends it, or its aggregate, in time."""
        with anyio.move_on_after(answer_seconds):
            await self._until_ended()
        running = self._running
        if self.ended is None and running is not None and running.member.voting.knows_end:
            with anyio.move_on_after(aggregate_seconds):
                await self._until_ended()
        return self.ended

    async def outcome(self) -> Complete | str:
        """Wait until the round that was entered last has ended, or comes to nothing, and why."""
        await self.changed.until(lambda: self.ended is not None or self._gave_up is not None)
        return self.ended if self.ended is not None else self._gave_up or ""

    def leave(self) -> bool:
        """Take no part any more in the running step. Returns False if it has ended here, and the end is to be adopted.

        A member that answers later could otherwise end the step once more, next to a step of this node alone.
        """
        if self._running is not None and self._running.member.voting.completed is not None:
            return False
        self._running = None
        return True

    def give_up(self, reason: str) -> None:
        """Wait no more for the round that was entered last. It continues, and may still end."""
        self._gave_up = reason
        self.changed.notify()

    async def _until_ended(self) -> None:
        await self.changed.until(lambda: self.ended is not None)

    def _begin(
        self, setting: RoundConfig, number: int, work: RoundWork, monitor: RoundMonitor | None = None
    ) -> _Running:
        """Switch to this step. Unsent messages of the step before are dropped; its votes are stored."""
        member = RoundStateMachine(setting, self._records.get(setting.step.id))
        running = self._running = _Running(member, work, number, monitor)
        self._begun.notify()
        self.ended = self._gave_up = None
        return running

    def _hear_again(self, running: _Running) -> None:
        for sender, message in self._heard:
            self._put(running, running.member.hear(sender, message, anyio.current_time()))

    async def _received(self, sender: NodeId, pieces: Sequence[Encoded]) -> None:
        try:
            message = await self._offload(partial(read_round_message, pieces))
        except MalformedMessageError as error:
            _LOG.info("Node %s sent a message that cannot be read: %s", sender, error)
            self._asking.report(sender, ScoreReason.MALFORMED_FRAME)
            return
        if isinstance(message, AuthoredMessage):
            author = message.signed.member
            if author.node_id != sender and not isinstance(message, StatementSaid):
                self._asking.report(sender, ScoreReason.FOREIGN_CLAIM)
                return
            # The gate may know the node by another wallet, which may take part. A statement that others show counts: it
            # may prove that its author lied before the revocation.
            if author.node_id == sender and (author.wallet_id, author.node_id) in self._swarm.revoked:
                _LOG.debug("A message of node %s is ignored: wallet %s has revoked it.", sender, author.wallet_id[:8])
                return
        await self._help(sender, message)
        if isinstance(message, _KEPT):
            self._heard.keep(sender, message, sum(map(len, pieces)), counts=self.mail.counts(sender))
        running = self._running
        if running is not None:
            self._put(running, running.member.hear(sender, message, anyio.current_time()))
        if isinstance(message, IntentSaid | EvidenceSaid):
            self._on_call(message)

    async def _help(self, sender: NodeId, message: Message) -> None:
        """Answer a member whose step has not ended although it has ended here."""
        for certificate in list(self._archive.values()):
            effects = certificate_for(certificate, sender, message)
            is_wanted = isinstance(message, AggregateWanted) and message.value == certificate.value.digest
            is_wanted = is_wanted and self.mail.has_room_for(sender)  # otherwise a message is already on the way to it
            if is_wanted and (aggregate := await self._aggregate(certificate)) is not None:
                effects = slices_for(aggregate, sender, message)
            for effect in effects:
                if isinstance(effect, Say):
                    self._say(effect.to, effect.message)

    async def _aggregate(self, certificate: Quorum) -> Aggregate | None:
        return await self._offload(partial(self._book.aggregate, certificate))

    async def _tick(self) -> None:
        while True:
            await self._begun.until(lambda: self._running is not None)
            await anyio.sleep(TICK_SECONDS)
            running = self._running
            if running is not None:
                self._put(running, running.member.tick(anyio.current_time()))

    def _put(self, running: _Running, effects: list[Effect]) -> None:
        if running is self._running and running.monitor is not None:
            running.monitor.look(running.member.progress, anyio.current_time())
        for effect in effects:
            self._effects.append((running, effect))
        self._effects_added.notify()

    async def _carry_out(self) -> None:
        while True:
            await self._effects_added.until(lambda: bool(self._effects))
            running, effect = self._effects.popleft()
            # a member that left the round, or could not store its vote, sends nothing more in it
            if running is self._running or isinstance(effect, Complete):
                await self._do(running, effect)

    async def _do(self, running: _Running, effect: Effect) -> None:
        book = self._book
        match effect:
            case Say(to, message):
                self._say(to, message)
            case Persist(record):
                if await self._is_written(
                    partial(book.write, record), "It takes no part in rounds until it can store votes."
                ):
                    self._records.pop(record.step_id, None)
                    self._records[record.step_id] = record
                    for old in list(self._records)[:-KEPT_VOTES]:
                        del self._records[old]
                elif running is self._running:
                    self._running = None
                    self._gave_up = "this node could not store its vote"
                    self.changed.notify()
            case Accuse(node, what, is_malice=is_malice):
                _LOG.warning("Node %s broke the protocol of a round: %s", node, what)
                if is_malice:
                    self._asking.report(node, ScoreReason.BROKEN_WORD)
                await self._is_written(partial(book.keep_proof, effect), "The round continues.")
            case Complete():
                await self._complete(running, effect)
            case GiveUp(reason):
                self._gave_up = reason
                self.changed.notify()
            case Check() | Choose():
                if self._tasks is not None:
                    self._tasks.start_soon(self._check, running, effect)
            case _:
                self._jobs.append((running, effect))
                self._job_added.notify()

    async def keep_end(self, number: int, complete: Complete) -> bool:
        """Store the end of a step. Returns whether it is on the disk."""
        book, certificate = self._book, complete.certificate
        kept = self._replica.terms.kept_steps(number, self._replica.keeper.saved_outer_step)
        is_stored = await self._is_written(partial(book.end, number, complete, kept), "The step is still valid.")
        self._archive[certificate.value.step_id] = certificate
        for old in list(self._archive)[:-kept]:
            del self._archive[old]
        return is_stored

    async def _complete(self, running: _Running, effect: Complete) -> None:
        self.failed = running.member.failed_reducers(effect.certificate.value)
        await self.keep_end(running.number, effect)
        await self._chain.extend(effect.certificate)  # before training can adopt the end
        present = self._running
        if present is None or present.member.setting.step.root == running.member.setting.step.root:
            self._running = None  # with all the memory of the round
            if effect.certificate.value.round_id is not None:
                known = running.decoded
                if known is not None and known[0] == effect.aggregate:
                    effect = replace(effect, vector=known[1])
                self.ended = effect
            else:
                is_step = effect.certificate.value.outer_step > running.number
                self._gave_up = "another node made the step alone" if is_step else "the committee has changed"
        self.changed.notify()

    def _say(self, to: frozenset[NodeId], message: Message) -> None:
        pieces = encode_round_message(message)
        for peer in sorted(to):
            self.mail.send(peer, pieces)

    async def _is_written(self, write: Callable[[], None], consequence: str) -> bool:
        try:
            await self._offload(write)
        except StorageError as error:
            _LOG.error("%s %s", error, consequence)
            return False
        return True

    async def _check(self, running: _Running, job: Choose | Check) -> None:
        answer, work, replica = Chosen(0) if isinstance(job, Choose) else Checked(""), running.work, self._replica
        try:
            if running.decoded is None or running.decoded[0] != job.aggregate:
                running.decoded = job.aggregate, await self._offload(partial(work.decoded, job.aggregate))
            _, aggregate = running.decoded
        except MalformedVectorError as error:
            _LOG.warning("An aggregate cannot be decoded: %s", error)
        else:
            match job:
                case Choose():
                    answer = Chosen(await replica.vote.choice(aggregate))
                case Check():
                    root = await replica.outer.root_after(aggregate, work.outer_step, job.work)
                    objection = ""
                    if root:  # otherwise the node is at another step
                        objection = await replica.vote.objection(aggregate, root, job.work.choice)
                    answer = Checked(root, objection)
        self._answer(running, job, answer)

    def _answer(self, running: _Running, job: Job, answer: JobResult) -> None:
        """Give a member the result of its job. One that was replaced meanwhile could no longer send its votes."""
        if running is self._running:
            self._put(running, running.member.answered(job, answer))

    async def _compute(self) -> None:
        while True:
            await self._job_added.until(lambda: bool(self._jobs))
            running, job = self._jobs.popleft()
            if running is self._running:
                self._answer(running, job, await self._offload(partial(running.work.answer, job)))
