"""How far a round is at one member, for those who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from neuroshard.swarm.certified.effects import Judged
from neuroshard.swarm.certified.roster import Member


class RoundPhase(StrEnum):
    """What a member is at."""

    GATHER = "gather"  # no proposal yet
    EXCHANGE = "exchange"
    VOTE = "vote"  # the aggregate is here, or another one is put to the vote again
    ENDED = "ended"


@dataclass(frozen=True)
class Progress:
    """The present view of a round."""

    view: int  # its number: those before it came to nothing, or were skipped
    phase: RoundPhase
    members: tuple[Member, ...] = ()  # whose contributions are exchanged, in the order of their rows; () before
    judged: Judged | None = None  # on them
    objection: str = ""  # why this member voted against the aggregate
