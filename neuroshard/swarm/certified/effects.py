"""What the state machine of a round wants done: messages sent, votes written down, work computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from neuroshard.aggregation import Reduction, Verdict
from neuroshard.swarm.certified.messages import Message, Quorum
from neuroshard.swarm.certified.slices import Encoded
from neuroshard.types import NodeId


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

    verdict: Verdict
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
Answer: TypeAlias = Mapping[int, bytes] | Judged | Checked
Effect: TypeAlias = Say | Persist | Job | Accuse | Complete | GiveUp
