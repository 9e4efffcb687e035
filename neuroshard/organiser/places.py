"""The places of an organised run: stages with a capacity, and who gets a free one next. Pure.

The order is fair: the node that has waited longest takes the first free place that fits it. It takes an empty stage
first, then the stage with the smallest share of its wanted replicas. A node that fits no free place holds up nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from neuroshard.types import DAY_SECONDS, LayerRange, NodeId, WalletId

TRAINER = "trainer"  # the stage of nodes without layers
DOWNLOADING_AT_ONCE = 8  # waiting nodes that load the state of a stage already; the others are on the waiting list


SLOTS = 8  # nodes that may download while they wait: of one named wallet, and of all others together, in an hour
SLOT_SECONDS = 3600.0


@dataclass(frozen=True)
class StagePlaces:
    """One stage of a run, and the number of nodes that it wants. `layers` is None for trainers."""

    name: str
    layers: LayerRange | None
    memory_mb: int  # that a node needs for it
    wanted: int


@dataclass(frozen=True)
class Joiner:
    """A node that waits for a place."""

    node: NodeId
    role: str  # "worker" or "trainer"
    memory_mb: int
    layers_at_most: int = 0  # 0: as many as fit

    @cached_property
    def kind(self) -> tuple[str, int, int]:
        """The values on which `fits` depends."""
        return self.role, self.memory_mb, self.layers_at_most

    def fits(self, stage: StagePlaces) -> bool:
        """Whether the node can do the work of a stage."""
        if stage.layers is None or self.role == TRAINER:
            return stage.layers is None and self.role == TRAINER
        is_small = self.layers_at_most == 0 or len(stage.layers) <= self.layers_at_most
        return is_small and self.memory_mb >= stage.memory_mb


def stage_name(index: int, count: int) -> str:
    """Name of a stage in admissions: head-0, then body-0, body-1, ..., and tail-0."""
    if index == 0:
        return "head-0"
    return "tail-0" if index == count - 1 else f"body-{index - 1}"


def assigned(stages: Sequence[StagePlaces], taken: Mapping[str, int], waiting: Sequence[Joiner]) -> dict[NodeId, str]:
    """The waiting nodes that get a place now, with its stage. `waiting` begins with the one that came first."""
    held, found = dict(taken), dict[NodeId, str]()
    left = sum(max(0, stage.wanted - held.get(stage.name, 0)) for stage in stages)
    hopeless = set[tuple[str, int, int]]()  # kinds of nodes that fit no free place; free places only become fewer
    for joiner in waiting:
        if len(found) >= left:
            break
        if joiner.kind in hopeless:
            continue
        free = [stage for stage in stages if held.get(stage.name, 0) < stage.wanted and joiner.fits(stage)]
        if free:
            stage = neediest(free, held)
            held[stage.name] = held.get(stage.name, 0) + 1
            found[joiner.node] = stage.name
        else:
            hopeless.add(joiner.kind)
    return found


def neediest(stages: Sequence[StagePlaces], taken: Mapping[str, int]) -> StagePlaces:
    """The stage with the smallest share of its wanted nodes; the first one among equal ones."""
    return min(stages, key=lambda stage: taken.get(stage.name, 0) / max(1, stage.wanted))


def estimated_wait(position: int, freed_at: Sequence[float], now: float) -> float | None:
    """Seconds until the node at a position, 1 for the first, gets a place; None until two places became free.

    It is the median time between two places that became free in the last day, times the position.
    """
    recent = sorted(at for at in freed_at if now - DAY_SECONDS <= at <= now)
    if len(recent) < 2:
        return None
    return position * median(later - earlier for earlier, later in pairwise(recent))


class DownloadSlots:
    """Decides which of the first nodes of the queue may download before their admission.

    Names of nodes cost nothing: a node could download, leave, and come back under another name. So a node occupies one
    of SLOTS slots for an hour, also after it has left, unless it is admitted. A wallet that the list or a pass names
    has slots of its own. All other wallets share theirs. Times are those of one monotonic clock.
    """

    def __init__(self) -> None:
        self._taken: dict[NodeId, tuple[WalletId | None, float]] = {}  # with the end of the hour

    def may_download(self, node: NodeId, wallet: WalletId | None, now: float) -> bool:
        """Whether a node among the first of the queue gets a right to download now; `wallet` is None for unnamed ones.

        It takes a slot if it has none and one is free.
        """
        self._taken = {each: (of, until) for each, (of, until) in self._taken.items() if now < until}
        if node not in self._taken:
            if sum(of == wallet for of, _ in self._taken.values()) >= SLOTS:
                return False
            self._taken[node] = (wallet, now + SLOT_SECONDS)
        return True

    def note_admission(self, node: NodeId) -> None:
        """Free the slot of a node that has a place: it no longer waits."""
        self._taken.pop(node, None)
