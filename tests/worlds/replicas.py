"""Replicas of one stage in memory that work by a virtual clock and agree in rounds.

Real: matchmaking, rounds, votes, identities and the outer optimizer. Simulated: the network, the clock and the
training; a few numbers stand for the weights, and random numbers for the inner steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import anyio
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from neuroshard.aggregation import MemberFacts
from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.consensus.committee import ChangeParameters, Committee, GroupMember, Seat
from neuroshard.consensus.effects import AnyBody, Effect, Judge, MakeStatistics, Reduce
from neuroshard.consensus.foundation import Founding, SignedFoundation, StageStart
from neuroshard.consensus.group_rounds import GroupRounds, RoundRequestHandlers
from neuroshard.consensus.matchmaking import RoundTimes
from neuroshard.consensus.round_machine import RoundStateMachine
from neuroshard.consensus.round_messages import (
    MAX_MEMBERS,
    Message,
    VerifiedBody,
    Vote,
    VoteSaid,
    signed_by,
)
from neuroshard.consensus.round_runner import RoundDependencies
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import Encoded
from neuroshard.consensus.stage_chain import ChainStore, InMemoryChainStore, StageChain
from neuroshard.consensus.sync_strategies import (
    Abandoned,
    Agreed,
    StageRounds,
    Strategy,
    UnderWay,
    sequences_to_round,
    strategy_at,
)
from neuroshard.consensus.vote_log import InMemoryVoteLog, VoteLog
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.model.weights import TensorSchema
from neuroshard.network import InMemoryNetwork
from neuroshard.optim.outer import CertifiedWork, OuterState
from neuroshard.state.download import ReplicaClient
from neuroshard.state.outer_state import state_root
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.snapshot_server import SnapshotServer
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.rounds import StageRoundsStatus
from neuroshard.training.outer_sync import included_work, keeps_weights
from neuroshard.types import LayerRange, NodeId, RunId, WalletId
from neuroshard.waiting import first_of
from tests.worlds.clock import at_once
from tests.worlds.rounds import Twist
from tests.worlds.stages import PARAMETERS

RUN = RunId("1" * 64)
STAGE = StageName(RUN, LayerRange(0, 2))
LENGTH = 50
SCHEMA = TensorSchema(tuple(f"layers.{number}.weight" for number in range(5)), ((LENGTH // 5,),) * 5)
OUTER = OuterOptimization(inner_steps=10, interval="fixed", learning_rate=0.7, momentum=0.9)
SEQUENCES_PER_STEP = 2
NOW = 1_700_000_000.0  # by everybody's clock


def identity(number: int) -> NodeIdentity:
    wallet = Wallet.from_secret(TokenSecret("hex", bytes([number] * 32)))
    key = NodeKey.from_seed(bytes([number + 100] * 32))
    return NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, NOW + 1e6))


# Not those of `identity_of`: the order of their ids decides which replica calls first, and the tests count its seconds.
IDENTITIES = {one.node_id: one for one in (identity(number) for number in range(100))}
EVERYBODY = tuple(IDENTITIES)
NAMES = EVERYBODY[:12]
A, B, C = NAMES[:3]


def founding_of(seats: Sequence[NodeId], *, is_open: bool = False) -> Founding:
    """The stage's foundation: its owner is the first of these seats."""
    members = [Seat(IDENTITIES[name].wallet_id, name, 0) for name in seats]
    committee = Committee.founded(members, is_open=is_open)
    return Founding("f" * 64, 0, StageStart(0, committee), members[0].wallet_id)


def wallet_of(node: NodeId) -> WalletId:
    """Free names have a wallet each."""
    known = IDENTITIES.get(node)
    return WalletId(sha256(node.encode()).hexdigest()[:32]) if known is None else known.wallet_id


DUE_SECONDS = OUTER.inner_steps  # of steps of a second each


@dataclass
class SimulatedReplica:
    """Makes an inner step every `step_seconds` and enters rounds between two of them."""

    name: NodeId
    network: InMemoryNetwork
    seed: int
    step_seconds: float = 1.0
    steps: int = 0
    sequences: int = 0
    saved_outer_step: int = 1_000_000  # outer step of its newest checkpoint
    is_idle: bool = False
    state: OuterState = field(default_factory=lambda: OuterState(torch.zeros(LENGTH), torch.zeros(LENGTH), 0))
    outcomes: list[Agreed | Abandoned] = field(default_factory=list[Agreed | Abandoned])
    entered: list[int] = field(default_factory=list[int])  # outer steps of the rounds that it was called to
    given_up: list[int] = field(default_factory=list[int])  # and of those that were abandoned here
    known: Callable[[], Sequence[NodeId]] | None = None
    wallet_rounds: int = 0
    is_open: bool = False  # to strangers
    seats: Sequence[NodeId] = (A, B, C)
    founding: Callable[[], Founding] | None = None  # the one that applies; None: with these seats
    store: ChainStore = field(default_factory=InMemoryChainStore)  # also on its disk
    may_be_alone: bool = False  # it makes rounds of its own when it is alone
    takers: frozenset[NodeId] = frozenset()  # who takes its state over just now
    may_take_part: bool = True  # whether it agrees to rounds
    is_reluctant: bool = False  # it agrees to rounds and then does not come
    dies_at_message: int | None = None  # of its rounds
    book: VoteLog = field(default_factory=InMemoryVoteLog)  # what lies on its disk
    times: RoundTimes | None = None
    objects: str = ""  # why it votes for nothing
    chooses: int = 0  # of the candidates for an outer step
    measured: list[int] = field(default_factory=list[int])  # outer steps whose candidates it measured
    told: StageRoundsStatus | None = None  # of its rounds, in an earlier life
    most_members: int = MAX_MEMBERS  # of a round
    removed: frozenset[WalletId] = frozenset()  # wallets whose membership the owner has ended
    revoked: frozenset[tuple[WalletId, NodeId]] = frozenset()  # nodes that may not act for their wallets any more
    word: SignedFoundation | None = None  # the owner's newest statement that it has learned
    changes: tuple[ChangeParameters, ...] = ()  # to later versions of the run that it has learned
    copy_keeper: NodeId | None = None  # the node with the newest copy of its state
    clock_ahead: float = 0.0  # seconds
    scheme: OuterOptimization = OUTER
    versions: Callable[[int], OuterOptimization] | None = None  # by outer step; None: `scheme` holds all the time
    residual: Tensor | None = None
    begun: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])  # what went into rounds beside it
    lie: Twist | None = None  # what it does instead of what its rounds ask for
    machines: dict[str, RoundStateMachine] = field(default_factory=dict[str, RoundStateMachine])  # of a liar, by step
    votes: list[Vote] = field(default_factory=list[Vote])  # that it has sent
    anchors: dict[int, bytes] = field(default_factory=dict[int, bytes])  # and velocities, by outer step

    def __post_init__(self) -> None:
        self.weights = self.state.anchor.clone()
        self._generator = torch.Generator().manual_seed(self.seed)
        transport = self.network.join(self.name)
        self.terms = StageRounds(RUN, 0, SCHEMA, self.scheme, None if self.versions is None else self._version)
        self.asking = ReplicaClient(transport, offload=at_once)
        founding = founding_of(self.seats, is_open=self.is_open)
        around = RoundDependencies(
            self,
            self.asking,
            self.book,
            StageChain(self.founding or (lambda: founding), self.store, at_once),
            self.times or RoundTimes(),
            self.told,
            self.most_members,
            at_once,
            self.now,
        )
        self.group = GroupRounds(self, around)
        donor, door = SnapshotServer(lambda node: node in self.network.nodes(), offload=at_once), RoundRequestHandlers()
        donor.offer(STAGE, self)  # type: ignore[arg-type]
        self._send = self.group.actor.mail.send
        self.group.actor.mail.send = self._send_or_die  # type: ignore[method-assign]
        self._say = self.group.actor._say  # pyright: ignore[reportPrivateUsage]
        self.group.actor._say = self._say_and_note  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
        self._put = self.group.actor._put  # pyright: ignore[reportPrivateUsage]
        self.group.actor._put = self._put_or_lie  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
        donor.serve(transport)
        door.add(self.group)
        door.serve(transport)

    @property
    def parameters(self) -> OuterOptimization:
        """Those that hold at the present outer step."""
        return self.scheme if self.versions is None else self.versions(self.state.outer_step)

    def _version(self, outer_step: int) -> RunParameters:
        assert self.versions is not None
        return replace(PARAMETERS, outer=self.versions(outer_step))

    @property
    def member(self) -> GroupMember:
        return GroupMember(self.name, IDENTITIES[self.name].wallet_id)

    @property
    def stage(self) -> StageName:
        return STAGE

    @property
    def outer(self) -> SimulatedReplica:
        """See StageState: this object implements it as well."""
        return self

    @property
    def vote(self) -> SimulatedReplica:
        """See AggregateVote."""
        return self

    @property
    def keeper(self) -> SimulatedReplica:
        """See SavedStates."""
        return self

    @property
    def control(self) -> SimulatedReplica:
        """See Hold."""
        return self

    @property
    def restarting(self) -> int:
        return 0

    @property
    def must_hold(self) -> str | None:
        return None if self.may_take_part else "It is told to."

    @property
    def may_meet(self) -> bool:
        return self.may_take_part

    def newcomers(self) -> frozenset[NodeId]:
        return self.takers

    def wallet_of(self, node_id: NodeId) -> WalletId:
        return wallet_of(node_id)

    def is_removed(self, wallet: WalletId) -> bool:
        return wallet in self.removed

    def sign(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        return self.signed(body)

    def signed(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        return signed_by(IDENTITIES[self.name], body, self.now())

    def now(self) -> float:
        """Seconds since 1970 by its own clock."""
        return NOW + anyio.current_time() + self.clock_ahead

    def replica_status(self) -> ReplicaStatus:
        return self.group.replica_status()

    async def live(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.group.run)
            while True:
                await first_of(lambda: anyio.sleep(self.step_seconds), self.group.called)
                if self.group.is_called and self.is_reluctant:
                    self.group.withdraw()
                elif self.group.is_called:
                    await self.take_part()
                elif not self.is_idle:
                    await self._step()

    def follow(self, other: SimulatedReplica) -> None:
        """Take another one's state over, as a download does."""
        self.state, self.weights = other.state, other.weights.clone()
        self.steps, self.sequences, self.wallet_rounds = other.steps, other.sequences, other.wallet_rounds
        self.group.must_follow = anyio.Event()

    def own_status(self) -> ReplicaStatus:
        root, rounds = state_root(self.state), self.wallet_rounds
        return ReplicaStatus(
            True, self.steps, self.state.outer_step, root, sequences=self.sequences, wallet_rounds=rounds
        )

    async def _step(self) -> None:
        self.weights = self.weights - 0.01 * torch.rand(LENGTH, generator=self._generator)
        self.steps, self.sequences = self.steps + 1, self.sequences + SEQUENCES_PER_STEP
        is_due = self.sequences >= self.sequences_due(1)
        if self.may_be_alone and is_due and self.group.is_alone:
            await self.take_part()

    async def take_part(self) -> None:
        before = self.state
        strategy = self._strategy
        contribution = strategy.contribution(before, self.weights, self.residual)
        if self.group.due is not None:
            self.entered.append(before.outer_step)
        outcome = await self.group.exchange(contribution, before.outer_step)
        if isinstance(outcome, UnderWay):
            self.begun.append((contribution, self.sequences))
            return
        if isinstance(outcome, Abandoned):
            self.note_abandoned(outcome)
        if isinstance(outcome, Agreed):
            self.outcomes.append(outcome)
            carried, encoded = self.residual, contribution if outcome.late_for is None else outcome.late_for
            if not outcome.is_without_own:
                self.residual = strategy.next_residual(carried, encoded, outcome.sent)
            if keeps_weights(outcome, self.parameters):
                after = strategy.kept_state(before, self.weights)
            else:
                choice = before.line.after(outcome.work or CertifiedWork(0)).choice
                after = strategy.next_state(before, outcome.aggregate, choice)
                included = included_work(outcome, strategy, carried)
                self.weights = strategy.next_weights(self.weights, before, after, included)
            work, counted = outcome.work, self._counted(outcome)
            outer_step = after.outer_step if outcome.completes is None else outcome.completes + 1
            line = before.line.after(work or CertifiedWork(counted))
            self.state = replace(after, outer_step=outer_step, line=line)
            self.sequences = self.sequences - counted
            self.anchors[self.state.outer_step] = bytes(self.state.anchor.numpy()) + bytes(self.state.velocity.numpy())
            self.wallet_rounds += outcome.members if outcome.members > 1 else 0

    def _counted(self, agreed: Agreed) -> int:
        """Sequences whose work is in the aggregate."""
        if agreed.is_without_own:
            return 0
        return self.sequences if agreed.offered is None or agreed.late_for is None else agreed.offered

    def note_abandoned(self, outcome: Abandoned) -> None:
        self.outcomes.append(outcome)
        self.given_up.append(self.state.outer_step)

    def _send_or_die(self, peer: NodeId, message: Sequence[Encoded]) -> None:
        if self.dies_at_message == 0:
            self.network.kill(self.name)
        if self.dies_at_message is not None:
            self.dies_at_message -= 1
        self._send(peer, message)

    def _say_and_note(self, to: frozenset[NodeId], message: Message) -> None:
        if isinstance(message, VoteSaid):
            self.votes.append(message.signed.body)
        self._say(to, message)

    def _put_or_lie(self, running: Any, effects: list[Effect]) -> None:
        lie = self.lie
        if lie is not None:
            self.machines = {running.member.setting.step.id: running.member}
            effects = [said for effect in effects for said in lie(self, effect)]
        self._put(running, effects)

    async def root_after(self, aggregate: Tensor, outer_step: int, work: CertifiedWork) -> str:
        await anyio.lowlevel.checkpoint()
        if outer_step != self.state.outer_step:
            return ""
        line = self.state.line.after(work)
        return state_root(replace(self._strategy.next_state(self.state, aggregate, line.choice), line=line))

    def measured_candidates(self) -> int:
        return len(self._strategy.candidates) if self.state.line.needs_choice else 1

    async def choice(self, aggregate: Tensor) -> int:
        await anyio.lowlevel.checkpoint()
        self.measured.append(self.state.outer_step)
        return self.chooses

    @property
    def _strategy(self) -> Strategy:
        steps = self.state.line.sequences // SEQUENCES_PER_STEP
        return strategy_at(self.parameters, SCHEMA, self.state.outer_step, steps)

    def sequences_due(self, members: int) -> int:
        return sequences_to_round(self.parameters, SCHEMA, self.state, SEQUENCES_PER_STEP, members)

    async def objection(self, aggregate: Tensor, next_root: str, choice: int | None = None) -> str:
        await anyio.lowlevel.checkpoint()
        return self.objects

    def replicas(self, stage: int) -> Sequence[NodeId]:
        if self.known is not None:
            return self.known()
        return sorted(node for node in self.network.nodes() if node != self.name)


async def for_seconds(seconds: float, *replicas: SimulatedReplica) -> None:
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(replica.live)


def play(scenario: Callable[[InMemoryNetwork], Awaitable[None]]) -> None:
    """Run a scenario under a virtual clock that never waits."""

    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(100_000):
            await scenario(network)

    trio.run(main, clock=MockClock(autojump_threshold=0))


QUICK = replace(RoundTimes(), look_seconds=0.05, near_seconds=0.02, probe_seconds=0.05, retry_seconds=0.05)


class MeetingPlace:
    """For one round after the other, each with the same number of members that did the same work."""

    def __init__(self, rounds: StageRounds, members: int) -> None:
        self._rounds = rounds
        self._members = members
        self._brought = list[Tensor]()
        self._met = anyio.Event()
        self._aggregate: Tensor | None = None

    async def exchange(self, contribution: Tensor, outer_step: int) -> Agreed:
        """See Exchange: waits for the others."""
        self._brought.append(contribution)
        met = self._met
        if len(self._brought) == self._members:
            self._aggregate = self._aggregated(outer_step)
            self._brought, self._met = [], anyio.Event()
            met.set()
        await met.wait()
        assert self._aggregate is not None
        return Agreed(self._aggregate, self._members)

    def _aggregated(self, outer_step: int) -> Tensor:
        length = self._rounds.exchanged_at(outer_step).length
        work = RoundWork.of(self._rounds.parameters_at(outer_step), length)
        parts = [work.encoded(contribution) for contribution in self._brought]
        friends = MemberFacts.of_equals(self._members, are_friends=True)
        rows = {index: [part[index] for part in parts] for index in range(work.plan.count)}
        statistics = list(work.statistics(MakeStatistics("round", rows, friends)).values())
        judged = work.judged(Judge("round", statistics, friends))
        assert judged.reduction is not None, judged.abort_reason
        reduced = work.reduced(Reduce("round", rows, judged.reduction))
        return work.decoded([reduced[index] for index in range(work.plan.count)])
