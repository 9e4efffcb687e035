"""Members of certified rounds in memory, honest ones and liars.

Real: the state machine of the round, the roster and the votes. Simulated: the network, the clock, the disk and the
work. The test decides about every message, death, cut and second. Hashes stand for tensors: the work is done at once,
and equal inputs give equal outputs, as with the real work. A liar changes the effects of its own state machine by one
function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from math import inf
from random import Random
from typing import Any, Protocol

import torch
from msgspec import structs
from torch import Generator, Tensor

from neuroshard.aggregation import Cluster, GateVerdict, WeightedSum
from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import Committee, GroupMember, Seat
from neuroshard.consensus.effects import (
    Accuse,
    AnyBody,
    Check,
    Checked,
    Choose,
    Chosen,
    CompareBlocks,
    CompareNorms,
    Complete,
    Computation,
    Effect,
    EncodedContribution,
    FailedReducers,
    GiveUp,
    Job,
    JobResult,
    Judge,
    Judged,
    MakeStatistics,
    Persist,
    Reduce,
    RoundConfig,
    Say,
    ViewTiming,
    VoteRecord,
)
from neuroshard.consensus.foundation import Founding, StageStart
from neuroshard.consensus.round_machine import RoundStateMachine
from neuroshard.consensus.round_messages import (
    ChoicesSaid,
    ContributionSent,
    EntryEvidence,
    EvidenceSaid,
    Message,
    NewView,
    NewViewSaid,
    OuterChoice,
    Phase,
    ProposalSaid,
    ReducerFaults,
    ResultSaid,
    RoundProposal,
    StatementSaid,
    StatisticsDigests,
    Value,
    VerifiedBody,
    VoteSaid,
    round_id_of,
)
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import Encoded, SlicePlan, digest_of
from neuroshard.types import NodeId, RunId, WalletId

PLAN = SlicePlan(3 * 4096)
TIMING = ViewTiming(gather_seconds=4.0, redo_seconds=10.0, view_seconds=20.0)
FIRST_ROOT = sha256(b"first").hexdigest()
TICK_SECONDS = 1.0


def hash_of(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:4])


def member_named(name: str) -> GroupMember:
    return GroupMember(NodeId(name), WalletId(sha256(name.encode()).hexdigest()[:16]))


def chain_of(members: Sequence[GroupMember], *, is_open: bool = False) -> Chain:
    """A chain that its owner, the first member, has founded with a seat for each member."""
    seats = [Seat(member.wallet_id, member.node_id, 0) for member in members]
    committee = Committee.founded(seats, is_open=is_open)
    return Chain.founded(Founding("f" * 64, 0, StageStart(0, committee), members[0].wallet_id))


def value_of(**fields: Any) -> Value:
    """A value with these fields; the others are some hash or number."""
    some = dict.fromkeys(("step_id", "statement", "parent", "committee", "root", "next_root", "round_id"), "1" * 64)
    return Value(**{**some, "height": 1, "outer_step": 1, **fields})


@dataclass(frozen=True)
class Envelope:
    sender: NodeId
    to: NodeId
    message: Message


@dataclass
class Participant:
    """A node: its disk survives, the rest does not."""

    member: GroupMember
    root: str
    number: int
    chain: Chain
    records: dict[str, VoteRecord] = field(default_factory=dict[str, VoteRecord])  # the disk
    ended: dict[str, tuple[Step, Complete]] = field(
        default_factory=dict[str, tuple[Step, Complete]]
    )  # on the disk, too
    done: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])  # step, root before, after
    machines: dict[str, RoundStateMachine] = field(default_factory=dict[str, RoundStateMachine])  # by step id
    accused: list[Accuse] = field(default_factory=list[Accuse])
    gave_up: list[str] = field(default_factory=list[str])
    failed: FailedReducers | None = None  # in the last step, as this node saw it; lost in a restart
    is_alive: bool = True
    attempts: int = 0
    objects: bool = False  # votes no

    def signed(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        """A liar signs what it likes, with its own key."""
        return signed_as(self.member, body)


class World:
    """What has been sent and not come is in `pending`."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        seed: int = 0,
        is_open: bool = False,
        plan: SlicePlan = PLAN,
        candidates: int = 1,
        work: RoundWork | None = None,
    ) -> None:
        members = tuple(member_named(name) for name in names)
        self.now = 0.0
        self.random, self.seed = Random(seed), seed
        self.is_open = is_open
        self.pending: list[Envelope] = []
        self.side: dict[NodeId, int] = {}  # of a partition
        self.dies_after: dict[NodeId, int] = {}  # effects
        self.twist: dict[NodeId, Callable[[Liar, Effect], list[Effect]]] = {}  # what a liar does instead
        self.work = work  # None: hashes stand for tensors
        self.plan = plan if work is None else work.plan
        self.broken: dict[NodeId, Callable[[int, bytes], bytes]] = {}  # what a bad memory makes of a node's results
        self.broken_statistics: dict[NodeId, Callable[[int, bytes], bytes]] = {}  # and of its statistics
        self.doubts_norms = set[NodeId]()  # nodes whose bad memory shows them other norms
        self.deals: dict[int, set[frozenset[NodeId]]] = {}  # who reduces in the rounds of a step, as members know it
        self.faults: dict[str, dict[NodeId, EvidenceSaid]] = {}  # what was said about reducers, by step and author
        self.framed: dict[NodeId, FailedReducers] = {}  # what a liar says about them instead
        self.newcomer_seconds = inf  # for which a step waits for what members that do not count send
        self.candidates = candidates  # that the seats measure
        self.choices: dict[NodeId, int] = {}  # of seats that choose another one than the first
        self.calls_the_living = False  # only: who is dead is not called to rounds
        self.sequences: dict[NodeId, int] = {}  # that a member says it has trained on, where it is no round number
        self.sent = Counter[NodeId]()  # slices, by who sent them
        self.received = Counter[NodeId]()
        chain = chain_of(members, is_open=is_open)
        self.nodes = {member.node_id: Participant(member, FIRST_ROOT, 0, chain) for member in members}

    def add(self, name: str, like: NodeId) -> None:
        """A joiner that has fetched the state of another node."""
        source = self.nodes[like]
        member = member_named(name)
        self.nodes[member.node_id] = Participant(member, source.root, source.number, source.chain)

    def proposer(self, view: int) -> NodeId:
        """Of the step that the first node is at."""
        return self._step(next(iter(self.nodes.values()))).proposer(view)

    def start(self, node: NodeId) -> None:
        """Begin the node's next round."""
        one = self.nodes[node]
        step = self._step(one)
        known = one.machines.get(step.id)
        machine = RoundStateMachine(self._setting(one, step), one.records.get(step.id))
        one.machines[step.id] = machine
        one.attempts += 1
        parts = tuple(self.part(node, one.number, one.attempts, index) for index in range(self.plan.count))
        sequences = self.sequences.get(node, 100)
        contribution = EncodedContribution(parts, sequences, upload=1000, seconds=60, made_at=one.attempts)
        effects = machine.enter(contribution, self.now, 0 if known is None else known.views.view + 1)
        self._say_faults(one, step)
        for author, said in self.faults.get(step.id, {}).items():
            effects += machine.hear(author, said, self.now)
        self._carry_out(one, machine, effects)

    def _say_faults(self, one: Participant, step: Step) -> None:
        """Say which reducers failed in the step before. That was long ago, so it is known when the next one begins."""
        node = one.member.node_id
        failed = self.framed.get(node, one.failed)
        if failed is None or (node not in self.framed and failed.value != step.standing.value):
            return
        said = EvidenceSaid(EntryEvidence(faults=(one.signed(ReducerFaults(step.id, failed.silent, failed.wrong)),)))
        self.faults.setdefault(step.id, {})[node] = said
        for other in self.nodes.values():
            if other is not one and step.id in other.machines:
                machine = other.machines[step.id]
                self._carry_out(other, machine, machine.hear(node, said, self.now))

    def ask_for_the_end(self, node: NodeId) -> None:
        """Of the step that the node is at; it calls nobody to a round."""
        one = self.nodes[node]
        step = self._step(one)
        setting = replace(self._setting(one, step), expected=frozenset())
        machine = one.machines.setdefault(step.id, RoundStateMachine(setting, one.records.get(step.id)))
        self._carry_out(one, machine, machine.ask_for_the_end())

    def start_all(self) -> None:
        for node in sorted(self.nodes):
            if self.nodes[node].is_alive:
                self.start(node)

    def deliver(self, index: int) -> None:
        """Let a message arrive."""
        envelope = self.pending.pop(index % len(self.pending))
        receiver = self.nodes[envelope.to]
        if not receiver.is_alive or self.side.get(envelope.sender, 0) != self.side.get(envelope.to, 0):
            return
        for machine in list(receiver.machines.values()):
            self._carry_out(receiver, machine, machine.hear(envelope.sender, envelope.message, self.now))

    def drop(self, index: int) -> None:
        self.pending.pop(index % len(self.pending))

    def advance(self, seconds: float) -> None:
        """Time goes on for everybody, with a tick each second."""
        for _ in range(max(1, round(seconds / TICK_SECONDS))):
            self.now += TICK_SECONDS
            for one in self.nodes.values():
                for machine in list(one.machines.values()) if one.is_alive else []:
                    self._carry_out(one, machine, machine.tick(self.now))

    def kill(self, node: NodeId) -> None:
        one = self.nodes[node]
        one.is_alive, one.failed = False, None
        one.machines.clear()

    def restart(self, node: NodeId) -> None:
        """With what was on the disk: state, and votes."""
        self.nodes[node].is_alive = True
        self.dies_after.pop(node, None)
        one = self.nodes[node]
        for step, completed in one.ended.values():
            one.machines[step.id] = RoundStateMachine(self._setting(one, step), None, completed)
        self.start(node)

    def settle(self, limit_seconds: float = 4000.0, *, until: Callable[[], bool] | None = None) -> bool:
        """Everything arrives, in random order, until nothing is to be waited for; whether that came."""
        end = self.now + limit_seconds
        is_done = until or (lambda: self.all_done(1))
        while self.now < end:
            while self.pending and not is_done():
                self.deliver(self.random.randrange(len(self.pending)))
            if is_done():
                return True
            self.advance(TICK_SECONDS)
        return False

    def all_done(self, steps: int) -> bool:
        return all(len(one.done) >= steps for one in self.nodes.values() if one.is_alive)

    def check_safety(self, liars: Iterable[NodeId] = ()) -> None:
        """No two honest members have completed one outer step with different bytes."""
        after: dict[tuple[int, str], str] = {}
        for name, one in self.nodes.items():
            if name not in set(liars):
                for number, before, root in one.done:
                    assert after.setdefault((number, before), root) == root, f"step {number} ended in two ways"
        assert len({number for number, _ in after}) == len(after), "two histories"

    def _step(self, one: Participant) -> Step:
        chain = one.chain
        return Step(RunId("1" * 64), 0, one.number, one.root, "terms", chain.standing, chain.ledger, chain.owner)

    def _setting(self, one: Participant, step: Step) -> RoundConfig:
        def sign(body: AnyBody) -> VerifiedBody[AnyBody]:
            return signed_as(one.member, body)

        called = (other for other in self.nodes.values() if other.is_alive or not self.calls_the_living)
        expected = frozenset(other.member.node_id for other in called if other.root == one.root)

        def fits(index: int, data: Encoded) -> bool:
            return len(data) <= 64 if self.work is None else self.work.is_slice(self.work.codec, index, data)

        secret = f"{self.seed} {one.member.node_id} {one.attempts}".encode()
        config = RoundConfig(step, self.plan, one.member, expected, sign, fits, fits, TIMING, self.candidates)
        excerpts = None if self.work is None else self.work.excerpts
        return replace(config, secret=secret, excerpts=excerpts, newcomer_seconds=self.newcomer_seconds)

    def part(self, node: NodeId, number: int, attempts: int, index: int) -> bytes:
        """A slice of a node's contribution to a step."""
        if self.work is not None:
            return self.work.codec.encode(torch.split(self._numbers(node, number), self.plan.width)[index])
        return sha256(f"{node} {number} {attempts} {index}".encode()).digest()

    @cache  # noqa: B019
    def _numbers(self, node: NodeId, number: int) -> Tensor:
        """A contribution: what all have in common, and what is its own."""
        common, own = (Generator().manual_seed(hash_of(f"{some} {number}")) for some in ("", node))
        return torch.randn(self.plan.length, generator=common) + torch.randn(self.plan.length, generator=own)

    def _carry_out(self, one: Participant, machine: RoundStateMachine, effects: list[Effect]) -> None:
        for effect in effects:
            if not one.is_alive:
                return
            node = one.member.node_id
            if node in self.dies_after:
                self.dies_after[node] -= 1
                if self.dies_after[node] < 0:
                    self.kill(node)
                    return
            twist = self.twist.get(node)
            for twisted in [effect] if twist is None else twist(one, effect):
                self._do(one, machine, twisted)

    def _do(self, one: Participant, machine: RoundStateMachine, effect: Effect) -> None:
        node = one.member.node_id
        match effect:
            case Say(to, message):
                slices = len(message.slices) if isinstance(message, ContributionSent | ResultSaid) else 0
                self.sent[node] += slices * len(to)
                self.received.update(dict.fromkeys(to, slices))
                self.pending += [Envelope(node, other, message) for other in sorted(to) if other in self.nodes]
            case Persist(record):
                one.records[record.step_id] = record
            case Accuse():
                one.accused.append(effect)
            case GiveUp(reason):
                one.gave_up.append(reason)
            case Complete(certificate, aggregate):
                assert certificate.phase is Phase.COMMIT
                assert tuple(digest_of(part).hex() for part in aggregate) == certificate.value.aggregate
                one.ended[machine.setting.step.id] = machine.setting.step, effect
                one.failed = machine.failed_reducers(certificate.value)
                one.done.append((one.number, one.root, certificate.value.next_root))
                one.number, one.root = certificate.value.outer_step, certificate.value.next_root
                one.chain = one.chain.extended(certificate)
            case _:
                answer = self._work(one, effect)
                broken = self.broken if isinstance(effect, Reduce) else self.broken_statistics
                if isinstance(effect, Reduce | MakeStatistics) and isinstance(answer, Mapping) and node in broken:
                    answer = {index: broken[node](index, made) for index, made in answer.items()}
                self._carry_out(one, machine, machine.answered(effect, answer))
        exchange = machine._exchange  # pyright: ignore[reportPrivateUsage]
        if exchange is not None:
            slices = exchange._slices  # pyright: ignore[reportPrivateUsage]
            reducing = frozenset(reducer for one in slices for reducer in one.reducers)
            self.deals.setdefault(machine.setting.step.number, set()).add(reducing)

    def _work(self, one: Participant, job: Job) -> JobResult:
        if isinstance(job, CompareNorms) and one.member.node_id in self.doubts_norms:
            return frozenset(job.parts)
        if self.work is not None and isinstance(job, Computation):
            return self.work.answer(job)
        if isinstance(job, CompareBlocks | CompareNorms):
            return frozenset()
        return self._hashed(one, job)

    def _hashed(self, one: Participant, job: MakeStatistics | Judge | Reduce | Choose | Check) -> JobResult:
        match job:
            case MakeStatistics(rows=rows):
                return {index: b"s" + sha256(b"".join(parts)).digest()[:15] for index, parts in rows.items()}
            case Judge(members=members):
                accepted = tuple(row for row, first in enumerate(members.originals) if row == first)
                return Judged(verdict_of(accepted), WeightedSum(accepted, (1.0,) * len(accepted), 1.0))
            case Reduce(rows=rows):
                return {index: b"r" + sha256(b"".join(parts)).digest() for index, parts in rows.items()}
            case Choose():
                return Chosen(self.choices.get(one.member.node_id, 0))
            case Check(digests=digests, work=work):
                root = sha256("".join((one.root, *digests, str(work.choice))).encode()).hexdigest()
                return Checked(root, "worse than before" if one.objects else "")


def verdict_of(accepted: tuple[int, ...]) -> GateVerdict:
    clusters = tuple(Cluster((row,)) for row in accepted)
    return GateVerdict(accepted, {}, (1.0,) * len(accepted), clusters, robust=len(accepted) > 2)


def signed_as(member: GroupMember, body: AnyBody) -> VerifiedBody[AnyBody]:
    return VerifiedBody.of(member, body, repr((member, body)).encode())


class Liar(Protocol):
    """What a lie needs of its author."""

    member: GroupMember
    machines: dict[str, RoundStateMachine]

    def signed(self, body: AnyBody) -> VerifiedBody[AnyBody]: ...


Twist = Callable[[Liar, Effect], list[Effect]]


def halves(to: frozenset[NodeId]) -> tuple[frozenset[NodeId], frozenset[NodeId]]:
    names = sorted(to)
    return frozenset(names[: len(names) // 2]), frozenset(names[len(names) // 2 :])


def wrong_results(one: Liar, effect: Effect) -> list[Effect]:
    """Every slice that it reduces comes out differently."""
    match effect:
        case Say(to, ResultSaid(signed, slices)):
            lies = {index: b"lie" + part for index, part in slices.items()}
            digests = tuple(
                (index, sha256(f"lie {digest}".encode()).hexdigest()) for index, digest in signed.body.digests
            )
            return [Say(to, ResultSaid(one.signed(structs.replace(signed.body, digests=digests)), lies))]
        case _:
            return [effect]


def wrong_statistics(one: Liar, effect: Effect) -> list[Effect]:
    match effect:
        case Say(to, StatementSaid(signed, statistics)):
            lies = {index: b"lie" + part for index, part in statistics.items()}
            digests = tuple((index, digest_of(part).hex()) for index, part in sorted(lies.items()))
            return [Say(to, StatementSaid(one.signed(StatisticsDigests(signed.body.round_id, digests)), lies))]
        case _:
            return [effect]


def two_contributions(_one: Liar, effect: Effect) -> list[Effect]:
    """Other parts to every other reducer than it had promised."""
    match effect:
        case Say(to, ContributionSent(slices=slices) as message) if sum(map(ord, min(to))) % 2:
            return [Say(to, structs.replace(message, slices={index: b"x" + part for index, part in slices.items()}))]
        case _:
            return [effect]


def withheld_contribution(_one: Liar, effect: Effect) -> list[Effect]:
    match effect:
        case Say(message=ContributionSent()):
            return []
        case _:
            return [effect]


def two_votes(one: Liar, effect: Effect) -> list[Effect]:
    """This value to one half, another one to the other."""
    match effect:
        case Say(to, VoteSaid(signed)):
            left, right = halves(to)
            other = structs.replace(signed.body, value=sha256(signed.body.value.encode()).hexdigest())
            return [Say(left, VoteSaid(signed)), Say(right, VoteSaid(one.signed(other)))]
        case _:
            return [effect]


def both_votes(one: Liar, effect: Effect) -> list[Effect]:
    """Two values to everybody."""
    match effect:
        case Say(to, VoteSaid(signed)):
            other = structs.replace(signed.body, value=sha256(signed.body.value.encode()).hexdigest())
            return [effect, Say(to, VoteSaid(one.signed(other)))]
        case _:
            return [effect]


def two_choices(one: Liar, effect: Effect) -> list[Effect]:
    """The second candidate to one half, the last one to the other, whatever the others choose."""
    match effect:
        case Say(to, ChoicesSaid(choices) as said):
            others = [each for each in choices if each.member != one.member]
            lies = [signed_as(one.member, OuterChoice(said.round_id, choice)) for choice in (1, 2)]
            halves_of = zip(halves(to), lies, strict=True)
            return [Say(half, ChoicesSaid((lie, *others))) for half, lie in halves_of]
        case _:
            return [effect]


def two_proposals(one: Liar, effect: Effect) -> list[Effect]:
    """A round without the last member to one half."""
    match effect:
        case Say(to, ProposalSaid(signed, intents, None)) if len(intents) > 2:
            left, right = halves(to)
            fewer = intents[:-1]
            return [Say(left, ProposalSaid(signed, intents)), Say(right, ProposalSaid(signed, fewer))]
        case _:
            return [effect]


def no_memory(_one: Liar, effect: Effect) -> list[Effect]:
    """It writes nothing down."""
    return [] if isinstance(effect, Persist) else [effect]


def far_views(one: Liar, effect: Effect) -> list[Effect]:
    match effect:
        case Say(to, VoteSaid(signed)):
            far = NewView(signed.body.step_id, 9_000, ())
            return [effect, Say(to, NewViewSaid(one.signed(far)))]
        case _:
            return [effect]


def silence(_one: Liar, effect: Effect) -> list[Effect]:
    return [] if isinstance(effect, Say) else [effect]


def honesty(_one: Liar, effect: Effect) -> list[Effect]:
    return [effect]


def votes_far_ahead(one: Liar, effect: Effect) -> list[Effect]:
    """So many votes in views to come that there would be no room for others in the present one."""
    match effect:
        case Say(to, VoteSaid(signed)):
            far = [
                structs.replace(signed.body, view=9_000 + view, phase=phase) for view in range(70) for phase in Phase
            ]
            return [*(Say(to, VoteSaid(one.signed(vote))) for vote in far), effect]
        case _:
            return [effect]


def proposals_far_ahead(one: Liar, effect: Effect) -> list[Effect]:
    """Beside its statement it proposes the same round in a view near the last one."""
    match effect:
        case Say(to, StatementSaid()):
            proposals = list[Effect]()
            for machine in one.machines.values():
                step, intents = machine.setting.step, machine.views.chosen_intents()
                view = next(view for view in range(9_990, 0, -1) if step.proposer(view) == one.member.node_id)
                body = RoundProposal(step.id, view, round_id_of(step.id, view, intents), None)
                proposals.append(Say(to, ProposalSaid(one.signed(body), intents, None)))
            return [*proposals, effect]
        case _:
            return [effect]


LIARS: Mapping[str, Twist] = {
    twist.__name__: twist
    for twist in (
        wrong_results,
        wrong_statistics,
        two_contributions,
        withheld_contribution,
        two_votes,
        both_votes,
        two_choices,
        two_proposals,
        no_memory,
        far_views,
        votes_far_ahead,
        proposals_far_ahead,
        silence,
    )
}


def anything(seed: int) -> Twist:
    """Another lie at every turn."""
    random = Random(seed)

    def lie(one: Liar, effect: Effect) -> list[Effect]:
        return random.choice([*LIARS.values(), honesty])(one, effect)

    return lie
