"""Announcements: the identity, layers and addresses of a node, and the directory namespaces that store them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from neuroshard.identity.admissions import AdmissionBytes
from neuroshard.identity.invitations import PassBytes
from neuroshard.model.architecture import StagePlan
from neuroshard.network.transport import DirectoryRecord
from neuroshard.types import MAX_ADDRESS_CHARACTERS, PRINTABLE, LayerRange, NamedRun, RunId, UnixSeconds

MAX_VERSION_CHARACTERS = 32
_MOST_MEMORY_MB = 10**9


class Announcement(DirectoryRecord, frozen=True, forbid_unknown_fields=True):
    """The facts about a node, its addresses included, that others need before they connect to it."""

    run_id: NamedRun
    parameters_version: Annotated[int, Meta(ge=0, le=10**9)]  # newest version of the run that this node knows
    layers: LayerRange | None  # None: it holds no part of the model, or none yet
    pool: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS, pattern=PRINTABLE)] | None  # host:port for tensors
    started_at: UnixSeconds
    memory_tier_mb: Annotated[int, Meta(ge=0, le=_MOST_MEMORY_MB)]
    is_relay: bool
    version: Annotated[str, Meta(max_length=MAX_VERSION_CHARACTERS, pattern=PRINTABLE)]  # of the software
    member_pass: PassBytes | None = None  # of the node's wallet, among friends
    admission: AdmissionBytes | None = None  # of the node, in an organised run


def report_topic(run_id: RunId) -> str:
    """Return the gossip topic on which the nodes of a run report."""
    return f"reports/{run_id}/0"


STAGES_OF_GROUP = 8
GROUPS_OF_LOOK = 4  # that a node reads at a time
MOST_GROUPS_OF_NODE = 16  # that announce one node; a directory node stores few records of each node


def directory_namespace(run_id: RunId, group: int = 0) -> str:
    """Return the directory namespace that stores the announcements of one group of a run."""
    return f"{run_id}/{group}"


@dataclass(frozen=True)
class DirectoryGroups:
    """The groups of a run's stages, each with a directory namespace; a run of few stages has one group."""

    run_id: RunId
    plan: StagePlan

    @property
    def count(self) -> int:
        """Number of groups, at least one."""
        return -(-len(self.plan) // STAGES_OF_GROUP)

    def of(self, layers: LayerRange | None) -> tuple[str, ...]:
        """Return the namespaces that announce a node with these layers; the first one if it has no layers."""
        stages = (stage for stage, held in enumerate(self.plan) if layers is not None and _overlap(held, layers))
        groups = sorted({stage // STAGES_OF_GROUP for stage in stages})[:MOST_GROUPS_OF_NODE]
        return tuple(directory_namespace(self.run_id, group) for group in groups or (0,))

    def asked(self, look: int) -> tuple[str, ...]:
        """Return the few namespaces to read in a look, 0, 1, 2, ...; successive looks cover all groups."""
        groups = range(look * GROUPS_OF_LOOK, look * GROUPS_OF_LOOK + min(GROUPS_OF_LOOK, self.count))
        return tuple(directory_namespace(self.run_id, group % self.count) for group in groups)


def _overlap(a: LayerRange, b: LayerRange) -> bool:
    return a.start < b.stop and b.start < a.stop
