"""Waypoints: certified values that the run's owner has signed, and through which every chain must pass. Pure.

Keys of members that left can certify another line from an old height on, and so can an old copy of a seat's folder. A
node that knows the owner's newest waypoint takes no such line, and a deputy may not found a stage below it.

The ledger of a value contains milestones: the values at every MILESTONE_HEIGHTS-th height before it, more of the later
ones. So a newcomer sees in the newest ledger whether the line passes through one. The owner signs milestones only.

    the line has at the height of the waypoint   a node
    the signed value                             follows it
    another value                                refuses it, its own line too
    no value yet: it is shorter                  keeps what it has
    a milestone that the ledger keeps no more    follows it: after some months nothing shows the difference

An invitation names such a value, too: the inviter's node has verified it, and the key that signs the invitation signs
it. It counts like a waypoint for the nodes that enter with the invitation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from neuroshard.consensus.committee import Height
from neuroshard.identity import hash_parts
from neuroshard.identity.claims import Signed, sign_message
from neuroshard.identity.signing import Signer
from neuroshard.types import DAY_SECONDS, LATEST_TIME, HexDigest, NamedRun

MILESTONE_HEIGHTS = 128
MILESTONES_PER_LEVEL = 8
LASTING_LEVEL = 3  # ledgers keep such a milestone for 16,384 heights: an invitation is valid for days
MAX_MILESTONES = 48 * MILESTONES_PER_LEVEL
MAX_STAGES = 128
KEPT_PER_STAGE = 8  # waypoints, the newest: two that contradict each other are both shown
PERIOD_SECONDS = 7 * DAY_SECONDS
SKEW_SECONDS = DAY_SECONDS
_KIND = "waypoint"
StageIndex = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]


class Milestone(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The certified value at one height of a chain."""

    height: Height
    value: HexDigest

    @property
    def level(self) -> int:
        """Number of factors 2 in the milestone's number: ledgers keep those of a higher level for longer."""
        count = self.height // MILESTONE_HEIGHTS
        return (count & -count).bit_length() - 1


def with_milestone(milestones: Iterable[Milestone], milestone: Milestone) -> tuple[Milestone, ...]:
    """Add the newest milestone and drop those before the last MILESTONES_PER_LEVEL of their level."""
    kept, counts = list[Milestone](), Counter[int]()
    for each in (milestone, *reversed(tuple(milestones))):
        counts[each.level] += 1
        if counts[each.level] <= MILESTONES_PER_LEVEL:
            kept.append(each)
    return tuple(reversed(kept))


def keeps_milestone(milestone: Milestone, height: int) -> bool:
    """Whether the ledger of the value at a height above the milestone still contains the milestone."""
    if not milestone.height or milestone.height % MILESTONE_HEIGHTS:
        return False  # a value of another height, as a careless invitation may name it
    spacing = 2 << milestone.level
    return (height - 1) // MILESTONE_HEIGHTS - milestone.height // MILESTONE_HEIGHTS < spacing * MILESTONES_PER_LEVEL


def lasting_milestone(milestones: Iterable[Milestone]) -> Milestone | None:
    """The milestone for an invitation: the newest that ledgers keep for long, or the one that they keep longest."""
    known = tuple(milestones)
    level = min(LASTING_LEVEL, max((each.level for each in known), default=0))
    return max((each for each in known if each.level >= level), key=lambda each: each.height, default=None)


class Point(NamedTuple):
    """A value through which a chain must pass at this node."""

    milestone: Milestone
    named_by: str  # for people, as in "the value that ..."


class Waypoint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner's statement that a stage's chain passes through this value."""

    run_id: NamedRun
    stage: StageIndex
    statement: HexDigest  # the foundation, which names the epoch
    epoch: Height
    milestone: Milestone
    made_at: Annotated[int, Meta(ge=0, le=LATEST_TIME)]  # seconds since 1970; decides only when the next one is due

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and height."""
        return self.epoch, self.milestone.height


class SignedWaypoint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """A waypoint and the signature of the run's owner."""

    signed: Signed[Waypoint]

    @classmethod
    def sign(cls, owner: Signer, waypoint: Waypoint) -> SignedWaypoint:
        """Sign with the key of the run's owner."""
        return cls(sign_message(owner, _KIND, waypoint))

    @cached_property
    def waypoint(self) -> Waypoint:
        """The content. Raises MalformedClaimError."""
        return self.signed.read(Waypoint)

    @cached_property
    def id(self) -> str:
        """Hex hash of the signed bytes without the signature."""
        return hash_parts("neuroshard/waypoint", self.signed.body).hex()

    def verify(self, owner: bytes) -> None:
        """Raise SignatureError unless the run's owner signed it."""
        self.signed.verify(owner, _KIND)


def newest_of(waypoints: Iterable[SignedWaypoint]) -> tuple[SignedWaypoint, ...]:
    """The newest KEPT_PER_STAGE waypoints of one stage, the newest first: the same for every order of arrival."""
    by_id = {each.id: each for each in waypoints}
    return tuple(sorted(by_id.values(), key=lambda each: (each.waypoint.place, each.id), reverse=True)[:KEPT_PER_STAGE])


def valid_points(waypoints: Iterable[SignedWaypoint]) -> list[Waypoint]:
    """The waypoints of one stage that no other one contradicts, the newest first. The rest count for nothing."""
    found = [each.waypoint for each in waypoints]
    values: Mapping[tuple[str, int], set[str]] = {(each.statement, each.milestone.height): set() for each in found}
    for each in found:
        values[each.statement, each.milestone.height].add(each.milestone.value)
    return [each for each in found if len(values[each.statement, each.milestone.height]) == 1]


def next_milestone(milestones: Iterable[Milestone], above: int) -> Milestone | None:
    """The milestone that the owner signs next: of those above a height, the one that ledgers keep longest."""
    return max(
        (milestone for milestone in milestones if milestone.height > above),
        key=lambda each: (each.level, each.height),
        default=None,
    )


def is_waypoint_due(last: Waypoint | None, now: float, waited_seconds: float) -> bool:
    """Whether the owner's node signs now: weekly, by the clock or by the time it has waited since its start.

    A date in the future does not stop it for longer than a clock may be wrong.
    """
    age = PERIOD_SECONDS if last is None else now - last.made_at
    return not -SKEW_SECONDS <= age < PERIOD_SECONDS or waited_seconds >= PERIOD_SECONDS
