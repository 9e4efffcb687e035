"""Who takes part in a round, and what they must agree on before they begin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from neuroshard.aggregation import AggregatorConfig, CentredClipping, Krum, Mean, Median, MultiKrum, TrimmedMean
from neuroshard.identity import canonical_json, hash_parts
from neuroshard.types import NodeId, RunId

MAX_MEMBERS = 1024


@dataclass(frozen=True)
class Group:
    """The members of a round, this node among them. A node alone is a group of one.

    Members are kept sorted: their order decides the order of sums, which must be everybody's.
    """

    members: tuple[NodeId, ...]
    self_id: NodeId

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members):
            raise ValueError("a member appears twice in the group; one peer counts once")
        if self.self_id not in self.members or len(self.members) > MAX_MEMBERS:
            raise ValueError(f"a group has this node and at most {MAX_MEMBERS} members")
        object.__setattr__(self, "members", tuple(sorted(self.members)))

    @classmethod
    def alone(cls, self_id: NodeId) -> Group:
        """The group of one."""
        return cls((self_id,), self_id)

    @property
    def others(self) -> tuple[NodeId, ...]:
        """All members but this node."""
        return tuple(member for member in self.members if member != self.self_id)


@dataclass(frozen=True)
class RoundDescriptor:
    """What a round is about; members whose descriptors differ do not exchange anything."""

    run: RunId
    stage: int
    outer_step: int  # the one that the round would complete, counted from 0
    codec: str  # Codec.name
    aggregator: str  # aggregator_name of the configuration
    schema_hash: str  # hex digest of the names and shapes behind the vector
    view: int = 0  # rounds of this outer step that were abandoned before

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 (32 bytes) over the canonical JSON of all fields."""
        value = {
            "run": self.run,
            "stage": self.stage,
            "outer_step": self.outer_step,
            "codec": self.codec,
            "aggregator": self.aggregator,
            "schema_hash": self.schema_hash,
            "view": self.view,
        }
        return hash_parts("neuroshard/round-descriptor", canonical_json(value))


def round_id(descriptor: RoundDescriptor, group: Group) -> bytes:
    """SHA-256 (32 bytes) of the descriptor and the members: messages of another round do not carry it."""
    return hash_parts("neuroshard/round", descriptor.hash, *group.members)


def aggregator_name(config: AggregatorConfig) -> str:
    """Name and settings of an aggregator, for the descriptor."""
    match config:
        case TrimmedMean(trim_fraction):
            return f"trimmed_mean({float(trim_fraction)!r})"
        case Median():
            return "median"
        case Mean():
            return "mean"
        case Krum():
            return "krum"
        case MultiKrum():
            return "multi_krum"
        case CentredClipping():
            return "centred_clipping"
