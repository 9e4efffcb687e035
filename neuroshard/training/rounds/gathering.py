"""Brings the replicas of a stage together: looks at them, calls rounds, answers calls, follows the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import anyio

from neuroshard.network import RequestRefusedError
from neuroshard.swarm.group import Group
from neuroshard.swarm.schedule import round_is_due
from neuroshard.training.exchange import StageRounds
from neuroshard.training.rounds.calls import (
    ANSWER_LIMITS,
    CALL,
    Call,
    CallStep,
    RoundTimes,
    call_frame,
    must_follow,
    roster_of,
    turn_order,
)
from neuroshard.training.transfer.download import Asking
from neuroshard.training.transfer.errors import DonorError
from neuroshard.training.transfer.fields import StageName
from neuroshard.training.transfer.standing import MAX_MEMBERS, Standing
from neuroshard.training.transfer.standings import standings_of
from neuroshard.types import NodeId
from neuroshard.wire import Frame

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Replica:
    """This node's replica of a stage, as those see it who bring replicas together."""

    node_id: NodeId
    stage: StageName
    rounds: StageRounds
    sequences_per_step: int
    standing: Callable[[], Standing]  # without view and in_round
    peers: Callable[[], Sequence[NodeId]]  # other nodes at work on the stage, by what is known here
    is_present: Callable[[NodeId], bool] = lambda _: True  # whether a node is connected and has not said that it goes
    most_members: int = MAX_MEMBERS  # of a round that fits the memory


@dataclass(frozen=True)
class Agreement:
    """A round that its members have agreed on."""

    outer_step: int
    view: int
    group: Group


@dataclass(frozen=True)
class _Promise:
    """To take part in a round once it is known with whom."""

    caller: NodeId
    until: float


class Gathering:
    """One stage's rounds at one node. Belongs to the event loop."""

    def __init__(
        self,
        replica: Replica,
        asking: Asking,
        agreed: Callable[[Agreement], None],
        times: RoundTimes | None = None,
    ) -> None:
        """`agreed` is told of a round before others learn that this node takes part."""
        self.replica = replica
        self.agreement: Agreement | None = None  # not begun, or under way
        self.in_round = False
        self.may_take_part: Callable[[], bool] = lambda: True
        self.must_follow = anyio.Event()  # set once this replica's state is not the one that the others go on with
        self._asking = asking
        self._agreed = agreed
        self._times = times or RoundTimes()
        self._promise: _Promise | None = None
        self._views = (0, 0)  # outer step, and how many of its rounds were heard of
        self._called = anyio.Event()
        self._round_ended = 0.0
        self._due_since: float | None = None
        self._apart_since: float | None = None
        self._retry_at = 0.0
        self._failures = 0
        self._unable_since: float | None = None  # all others answer since then, and none of them can take part

    @property
    def is_alone(self) -> bool:
        """Whether a round of this node alone is in order: others that cannot take part may only be starting."""
        if not self.replica.peers():
            return True
        since = self._unable_since
        return since is not None and anyio.current_time() - since >= self._times.patience_seconds

    @property
    def is_called(self) -> bool:
        """Whether this node should enter a round now."""
        return self.agreement is not None and not self.in_round

    async def called(self) -> None:
        """Wait until `is_called`."""
        while not self.is_called:
            await self._called.wait()

    def standing(self) -> Standing:
        """How this replica stands, for others."""
        own = self.replica.standing()
        outer_step, view = self._views
        return replace(
            own,
            view=view if outer_step == own.outer_step else 0,
            in_round=self.in_round or self.agreement is not None,
            most_members=self.replica.most_members,
        )

    def withdraw(self) -> None:
        """Take no part in what was agreed on."""
        if not self.in_round:
            self.agreement = None

    def ended(self, *, completed: bool) -> None:
        """A round is over."""
        times, now = self._times, anyio.current_time()
        self.in_round, self.agreement, self._promise, self._due_since = False, None, None, None
        if completed:
            self._round_ended, self._failures, self._retry_at = now, 0, 0.0
            return
        pause = min(times.retry_seconds * 2.0**self._failures, times.longest_retry_seconds)
        self._failures, self._retry_at = self._failures + 1, now + pause

    async def run(self) -> None:
        """Look at the others and call rounds until cancelled."""
        self._round_ended = anyio.current_time()
        while True:
            await anyio.sleep(self._pause())
            await self.look()

    async def look(self) -> None:
        """Ask the others how they stand, and do what follows."""
        peers = list(self.replica.peers())
        if not peers:
            self._apart_since = self._due_since = self._unable_since = None
            return
        others = await standings_of(self._asking, self.replica.stage, peers)
        own, now = self.standing(), anyio.current_time()
        self._note_line(own, others, now)
        roster = roster_of(self.replica.stage, self.replica.node_id, own, others)
        self._note_unable(are_unable=len(others) == len(peers) and len(roster) == 1 and not self.must_follow.is_set())
        if len(roster) < 2 or own.in_round or not self._is_due(own, others, roster, now):
            return
        due_since = self._due_since = now if self._due_since is None else self._due_since
        order = turn_order(self.replica.stage, own, roster)
        caller = order[int((now - due_since) / self._times.turn_seconds) % len(order)]
        if caller == self.replica.node_id and now >= self._retry_at:
            is_patient = now - due_since < self._times.patience_seconds
            if not is_patient or len(others) == len(peers):
                await self._call(own, others, roster, is_patient=is_patient)

    async def answer(self, sender: NodeId, call: Call) -> Frame:
        """Answer a call. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        now, own_id = anyio.current_time(), self.replica.node_id
        if not {sender, own_id} <= set(call.members) or len(set(call.members)) != len(call.members):
            raise RequestRefusedError("The call names other members.")
        if len(call.members) > self.replica.most_members:
            raise RequestRefusedError(f"The memory here takes rounds of {self.replica.most_members} members at most.")
        promise = None if self._promise is None or self._promise.until < now else self._promise
        if call.step is CallStep.CANCEL:
            if promise is not None and promise.caller == sender:
                self._promise = None
            return Frame(CALL)
        if (call.outer_step, call.root) != self.standing().line:
            raise RequestRefusedError("This replica is of another line.")
        if self.agreement is not None or not self.may_take_part():
            raise RequestRefusedError("This node cannot take part now.")
        if promise is not None and promise.caller != sender:
            raise RequestRefusedError("This node has another call.")
        if call.step is CallStep.ASK:
            self._promise = _Promise(sender, now + self._times.promise_seconds)
        elif promise is None:
            raise RequestRefusedError("This node did not promise to take part.")
        else:
            self._agree(call)
        return Frame(CALL)

    def _pause(self) -> float:
        own = self.replica.standing()
        enough = self.replica.rounds.parameters_at(own.outer_step).inner_steps * self.replica.sequences_per_step
        is_near = self._due_since is not None or own.sequences >= enough / 2 or self._apart_since is not None
        return self._times.near_seconds if is_near else self._times.look_seconds

    def _note_line(self, own: Standing, others: Mapping[NodeId, Standing], now: float) -> None:
        """After some time apart from the others, this replica must follow them."""
        if not must_follow(own, others):
            self._apart_since = None
            return
        self._apart_since = now if self._apart_since is None else self._apart_since
        if now - self._apart_since >= self._times.behind_seconds and not self.must_follow.is_set():
            layers = self.replica.stage.layers
            log.info("Other replicas of layers %d-%d went on: taking over theirs.", layers.start + 1, layers.stop)
            self.must_follow.set()

    def _note_unable(self, *, are_unable: bool) -> None:
        if not are_unable:
            self._unable_since = None
        elif self._unable_since is None:
            self._unable_since = anyio.current_time()

    def _is_due(self, own: Standing, others: Mapping[NodeId, Standing], roster: Sequence[NodeId], now: float) -> bool:
        parameters = self.replica.rounds.parameters_at(own.outer_step)
        return round_is_due(
            counted_sequences=own.sequences + sum(others[node].sequences for node in roster[1:]),
            inner_steps=parameters.inner_steps,
            sequences_per_step=self.replica.sequences_per_step,
            members=len(roster),
            elapsed_seconds=now - self._round_ended,
            max_round_seconds=parameters.max_round_seconds,
        )

    async def _call(
        self, own: Standing, others: Mapping[NodeId, Standing], roster: Sequence[NodeId], *, is_patient: bool
    ) -> None:
        """Ask who takes part, then tell them. A patient caller begins only when nobody is missing."""
        now, own_id = anyio.current_time(), self.replica.node_id
        has_promised = self._promise is not None and self._promise.until >= now and self._promise.caller != own_id
        if has_promised or not self.may_take_part():
            return
        self._promise = _Promise(own_id, now + self._times.promise_seconds)
        view = max(own.view, *(others[node].view for node in roster[1:]))
        call = Call(own.outer_step, own.root, view, tuple(roster), CallStep.ASK)
        willing = await self._told(call)
        missing = len(roster) - 1 - len(willing)
        is_same = self.standing().line == own.line and self.agreement is None and self.may_take_part()
        if not willing or (missing and is_patient) or not is_same:
            self._promise = None
            await self._told(replace(call, step=CallStep.CANCEL))
            return
        final = Call(own.outer_step, own.root, view, (own_id, *sorted(willing)), CallStep.BEGIN)
        self._agree(final)
        reached = await self._told(final)
        for node in willing - reached:
            log.info("Node %s was called to a round and does not answer any more.", node)

    async def _told(self, call: Call) -> set[NodeId]:
        """Those who said yes."""
        willing = set[NodeId]()
        frame = call_frame(self.replica.stage, call)

        async def tell(node: NodeId) -> None:
            try:
                await self._asking.ask(node, frame, ANSWER_LIMITS, ANSWER_SECONDS)
            except DonorError as error:
                log.debug("Node %s does not take part in a round: %s", node, error)
            else:
                willing.add(node)

        async with anyio.create_task_group() as tasks:
            for node in call.members:
                if node != self.replica.node_id:
                    tasks.start_soon(tell, node)
        return willing

    def _agree(self, call: Call) -> None:
        self._views = (call.outer_step, call.view + 1)
        self._promise = None
        agreement = Agreement(call.outer_step, call.view, Group(call.members, self.replica.node_id))
        self._agreed(agreement)
        self.agreement = agreement
        waking, self._called = self._called, anyio.Event()
        waking.set()
