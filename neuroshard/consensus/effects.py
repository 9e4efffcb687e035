"""Configuration, effects and progress of the state machine of a round: its inputs and outputs as frozen values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol, TypeAlias, TypeVar

from neuroshard.aggregation import GateVerdict, Reduction
from neuroshard.consensus.roster import Encoded, GroupMember, SlicePlan, Step, digest_of
from neuroshard.consensus.round_messages import MAX_MEMBERS, Body, Message, Quorum, Signed
from neuroshard.types import NodeId

MAX_DOUBLINGS = 3
AnyBody = TypeVar("AnyBody", bound=Body)


class Sign(Protocol):
    """Signs a body in this node's name."""

    def __call__(self, body: AnyBody, /) -> Signed[AnyBody]:
        """The body with its claim."""
        ...


@dataclass(frozen=True)
class EncodedContribution:
    """What a member brings to a round."""

    parts: tuple[bytes, ...] = field(repr=False)  # the encoded slices
    sequences: int  # trained on since the last round
    upload: int  # bytes a second
    made_at: int  # milliseconds since 1970

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Of the parts. Takes a while the first time."""
        return tuple(digest_of(part) for part in self.parts)


@dataclass(frozen=True)
class ViewTiming:
    """Seconds, counted by the member's own clock from the begin of a view; all but the first double with each view."""

    gather_seconds: float = 10.0  # a proposer waits so long for those who were called; any time for a quorum
    redo_seconds: float = 30.0  # then third reducers take over
    view_seconds: float = 60.0  # then the next proposer has its turn

    def of_view(self, tries: int) -> ViewTiming:
        """Those of the view after so many that came to nothing."""
        factor = 2.0 ** min(tries, MAX_DOUBLINGS)
        return ViewTiming(self.gather_seconds, factor * self.redo_seconds, factor * self.view_seconds)


@dataclass(frozen=True)
class RoundConfig:
    """One member's part in one step."""

    step: Step
    plan: SlicePlan
    member: GroupMember  # this node
    expected: frozenset[NodeId]  # who was called: a proposer waits for them
    sign: Sign
    is_part: Callable[[int, Encoded], bool]  # whether bytes can be the slice of this number of a contribution
    is_result: Callable[[int, Encoded], bool]  # and that of an aggregate
    timing: ViewTiming = ViewTiming()
    most_members: int = MAX_MEMBERS  # who contribute

    @property
    def self_id(self) -> NodeId:
        """This node."""
        return self.member.node_id

    def next_view(self, view: int) -> int:
        """The first view from this one on that is somebody's turn."""
        views = range(view, view + len(self.step.roster.members))
        return next((one for one in views if self._is_turn(one)), view)

    def timing_of(self, view: int, first: int) -> ViewTiming:
        """Deadlines in a view of a member that began with view `first`: views that were nobody's turn are no tries."""
        counted = range(first, min(view, first + MAX_DOUBLINGS * len(self.step.roster.members)))
        return self.timing.of_view(sum(self._is_turn(one) for one in counted))

    def _is_turn(self, view: int) -> bool:
        """Whether a view's proposer was called, as a quorum of the voters was: the others do not answer.

        Members that were called with other names than these skip other views, and meet again since everybody follows
        the farthest one. Where liars are tolerated nobody follows a single one, so there no view is skipped.
        """
        return self.step.tolerated > 0 or self.step.proposer(view) in self.awaited

    @property
    def awaited(self) -> frozenset[NodeId]:
        """Whom to wait for: who was called. Who only asks how the step ended has called nobody: the voters."""
        return self.expected or self.step.roster.nodes

    @property
    def everybody(self) -> frozenset[NodeId]:
        """Voters and whoever was called."""
        return self.step.roster.nodes | self.expected

    @property
    def others(self) -> frozenset[NodeId]:
        """Whom everything that is public is told."""
        return self.everybody - {self.self_id}


@dataclass(frozen=True)
class Say:
    """Send a message to these nodes; a lost one costs time, never safety."""

    to: frozenset[NodeId]
    message: Message


@dataclass(frozen=True)
class VoteRecord:
    """What a voter must remember whatever happens to its computer, before anybody hears its vote."""

    step_id: str
    view: int  # of the newest vote
    prepared: str  # hex digest of the value that was prepared in that view
    lock: Quorum | None = None
    aggregate: tuple[Encoded, ...] = field(default=(), repr=False)  # the locked value's


@dataclass(frozen=True)
class Persist:
    """Write the record and wait until it is on the disk; only then carry out the effects after this one."""

    record: VoteRecord


@dataclass(frozen=True)
class MakeStatistics:
    """Statistics of slices, from the encoded parts of all members in their order; answered by bytes for each slice."""

    round_id: str
    rows: Mapping[int, Sequence[Encoded]] = field(repr=False)


@dataclass(frozen=True)
class Judge:
    """One verdict on whole contributions, from the statistics of all slices; answered by Judged."""

    round_id: str
    statistics: Sequence[Encoded] = field(repr=False)
    copies: frozenset[int]  # rows whose bytes are another's that comes before
    sequences: Sequence[int]  # of each row


@dataclass(frozen=True)
class Judged:
    """Answer to Judge."""

    verdict: GateVerdict
    reduction: Reduction | None  # how the accepted become one; None when the round comes to nothing
    abort_reason: str = ""


@dataclass(frozen=True)
class Reduce:
    """The encoded aggregate of slices; answered by bytes for each."""

    round_id: str
    rows: Mapping[int, Sequence[Encoded]] = field(repr=False)
    reduction: Reduction


@dataclass(frozen=True)
class Check:
    """The state that an aggregate leads to, and whether it is worth a vote; answered by Checked."""

    aggregate: tuple[Encoded, ...] = field(repr=False)
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """Answer to Check."""

    next_root: str  # hex; "" when the aggregate leads nowhere from here
    objection: str = ""  # why this node votes no


@dataclass(frozen=True)
class Accuse:
    """A member broke its word; `proof` are the claims that show it, if it can be shown."""

    node: NodeId
    what: str
    proof: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Complete:
    """The step has ended with this certificate."""

    certificate: Quorum
    aggregate: tuple[Encoded, ...] = field(repr=False)


@dataclass(frozen=True)
class GiveUp:
    """This round comes to nothing; what was locked stays locked."""

    reason: str


Computation: TypeAlias = MakeStatistics | Judge | Reduce
Job: TypeAlias = Computation | Check
JobResult: TypeAlias = Mapping[int, bytes] | Judged | Checked
Effect: TypeAlias = Say | Persist | Job | Accuse | Complete | GiveUp


class RoundPhase(StrEnum):
    """What a member is at."""

    GATHER = "gather"  # no proposal yet
    EXCHANGE = "exchange"
    VOTE = "vote"  # the aggregate is here, or another one is put to the vote again
    ENDED = "ended"


@dataclass(frozen=True)
class RoundProgress:
    """The present view of a round."""

    view: int  # its number: those before it came to nothing, or were skipped
    phase: RoundPhase
    members: tuple[GroupMember, ...] = ()  # whose contributions are exchanged, in the order of their rows; () before
    judged: Judged | None = None  # on them
    objection: str = ""  # why this member voted against the aggregate
