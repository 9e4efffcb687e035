"""Configuration, effects and progress of the state machine of a round: its inputs and outputs as frozen values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf
from statistics import median
from typing import Protocol, TypeAlias

from torch import Tensor

from neuroshard.aggregation import GateVerdict, MemberFacts, Reduction
from neuroshard.consensus.chain import Step
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.round_messages import MAX_MEMBERS, AnyBody, Message, Phase, Quorum, VerifiedBody, Vote
from neuroshard.consensus.slices import Block, Encoded, SlicePlan, digest_of
from neuroshard.identity.node_revocations import RevokedPairs
from neuroshard.optim.outer import CertifiedWork
from neuroshard.types import NodeId

MAX_DOUBLINGS = 3
LEAST_VIEW_SECONDS = 20.0
SLOWEST_BYTES_PER_SECOND = 250_000
DEVIATIONS = 4.0  # median absolute deviations above the median


class Sign(Protocol):
    """Signs a body with this node's key."""

    def __call__(self, body: AnyBody, /) -> VerifiedBody[AnyBody]:
        """Return the body together with its signed claim."""
        ...


@dataclass(frozen=True)
class EncodedContribution:
    """A member's contribution to a round, encoded in slices."""

    parts: tuple[Encoded, ...] = field(repr=False)  # the encoded slices
    sequences: int  # trained since the last round
    upload: int  # bytes per second
    seconds: int  # since this node adopted the last value with an aggregate
    made_at: int  # milliseconds since the epoch
    exchange: int | None = None  # code of the duration of this member's last exchange
    sequence: int | None = None  # code of the time in which it trains one sequence

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the parts. The first call computes them, which takes a while."""
        return tuple(map(digest_of, self.parts))


@dataclass(frozen=True)
class ViewTiming:
    """Deadlines in seconds from the start of a view, by the member's own clock.

    All but the first double with each view.
    """

    gather_seconds: float = 10.0  # a proposer waits this long for called members, and without limit for a quorum
    redo_seconds: float = 30.0  # after this time members compute the slices without a result
    view_seconds: float = 60.0  # after this time it is the next proposer's turn

    @classmethod
    def after(cls, durations: Collection[float], encoded_bytes: int) -> ViewTiming:
        """Deadlines from the durations of earlier rounds in seconds: median + k MAD; before the first from the size."""
        if durations:
            middle = median(durations)
            usual = middle + DEVIATIONS * median(abs(one - middle) for one in durations)
        else:
            usual = 4 * encoded_bytes / SLOWEST_BYTES_PER_SECOND
        view = max(LEAST_VIEW_SECONDS, 3 * usual)
        return cls(gather_seconds=view / 4, redo_seconds=view / 2, view_seconds=view)


@dataclass(frozen=True)
class RoundConfig:
    """One member's role in one step."""

    step: Step
    plan: SlicePlan
    member: GroupMember  # this node
    expected: frozenset[NodeId]  # members that were here when the step began; a proposer waits for them
    sign: Sign
    is_part: Callable[[int, Encoded], bool]  # whether bytes can be this slice of a contribution
    is_result: Callable[[int, Encoded], bool]  # whether bytes can be this slice of an aggregate
    timing: ViewTiming = ViewTiming()
    candidates: int = 1  # for the outer step, that the seats measure; 1: they measure none
    most_members: int = MAX_MEMBERS  # at most, with a contribution
    may_vote: bool = True  # False: this node does not know which votes it has sent
    invited: frozenset[NodeId] = frozenset()  # strangers that may join and get this member's intent
    newcomer_seconds: float = inf  # for which the step waits for what members that do not count send
    revoked: RevokedPairs = frozenset()  # these nodes get no seat; it may grow during the step
    secret: bytes = b""  # random, for the choice of what this node checks
    # of an own contribution, for the audits of others; None: its blocks cannot be decoded alone
    excerpts: Callable[[Sequence[Encoded], Sequence[Block]], bytes] | None = None

    @property
    def is_seat(self) -> bool:
        """Whether this node votes in this step."""
        return self.may_vote and self.member in self.step.committee.members

    def next_view(self, view: int) -> int:
        """The first view from this one on whose proposer is expected."""
        views = range(view, view + len(self.step.seats))
        return next(filter(self._is_turn, views), view)

    def timing_of(self, view: int, first: int) -> ViewTiming:
        """Deadlines in a view of a member that began with view `first`. Skipped views do not count as failed ones."""
        counted = range(first, min(view, first + MAX_DOUBLINGS * len(self.step.seats)))
        usual, factor = self.timing, 2.0 ** min(sum(map(self._is_turn, counted)), MAX_DOUBLINGS)
        return ViewTiming(usual.gather_seconds, factor * usual.redo_seconds, factor * usual.view_seconds)

    def _is_turn(self, view: int) -> bool:
        """Whether a view's proposer is expected: the others do not answer.

        Members that expect different seats skip different views. They meet again because every member follows the
        farthest one. Where liars are tolerated no member follows a single other one, so there no view is skipped.
        """
        return self.step.committee.faults > 0 or self.step.proposer(view) in self.awaited

    @property
    def awaited(self) -> frozenset[NodeId]:
        """The members to wait for. A member that only asks how the step ended expects none and waits for the seats."""
        return self.expected or self.step.seats

    @property
    def reachable(self) -> frozenset[NodeId]:
        """Members that were here when the step began, with this node."""
        return self.expected | {self.member.node_id}

    @property
    def others(self) -> frozenset[NodeId]:
        """The other participants, which get all public messages."""
        return (self.step.seats | self.expected) - {self.member.node_id}


@dataclass(frozen=True)
class Say:
    """Send a message to these nodes. A lost message costs time, never safety."""

    to: frozenset[NodeId]
    message: Message


@dataclass(frozen=True)
class VoteRecord:
    """The votes a voter must remember across a crash. It is written before any peer sees the vote."""

    step_id: str
    view: int  # of the newest vote
    prepared: str  # hex digest of the value prepared in that view
    lock: Quorum | None = None
    aggregate: tuple[Encoded, ...] = field(default=(), repr=False)  # of the locked value
    is_incomplete: bool = False  # the voter has seen a vote of its own that was missing here: it votes no more

    def includes(self, vote: Vote) -> bool:
        """Whether a vote of this voter in this step is in the record, or earlier than the vote of its phase there."""
        if vote.phase is Phase.PREPARE:
            return vote.view < self.view or (vote.view, vote.value) == (self.view, self.prepared)
        lock = self.lock
        return lock is not None and (vote.view < lock.view or (vote.view, vote.value) == (lock.view, lock.value.digest))


@dataclass(frozen=True)
class Persist:
    """Write the record and wait until it is on disk. Only then carry out the effects after this one."""

    record: VoteRecord


@dataclass(frozen=True)
class MakeStatistics:
    """Compute statistics of slices from the encoded parts of all members, in member order.

    Answered with bytes per slice.
    """

    round_id: str
    rows: Mapping[int, Sequence[Encoded]] = field(repr=False)
    members: MemberFacts


@dataclass(frozen=True)
class Judge:
    """Compute one verdict on whole contributions from the statistics of all slices. Answered with Judged."""

    round_id: str
    statistics: Sequence[Encoded] = field(repr=False)
    members: MemberFacts


@dataclass(frozen=True)
class Judged:
    """The answer to Judge."""

    verdict: GateVerdict
    reduction: Reduction | None  # how the accepted contributions are combined; None if the round must be abandoned
    abort_reason: str = ""


@dataclass(frozen=True)
class Reduce:
    """Compute the encoded aggregate of slices. Answered with bytes per slice."""

    round_id: str
    rows: Mapping[int, Sequence[Encoded]] = field(repr=False)
    reduction: Reduction


@dataclass(frozen=True)
class CompareBlocks:
    """Compute blocks of the aggregate from the encoded blocks of the accepted contributions.

    Answered with the slices in which they differ from the aggregate; None if the blocks cannot be decoded.
    """

    round_id: str
    blocks: Sequence[Block]
    rows: Mapping[int, bytes] = field(repr=False)  # by the number of the member
    aggregate: Sequence[Encoded] = field(repr=False)
    reduction: Reduction


@dataclass(frozen=True)
class CompareNorms:
    """Compare the norms of a contribution with those in the statistics of slices.

    Answered with the slices in which they differ.
    """

    round_id: str
    row: int  # number of the member
    parts: Mapping[int, Encoded] = field(repr=False)
    statistics: Mapping[int, Encoded] = field(repr=False)
    members: MemberFacts


@dataclass(frozen=True)
class Choose:
    """Measure the candidates for the outer step on an aggregate. Answered with Chosen."""

    round_id: str
    aggregate: tuple[Encoded, ...] = field(repr=False)


@dataclass(frozen=True)
class Chosen:
    """The answer to Choose."""

    choice: int


@dataclass(frozen=True)
class Check:
    """Compute the state that an aggregate and the members' work lead to, and decide whether to vote for it.

    Answered with Checked.
    """

    aggregate: tuple[Encoded, ...] = field(repr=False)
    digests: tuple[str, ...]
    work: CertifiedWork


@dataclass(frozen=True)
class Checked:
    """The answer to Check."""

    next_root: str  # hex; "" if the aggregate does not apply to this node's state
    objection: str = ""  # the reason for a vote against it


@dataclass(frozen=True)
class Accuse:
    """Report that a member broke the protocol. `proof` contains the claims that show it, if any do."""

    node: NodeId
    what: str
    proof: tuple[bytes, ...] = ()
    is_malice: bool = True  # False: the error is shown and costs no reputation


@dataclass(frozen=True)
class Complete:
    """The step has ended with this certificate."""

    certificate: Quorum
    aggregate: tuple[Encoded, ...] = field(repr=False)
    vector: Tensor | None = field(default=None, repr=False, compare=False)  # the aggregate, if it was decoded to vote


@dataclass(frozen=True)
class GiveUp:
    """The round is abandoned. A locked value stays locked."""

    reason: str


Computation: TypeAlias = MakeStatistics | Judge | Reduce | CompareBlocks | CompareNorms
Job: TypeAlias = Computation | Choose | Check
JobResult: TypeAlias = Mapping[int, Encoded] | Judged | frozenset[int] | Chosen | Checked | None
Effect: TypeAlias = Say | Persist | Job | Accuse | Complete | GiveUp


@dataclass(frozen=True)
class FailedReducers:
    """The reducers of a step that failed one member, and the value that ended the step."""

    value: str  # hex digest
    silent: tuple[NodeId, ...]  # they had what they needed, and sent no results
    wrong: tuple[NodeId, ...]  # where members may lie: their statistics or results are false


class RoundPhase(StrEnum):
    """The phase of a member."""

    GATHER = "gather"  # no proposal yet
    EXCHANGE = "exchange"
    VOTE = "vote"  # the aggregate is here, or an earlier one is voted on again
    ENDED = "ended"


@dataclass(frozen=True)
class RoundProgress:
    """The state of the current view of a round, for the status."""

    view: int  # number of the view: the earlier ones failed or were skipped
    phase: RoundPhase
    members: tuple[GroupMember, ...] = ()  # the contributors, in row order; () before the proposal
    judged: Judged | None = None  # the verdict on them
    objection: str = ""  # why this member voted against the aggregate
    skipped_audits: int = 0  # in this view
    round_id: str | None = None  # of the exchange
    own: EncodedContribution | None = None  # this member's contribution to the exchange
