"""What stays the same for one member through all views of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from neuroshard.swarm.certified.bodies import MAX_MEMBERS, Body
from neuroshard.swarm.certified.messages import Signed
from neuroshard.swarm.certified.roster import Member, Step
from neuroshard.swarm.certified.slices import Encoded, SlicePlan, digest_of
from neuroshard.types import NodeId

MAX_DOUBLINGS = 3
AnyBody = TypeVar("AnyBody", bound=Body)


class Sign(Protocol):
    """Signs a body in this node's name."""

    def __call__(self, body: AnyBody, /) -> Signed[AnyBody]:
        """The body with its claim."""
        ...


@dataclass(frozen=True)
class Contribution:
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
class Timing:
    """Seconds, counted by the member's own clock from the begin of a view; all but the first double with each view."""

    gather_seconds: float = 10.0  # a proposer waits so long for those who were called; any time for a quorum
    redo_seconds: float = 30.0  # then third reducers take over
    view_seconds: float = 60.0  # then the next proposer has its turn

    def of_view(self, tries: int) -> Timing:
        """Those of the view after so many that came to nothing."""
        factor = 2.0 ** min(tries, MAX_DOUBLINGS)
        return Timing(self.gather_seconds, factor * self.redo_seconds, factor * self.view_seconds)


@dataclass(frozen=True)
class Setting:
    """One member's part in one step."""

    step: Step
    plan: SlicePlan
    member: Member  # this node
    expected: frozenset[NodeId]  # who was called: a proposer waits for them
    sign: Sign
    is_part: Callable[[int, Encoded], bool]  # whether bytes can be the slice of this number of a contribution
    is_result: Callable[[int, Encoded], bool]  # and that of an aggregate
    timing: Timing = Timing()
    most_members: int = MAX_MEMBERS  # who contribute

    @property
    def self_id(self) -> NodeId:
        """This node."""
        return self.member.node_id

    def next_view(self, view: int) -> int:
        """The first view from this one on that is somebody's turn."""
        views = range(view, view + len(self.step.roster.members))
        return next((one for one in views if self._is_turn(one)), view)

    def timing_of(self, view: int, first: int) -> Timing:
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
