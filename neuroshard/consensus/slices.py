"""Slices of a vector: their bounds, their digests, and the reducers of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The reducers of one slice. The first one sends the result to all members, the others of `active` its hash.

    `spare` repeats the work if they differ or one does not answer; None if there is no other member.
    """

    active: tuple[NodeId, ...]
    spare: NodeId | None

    @property
    def needed(self) -> int:
        """Number of reducers that must return the same bytes."""
        return len(self.active)

    def __contains__(self, node: object) -> bool:
        return node in self.active


def assign(plan: SlicePlan, upload: Mapping[NodeId, int], seed: str, needed: int) -> Sequence[Reducers]:
    """Reducers of every slice, in proportion to the members' upload rates (bytes per second), in an order from the
    seed.

    `needed` is 1 among friends and 2 where members may lie; a lone member is enough for itself.
    Raises ValueError without a member.
    """
    if not upload:
        raise ValueError("a slice has a reducer")
    order, needed = (
        sorted(upload, key=partial(hash_parts, "neuroshard/reducer", seed)),
        min(needed, len(upload)),
    )
    quotas = _quotas([upload[node] for node in order], needed * plan.count, most=plan.count)
    slots = [node for node, quota in zip(order, quotas, strict=True) for _ in range(quota)]
    chosen = list[Reducers]()
    for index in range(plan.count):
        # no member has more than `count` slots, and they are consecutive: the reducers of a slice are never the same
        active = tuple(slots[index :: plan.count])
        if index % 2:
            active = active[::-1]
        others = [node for node in order[index % len(order) :] + order if node not in active]
        chosen.append(Reducers(active, others[0] if others else None))
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


def _quotas(uploads: Sequence[int], total: int, most: int) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the uploads within MAX_SHARE and `most`."""
    mean = total / len(uploads)
    cap = min(most, max(-(-total // len(uploads)), int(MAX_SHARE * mean)))
    quotas = [0] * len(uploads)
    weights = [max(1, upload) for upload in uploads]
    for _ in range(total):  # each to the member furthest below its share
        open_places = [place for place in range(len(uploads)) if quotas[place] < cap]
        place = max(open_places, key=lambda place: (weights[place] / (quotas[place] + 1), -place))
        quotas[place] += 1
    return quotas
