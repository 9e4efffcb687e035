"""Announcements: the identity, layers and addresses of a node, and the directory namespaces that store them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from neuroshard.identity.strict_json import (
    exact_object,
    flag_field,
    layers_field,
    layers_to_json,
    line_field,
    list_field,
    real_field,
    run_field,
    whole_field,
)
from neuroshard.model.architecture import StagePlan
from neuroshard.types import JsonValue, LayerRange, NodeId, RunId

MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 256
MAX_VERSION_CHARACTERS = 32
_MOST_MEMORY_MB = 10**9
_LATEST = 1e11  # seconds since the epoch


@dataclass(frozen=True)
class Announcement:
    """What others need to know before they connect."""

    run_id: RunId
    parameters_version: int  # of the run, as far as this node knows
    layers: LayerRange | None  # None: it holds no part of the model, or none yet
    addresses: tuple[str, ...]  # multiaddrs that end with /p2p/<this node>
    pool: str | None  # host:port of direct connections for tensors
    started_at: float  # seconds since the epoch
    memory_tier_mb: int
    is_relay: bool
    version: str  # of the software

    def to_json(self) -> Mapping[str, JsonValue]:
        """Every field by name."""
        return {
            "run_id": self.run_id,
            "parameters_version": self.parameters_version,
            "layers": layers_to_json(self.layers),
            "addresses": list(self.addresses[:MAX_ADDRESSES]),
            "pool": self.pool,
            "started_at": round(self.started_at),
            "memory_tier_mb": self.memory_tier_mb,
            "is_relay": self.is_relay,
            "version": self.version,
        }

    @classmethod
    def from_json(cls, value: JsonValue, node_id: NodeId) -> Announcement:
        """Strict reading of what `node_id` announced. Raises ValueError that names the field."""
        fields = exact_object(value, _FIELDS, "announcement")
        pool = fields["pool"]
        return cls(
            run_id=run_field(fields["run_id"], "run_id"),
            parameters_version=whole_field(fields["parameters_version"], 0, 10**9, "parameters_version"),
            layers=layers_field(fields["layers"], "layers"),
            addresses=_addresses(fields["addresses"], node_id),
            pool=None if pool is None else line_field(pool, MAX_ADDRESS_CHARACTERS, "pool"),
            started_at=real_field(fields["started_at"], 0, _LATEST, "started_at"),
            memory_tier_mb=whole_field(fields["memory_tier_mb"], 0, _MOST_MEMORY_MB, "memory_tier_mb"),
            is_relay=flag_field(fields["is_relay"], "is_relay"),
            version=line_field(fields["version"], MAX_VERSION_CHARACTERS, "version"),
        )


_FIELDS = set(Announcement.__dataclass_fields__)


Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS, pattern=r"^/[!-~]*\Z")]  # the transport parses it


def address_field(value: JsonValue, where: str) -> str:
    """Text that may be a multiaddr: whether it is one the transport finds out. Raises ValueError."""
    text = line_field(value, MAX_ADDRESS_CHARACTERS, where)
    if not text.startswith("/") or " " in text:
        raise ValueError(f"{where} must start with / and have no spaces")
    return text


def node_of_address(address: str) -> NodeId:
    """The node that an address leads to: what follows the last /p2p/, or empty."""
    return NodeId(address.rpartition("/p2p/")[2] if "/p2p/" in address else "")


def report_topic(run_id: RunId) -> str:
    """Where nodes of a run report."""
    return f"reports/{run_id}/0"


def _addresses(value: JsonValue, node_id: NodeId) -> tuple[str, ...]:
    addresses = tuple(address_field(text, "addresses") for text in list_field(value, MAX_ADDRESSES, "addresses"))
    if any(node_of_address(address) != node_id for address in addresses):
        raise ValueError("addresses must end with /p2p/ and the announcing node's id")
    return addresses


STAGES_OF_GROUP = 8
GROUPS_OF_LOOK = 4  # that a node asks at a time
MOST_GROUPS_OF_NODE = 16  # in which one node can be found; a keeper takes few records of one node


def directory_namespace(run_id: RunId, group: int = 0) -> str:
    """Where the nodes of one group of a run are found."""
    return f"{run_id}/{group}"


@dataclass(frozen=True)
class DirectoryGroups:
    """The groups of one run; a run of few stages has one."""

    run_id: RunId
    plan: StagePlan

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-len(self.plan) // STAGES_OF_GROUP)

    def of(self, layers: LayerRange | None) -> tuple[str, ...]:
        """The namespaces in which a node with these layers is to be found: without any, in the first."""
        stages = (stage for stage, held in enumerate(self.plan) if layers is not None and _overlap(held, layers))
        groups = sorted({stage // STAGES_OF_GROUP for stage in stages})[:MOST_GROUPS_OF_NODE]
        return tuple(directory_namespace(self.run_id, group) for group in groups or (0,))

    def asked(self, look: int) -> tuple[str, ...]:
        """The namespaces to ask in one of a node's looks, 0, 1, 2, ...: a few, so that each has its turn."""
        groups = range(look * GROUPS_OF_LOOK, look * GROUPS_OF_LOOK + min(GROUPS_OF_LOOK, self.count))
        return tuple(directory_namespace(self.run_id, group % self.count) for group in groups)


def _overlap(a: LayerRange, b: LayerRange) -> bool:
    return a.start < b.stop and b.start < a.stop
