"""Matchmaking of a stage's replicas: query their status, call rounds, answer calls, and follow the leading line."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import anyio
from msgspec import structs

from neuroshard.consensus.message_queue import ANSWER_LIMITS, RoundAnswer
from neuroshard.consensus.roster import GroupMember, Roster, Step, has_one_node_per_wallet
from neuroshard.consensus.round_messages import MAX_MEMBERS
from neuroshard.consensus.round_requests import (
    CALL,
    Call,
    CallStep,
    Promise,
    RoundTimes,
    WorkToRound,
    is_on_the_way,
    may_have_missed,
    members_of_call,
    must_follow,
    ready_nodes,
)
from neuroshard.consensus.stage_rounds import StageRounds
from neuroshard.messages import Frame
from neuroshard.network import RequestRefusedError
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.outer_state import round_is_due
from neuroshard.state.replica_status import ReplicaStatus, query_statuses
from neuroshard.state.transfer_messages import StageName
from neuroshard.types import NodeId, WalletId
from neuroshard.waiting import Signal, sleep_to_tick

_LOG = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Replica:
    """This node's replica of a stage, as matchmaking sees it."""

    member: GroupMember
    stage: StageName
    rounds: StageRounds
    sequences_due: Callable[[int], int]  # that so many members train together before the next round is due
    replica_status: Callable[[], ReplicaStatus]  # without is_certified and in_round
    peers: Callable[[], Sequence[NodeId]]  # other nodes that train the stage, as known here
    wallet_of: Callable[[NodeId], WalletId | None]
    may_take_part: Callable[[], bool]  # whether this node may agree to a round now
    is_open: bool = False  # whether strangers may take part
    # nodes that are downloading this node's state to train the stage
    newcomers: Callable[[], frozenset[NodeId]] = frozenset
    most_members: int = MAX_MEMBERS  # per round
    now: Callable[[], float] = time.time  # seconds since the epoch

    @property
    def node_id(self) -> NodeId:
        return self.member.node_id


@dataclass(frozen=True)
class Agreement:
    """A round to which its members were called."""

    outer_step: int
    root: str
    members: tuple[GroupMember, ...]
    voters: Roster


class Matchmaker:
    """Matches one stage's replicas at one node. Belongs to the event loop."""

    def __init__(
        self,
        replica: Replica,
        asking: ReplicaClient,
        voters: Callable[[str], Roster | None],
        times: RoundTimes | None = None,
    ) -> None:
        """`voters` returns the voters that a certificate names for the state with this root, or None."""
        self.replica = replica
        self.agreement: Agreement | None = None  # agreed and not begun, or in progress
        self.in_round = False
        self.locked_step: Callable[[str], str | None] = lambda _root: None  # a step that may have ended elsewhere
        self.step_of: Callable[[ReplicaStatus], Step | None] = lambda _own: (
            None
        )  # that known voters decide on from a state
        self.catch_up: Callable[[], Awaitable[bool]] = _cannot_catch_up
        # roots of earlier states on the same line as this one
        self.past: Callable[[str], Collection[str]] = lambda _root: ()
        self.must_follow = anyio.Event()  # set once the other replicas continue from another state than this one
        self._asking = asking
        self._voters = voters
        self._times = times or RoundTimes()
        self._promise: Promise | None = None
        self._awaited = "", 0.0  # newcomers, in the step from this root, since then
        self._called = Signal()
        self._round_ended = 0.0
        self._sequence_seconds = 0.0  # pace of this replica; 0 if unknown
        self._left: tuple[int, str] | None = None  # the line whose step has ended, until its end is adopted
        self._due_since: float | None = None
        self._apart_since: float | None = None
        self._has_looked = False
        self._retry_at = 0.0
        self._failures = 0
        self._quorumless_since: float | None = None  # since when too few voters of the step answer
        self._unable_since: float | None = None  # since when all peers answer but none can take part

    @property
    def is_alone(self) -> bool:
        """Whether a round of this node alone is allowed: peers that cannot take part may only be starting.

        A node that is downloading this state must find it unchanged; otherwise its first steps would belong to
        another line. While a certificate names other voters, or this node is locked, they may complete the step
        elsewhere.
        """
        if self.in_round:
            return False
        step = self.step_of(self.replica.replica_status())
        if step is not None and step.roster.members != (self.replica.member,) and not self.is_cut_off:
            return False
        peers = self.replica.peers()
        if self.replica.newcomers().difference(peers) and self._may_wait_for_newcomers():
            return False
        if not peers:
            return True
        since = self._unable_since
        return since is not None and anyio.current_time() - since >= self._times.patience_seconds

    def _may_wait_for_newcomers(self) -> bool:
        """Whether this step may still wait: without a limit, newcomers to a lone node could delay it for ever."""
        root, now = self.replica.replica_status().root, anyio.current_time()
        if self._awaited[0] != root:
            self._awaited = root, now
        return now - self._awaited[1] < self._times.newcomer_seconds

    @property
    def is_called(self) -> bool:
        """Whether this node should enter a round now."""
        return self.agreement is not None and not self.in_round

    def feed(self, signal: Signal) -> None:
        """Signal there whenever `is_called` may have changed."""
        self._called.feed(signal)

    async def called(self) -> None:
        """Wait until `is_called`."""
        await self._called.until(lambda: self.is_called)

    def replica_status(self) -> ReplicaStatus:
        """This replica's status, for other nodes."""
        own = self.replica.replica_status()
        self._left = self._left if self._left == own.line else None
        in_round = self.in_round or self.agreement is not None or self._left is not None
        return replace(own, is_certified=self._voters(own.root) is not None, in_round=in_round)

    def withdraw(self) -> None:
        """Leave the agreed round before it begins."""
        if not self.in_round:
            self.agreement = None

    def ended(self, *, completed: bool) -> None:
        """Record the end of a round, completed or abandoned."""
        times, now = self._times, anyio.current_time()
        self.in_round, self.agreement, self._promise, self._due_since = False, None, None, None
        if completed:
            self._left = self.replica.replica_status().line
            self._round_ended, self._failures, self._retry_at = now, 0, 0.0
            return
        pause = min(times.retry_seconds * 2.0**self._failures, times.longest_retry_seconds)
        self._failures, self._retry_at = self._failures + 1, now + pause

    async def run(self) -> None:
        """Query the other replicas and call rounds until cancelled."""
        self._round_ended = anyio.current_time()
        while True:
            if self.replica.peers():
                await anyio.sleep(self._pause())
            else:  # no replica to query: look together with the node's other tasks
                await sleep_to_tick(self._pause())
            await self.look()

    async def look(self) -> None:
        """Query the other replicas' statuses once, and act on them."""
        peers = list(self.replica.peers())
        if not peers:
            self._apart_since = self._due_since = self._unable_since = None
            self._note_quorum(self.replica_status(), {}, anyio.current_time())
            return
        others = await query_statuses(self._asking, self.replica.stage, peers)
        own, now = self.replica_status(), anyio.current_time()
        if await self._takes_an_end(own, others, now):
            return
        self._note_quorum(own, others, now)
        ready = ready_nodes(self.replica.stage, self.replica.node_id, own, others)
        self._note_unable(are_unable=len(others) == len(peers) and len(ready) == 1 and not self.must_follow.is_set())
        if len(ready) < 2 or own.in_round or not self._is_due({**others, self.replica.node_id: own}, ready, now):
            return
        due_since = self._due_since = now if self._due_since is None else self._due_since
        caller = ready[int((now - due_since) / self._times.turn_seconds) % len(ready)]
        if caller == self.replica.node_id and now >= self._retry_at:
            is_patient = now - due_since < self._times.patience_seconds
            if not is_patient or not self._is_incomplete(own, peers, others):
                await self._call(own, others, ready, is_patient=is_patient)

    async def answer(self, sender: NodeId, call: Call) -> Frame:
        """Answer a call. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        now, own_id = anyio.current_time(), self.replica.node_id
        if not {sender, own_id} <= set(call.nodes) or self.replica.member not in call.members:
            raise RequestRefusedError("This node is not a member of the call.")
        promise = None if self._promise is None or self._promise.until < now else self._promise
        if call.step is CallStep.CANCEL:
            if promise is not None and promise.caller == sender:
                self._promise = None
            return Frame(CALL, RoundAnswer())
        own = self.replica_status()
        if (call.outer_step, call.root) != own.line:
            raise RequestRefusedError("This replica is at another step or state.")
        if not self._is_rightful(call):
            raise RequestRefusedError("This node's certificate names other voters.")
        if own.in_round or not self.replica.may_take_part():
            raise RequestRefusedError("This node cannot take part now.")
        if promise is not None and promise.caller != sender:
            raise RequestRefusedError("This node has promised to take part in another round.")
        if call.step is CallStep.ASK:
            self._promise = Promise(sender, now + self._times.promise_seconds)
        elif promise is None:
            raise RequestRefusedError("This node did not promise to take part.")
        else:
            self._agree(call)
        return Frame(CALL, RoundAnswer())

    @property
    def sequence_seconds(self) -> float:
        """Time in which this replica trains one sequence, waits included; 0 if unknown."""
        return self._work().seconds_per_sequence

    def _work(self) -> WorkToRound:
        done, share = self.replica.replica_status().sequences, self.replica.sequences_due(2) / 2
        return WorkToRound(done, share, anyio.current_time() - self._round_ended, self._sequence_seconds)

    def _pause(self) -> float:
        if not self._has_looked or self._apart_since is not None or self._due_since is not None:
            return self._times.near_seconds
        work = self._work()
        self._sequence_seconds = work.seconds_per_sequence
        return self._times.pause(work, len(self.replica.peers()))

    async def _takes_an_end(self, own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus], now: float) -> bool:
        """Adopt the end of this replica's step if it ended elsewhere; returns True then.

        A replica that cannot get the end must, after some time apart from the others, download their state instead.
        """
        # Cases, in this order:
        #   others are between two lines, not the first look     -> wait; the time apart keeps counting
        #   same line as the others                              -> reset the time apart; after a start with a lock, ask
        #   apart from the others, first look or patience over   -> ask for the end of the step (`catch_up`)
        #   no answer, patience over, and the others are ahead   -> `must_follow`: download their state
        if not own.root:
            return False
        is_first, self._has_looked = not self._has_looked, True
        if is_on_the_way(own, others) and not is_first:
            return False  # the time apart keeps counting: the rounds of the others come again and again
        is_behind = must_follow(own, others, self.past(own.root))
        if not is_behind and not may_have_missed(own, others):
            self._apart_since = None
            return is_first and self.locked_step(own.root) is not None and await self.catch_up()
        self._apart_since = now if self._apart_since is None else self._apart_since
        is_patient = now - self._apart_since < self._times.behind_seconds
        if self.must_follow.is_set() or (is_patient and not is_first):
            return False
        if await self.catch_up():
            return True
        if not is_patient and not is_behind:
            self._apart_since = None
        elif not is_patient:
            layers = self.replica.stage.layers
            _LOG.info(
                "Other replicas of layers %d-%d are ahead: downloading their state.", layers.start + 1, layers.stop
            )
            self.must_follow.set()
        return False

    def _note_quorum(self, own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus], now: float) -> None:
        step = self.step_of(own)
        on_line = {self.replica.node_id, *(node for node, status in others.items() if status.line == own.line)}
        if step is None or len(step.roster.nodes & on_line) >= step.quorum:
            self._quorumless_since = None
        elif self._quorumless_since is None:
            self._quorumless_since = now

    def _step(self, outer_step: int, root: str, voters: Roster) -> Step:
        return self.replica.rounds.step(outer_step, root, voters, is_open=self.replica.is_open)

    def _note_unable(self, *, are_unable: bool) -> None:
        if not are_unable:
            self._unable_since = None
        elif self._unable_since is None:
            self._unable_since = anyio.current_time()

    def _is_incomplete(
        self, own: ReplicaStatus, peers: Sequence[NodeId], others: Mapping[NodeId, ReplicaStatus]
    ) -> bool:
        """Whether an expected replica is missing: it does not answer, or it has just joined.

        Voters of a certificate may be without work for long, so the round does not wait for their work.
        """
        here = (status for status in others.values() if status.is_live and status.line == own.line)
        are_starting = any(not status.sequences and not status.is_certified for status in here)
        return len(others) < len(peers) or are_starting or bool(self.replica.newcomers().difference(peers))

    def _is_due(self, statuses: Mapping[NodeId, ReplicaStatus], ready: Sequence[NodeId], now: float) -> bool:
        rounds, own = self.replica.rounds, statuses[self.replica.node_id]
        work = [statuses[node].sequences for node in ready]
        members = max(1, sum(done > 0 for done in work))
        return round_is_due(
            counted_sequences=sum(work),
            enough_sequences=self.replica.sequences_due(members),
            elapsed_seconds=now - self._round_ended,
            max_round_seconds=rounds.parameters_at(own.outer_step).max_round_seconds,
        )

    @property
    def is_cut_off(self) -> bool:
        """Whether the step has had no quorum for so long that the remaining replicas may continue on their own."""
        since = self._quorumless_since
        return since is not None and anyio.current_time() - since >= self._times.partition_seconds

    def _is_rightful(self, call: Call) -> bool:
        """Whether the voters in a call are those of this node's certificate, if it has one, and agree with its lock."""
        own = self._voters(call.root)
        if self.is_cut_off and call.roster is None:
            return True
        locked, step = self.locked_step(call.root), self._step(call.outer_step, call.root, call.voters)
        return own in (None, call.voters) and locked in (None, step.id)

    def _members(self, nodes: Sequence[NodeId]) -> tuple[GroupMember, ...]:
        """The members among these nodes whose wallets are known. In an open run only one per wallet."""
        known = [(node, self.replica.wallet_of(node)) for node in nodes if node != self.replica.node_id]
        members = [self.replica.member]
        for node, wallet in known:
            member = None if wallet is None else GroupMember(node, wallet)
            if member is not None and (not self.replica.is_open or has_one_node_per_wallet([*members, member])):
                members.append(member)
        return tuple(sorted(members))

    async def _call(
        self, own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus], ready: Sequence[NodeId], *, is_patient: bool
    ) -> None:
        """Ask the ready replicas to take part, then send them the list of members.

        A patient caller begins only if no called replica refused.
        """
        now, own_id, voters = anyio.current_time(), self.replica.node_id, self._voters(own.root)
        is_new = voters is None and any(others[node].is_certified for node in ready if node != own_id)
        waits_for_voters = is_new and now - (self._due_since or now) < self._times.partition_seconds
        has_promised = self._promise is not None and self._promise.until >= now and self._promise.caller != own_id
        has_to_follow = voters is None and may_have_missed(own, others)
        # A replica that reports a certificate calls the round itself. Wait for it, however long its round takes, up to
        # `partition_seconds` in case its report is false: a line founded next to the voters would fork the history.
        if has_promised or waits_for_voters or has_to_follow or not self.replica.may_take_part():
            return
        self._promise = Promise(own_id, now + self._times.promise_seconds)
        roster = None if voters is None or self.is_cut_off else voters.members
        called = members_of_call(own_id, ready, voters, self.replica.most_members)
        call = Call(self.replica.stage, own.outer_step, own.root, self._members(called), roster, CallStep.ASK)
        willing = await self._send_call(call)
        missing = len(call.members) - 1 - len(willing)
        present = self.replica_status()
        is_same = present.line == own.line and not present.in_round and self.replica.may_take_part()
        final = structs.replace(call, members=self._members([own_id, *sorted(willing)]), step=CallStep.BEGIN)
        if not willing or (missing and is_patient) or not is_same or not self._may_begin(final):
            self._promise = None
            await self._send_call(structs.replace(call, step=CallStep.CANCEL))
            return
        self._agree(final)
        reached = await self._send_call(final)
        for node in willing - reached:
            _LOG.info("Node %s agreed to a round and no longer answers.", node)

    def _may_begin(self, call: Call) -> bool:
        if not self._is_rightful(call):
            return False
        step = self._step(call.outer_step, call.root, call.voters)
        return len(call.voters.nodes & set(call.nodes)) >= step.quorum

    async def _send_call(self, call: Call) -> set[NodeId]:
        """Those who said yes."""
        others = [node for node in call.nodes if node != self.replica.node_id]
        ask = partial(self._asking.ask, request=Frame(CALL, call), limits=ANSWER_LIMITS, seconds=ANSWER_SECONDS)
        return set(await ask_replicas(others, ask, at_once=MAX_MEMBERS))

    def _agree(self, call: Call) -> None:
        self._promise = None
        self.agreement = Agreement(call.outer_step, call.root, call.members, call.voters)
        self.wake()

    def wake(self) -> None:
        """Let those who wait for a call look."""
        self._called.notify()


async def _cannot_catch_up() -> bool:
    """Return False: the default for a node that cannot ask how a step ended."""
    await anyio.lowlevel.checkpoint()
    return False
