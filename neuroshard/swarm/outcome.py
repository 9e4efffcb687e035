"""How a round ends: completed with one aggregate for everybody, or abandoned without any change."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from torch import Tensor

from neuroshard.aggregation import Refusal
from neuroshard.types import NodeId


class AbortKind(StrEnum):
    """Causes of an abandoned round."""

    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    MALFORMED = "malformed"
    REFUSED = "refused"
    DISAGREEMENT = "disagreement"


@dataclass(frozen=True)
class RefusedMember:
    """A member whose contribution the gates refused."""

    member: NodeId
    reason: Refusal


@dataclass(frozen=True)
class Completed:
    """All members hold the same aggregate. In a group of one it may share memory with the contribution."""

    aggregate: Tensor = field(repr=False)  # (d,) fp32
    members: tuple[NodeId, ...]
    accepted: tuple[NodeId, ...]
    refused: tuple[RefusedMember, ...]
    root: str  # hex; equal on all members
    robust: bool  # False for one or two members: then a wrong one could not be told


@dataclass(frozen=True)
class Aborted:
    """Nothing changed; the work is part of the next contribution."""

    reason: str  # in words
    kind: AbortKind


RoundOutcome: TypeAlias = Completed | Aborted
