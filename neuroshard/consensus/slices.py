"""Slices of a vector: their bounds, their digests, and the reducers of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from blake3 import blake3

from neuroshard.identity import hash_parts
from neuroshard.types import NodeId

BLOCK = 4096  # slices are whole blocks of the codecs, so that each can be encoded alone
MAX_SLICES = 64
MESSAGE_BYTES = (4 << 20) - (64 << 10)  # of slices per message: with its header it fits into one part
DIGEST_BYTES = 32
MAX_SHARE = 1.25  # of the mean number of slices: limits the share of a fast member

Encoded: TypeAlias = bytes | memoryview
"""An encoded slice, where it lies: what has come is not copied."""


def digest_of(content: Encoded) -> bytes:
    """BLAKE3 of an encoded slice, or of statistics: four times faster than SHA-256, and every byte is hashed often."""
    return blake3(content).digest()


@dataclass(frozen=True)
class SlicePlan:
    """Fixed slices of a vector of `length` numbers, all of equal length except the last."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("a vector has at least one number")

    @property
    def width(self) -> int:
        """Numbers per slice."""
        blocks = -(-self.length // BLOCK)
        return BLOCK * -(-blocks // MAX_SLICES)

    @property
    def count(self) -> int:
        """Number of slices."""
        return -(-self.length // self.width)

    def bounds(self, index: int) -> tuple[int, int]:
        """First number of a slice, and the one after its last."""
        return index * self.width, min(self.length, (index + 1) * self.width)

    def size(self, index: int) -> int:
        """Numbers in this slice."""
        start, stop = self.bounds(index)
        return stop - start


@dataclass(frozen=True)
class Reducers:
    """The reducers of one slice. All of `active` must return the same bytes: the first one the result, others its hash.

    `spare` repeats the work if they differ or one does not answer; None if there is no other member.
    """

    active: tuple[NodeId, ...]
    spare: NodeId | None

    def __contains__(self, node: object) -> bool:
        return node in self.active


def assign(plan: SlicePlan, upload: Mapping[NodeId, int], seed: str) -> Sequence[Reducers]:
    """One reducer of every slice, in proportion to the members' upload rates (bytes per second), in an order from the
    seed.

    Raises ValueError without a member.
    """
    if not upload:
        raise ValueError("a slice has a reducer")
    order = sorted(upload, key=partial(hash_parts, "neuroshard/reducer", seed))
    quotas, chosen = _quotas(list(map(upload.__getitem__, order)), plan.count), list[Reducers]()
    for place, node in enumerate(order):
        others = order[place + 1 :] + order[:place]
        for index in range(quotas[place]):
            chosen.append(Reducers((node,), others[index % len(others)] if others else None))
    return chosen


def draw(plan: SlicePlan, nodes: Collection[NodeId], seed: str, needed: int) -> Sequence[Reducers]:
    """The reducers of every slice where members may lie: each slice has a draw of its own.

    So what a member declares changes nothing, and a member that stays away changes little more than the slices that
    it would reduce: it cannot choose those of another one. No member gets more than MAX_SHARE while others have less.
    Raises ValueError without a member; a lone member is enough for itself.
    """
    if not nodes:
        raise ValueError("a slice has a reducer")
    needed = min(needed, len(nodes))
    cap, load = int(MAX_SHARE * needed * plan.count / len(nodes)), Counter[NodeId]()
    chosen = list[Reducers]()
    for index in range(plan.count):
        order = sorted(nodes, key=partial(hash_parts, "neuroshard/reducer", seed, index))
        order.sort(key=lambda node: load[node] >= cap)
        load.update(order[:needed])
        chosen.append(Reducers(tuple(order[:needed]), order[needed] if len(order) > needed else None))
    return chosen


def in_messages(slices: Mapping[int, Encoded]) -> Iterator[Mapping[int, Encoded]]:
    """The slices in order, in groups that fit into one message each: at least one, even if it is larger."""
    carried, size = dict[int, Encoded](), 0
    for index, data in sorted(slices.items()):
        if carried and size + len(data) > MESSAGE_BYTES:
            yield carried
            carried, size = {}, 0
        carried[index] = data
        size += len(data)
    if carried:
        yield carried


def _quotas(uploads: Sequence[int], total: int) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the uploads within MAX_SHARE."""
    cap = max(-(-total // len(uploads)), int(MAX_SHARE * total / len(uploads)))
    quotas = [0] * len(uploads)
    weights = [max(1, upload) for upload in uploads]
    for _ in range(total):  # each to the member furthest below its share
        place = max(
            range(len(uploads)),
            key=lambda place: (quotas[place] < cap, weights[place] / (quotas[place] + 1), -place),
        )
        quotas[place] += 1
    return quotas
