"""Announcements: the identity, layers and addresses of a node, and the directory namespaces that store them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from neuroshard.identity.strict_json import declared
from neuroshard.model.architecture import StagePlan
from neuroshard.types import JsonValue, LayerRange, NamedRun, NodeId, RunId

MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 256
MAX_VERSION_CHARACTERS = 32
_MOST_MEMORY_MB = 10**9
_LATEST = 1e11  # seconds since the epoch
PRINTABLE = r"\A[ -~]*\Z"
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS, pattern=r"\A/[!-~]*\Z")]  # the transport parses it


@dataclass(frozen=True)
class Announcement:
    """What others need to know before they connect."""

    run_id: NamedRun
    parameters_version: Annotated[int, Meta(ge=0, le=10**9)]  # of the run, as far as this node knows
    layers: LayerRange | None  # None: it holds no part of the model, or none yet
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]  # multiaddrs that end with /p2p/<node>
    pool: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS, pattern=PRINTABLE)] | None  # host:port for tensors
    started_at: Annotated[float, Meta(ge=0, le=_LATEST)]  # seconds since the epoch
    memory_tier_mb: Annotated[int, Meta(ge=0, le=_MOST_MEMORY_MB)]
    is_relay: bool
    version: Annotated[str, Meta(max_length=MAX_VERSION_CHARACTERS, pattern=PRINTABLE)]  # of the software

    def to_json(self) -> Mapping[str, JsonValue]:
        """Every field by name."""
        fields: dict[str, JsonValue] = msgspec.json.decode(msgspec.json.encode(self))
        return {**fields, "addresses": list(self.addresses[:MAX_ADDRESSES]), "started_at": round(self.started_at)}

    @classmethod
    def from_json(cls, value: JsonValue, node_id: NodeId) -> Announcement:
        """Read what `node_id` announced. Raises ValueError that names the field."""
        announcement = declared(value, cls)
        if any(node_of_address(address) != node_id for address in announcement.addresses):
            raise ValueError("addresses must end with /p2p/ and the announcing node's id")
        return announcement


def node_of_address(address: str) -> NodeId:
    """The node that an address leads to: what follows the last /p2p/, or empty."""
    return NodeId(address.rpartition("/p2p/")[2] if "/p2p/" in address else "")


def report_topic(run_id: RunId) -> str:
    """Where nodes of a run report."""
    return f"reports/{run_id}/0"


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
