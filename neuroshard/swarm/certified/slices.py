"""How a vector is cut for a round, and which members reduce which slice. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from blake3 import blake3

from neuroshard.identity import hash_parts
from neuroshard.types import NodeId

BLOCK = 4096  # slices are whole blocks of the codecs, so each can be encoded by itself
MAX_SLICES = 64
MESSAGE_BYTES = (4 << 20) - (64 << 10)  # of slices in a message: with its head it travels in one part
DIGEST_BYTES = 32
MAX_SHARE = 1.25  # of the mean number of slices: what a fast member takes on, so that nobody's line carries it all

Encoded: TypeAlias = bytes | memoryview
"""An encoded slice, where it lies: what has come is not copied."""


def digest_of(content: Encoded) -> bytes:
    """BLAKE3 of an encoded slice, or of statistics: a quarter of SHA-256's time, and every byte is hashed often."""
    return blake3(content).digest()


@dataclass(frozen=True)
class SlicePlan:
    """Fixed slices of a vector of `length` numbers: all equally long but the last."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("a vector has at least one number")

    @property
    def width(self) -> int:
        """Numbers of a slice."""
        blocks = -(-self.length // BLOCK)
        return BLOCK * -(-blocks // MAX_SLICES)

    @property
    def count(self) -> int:
        """How many slices there are."""
        return -(-self.length // self.width)

    def bounds(self, index: int) -> tuple[int, int]:
        """First number of a slice, and the one after its last."""
        return index * self.width, min(self.length, (index + 1) * self.width)

    def size(self, index: int) -> int:
        """Numbers of this slice."""
        start, stop = self.bounds(index)
        return stop - start


@dataclass(frozen=True)
class Reducers:
    """Who reduces one slice: `first` sends the result to all, `second` its hash.

    `third` does it again when the two differ or one of them is silent; None when there are only two members.
    """

    first: NodeId
    second: NodeId
    third: NodeId | None

    def __contains__(self, node: object) -> bool:
        return node in (self.first, self.second)


def assign(plan: SlicePlan, upload: Mapping[NodeId, int], seed: str) -> Sequence[Reducers]:
    """Reducers of every slice, in proportion to what members can upload (bytes a second), in an order from the seed.

    Raises ValueError for fewer than two members.
    """
    if len(upload) < 2:
        raise ValueError("a slice has two reducers")
    order = sorted(upload, key=lambda node: hash_parts("neuroshard/reducer", seed, node))
    quotas = _quotas([upload[node] for node in order], 2 * plan.count, most=plan.count)
    slots = [node for node, quota in zip(order, quotas, strict=True) for _ in range(quota)]
    chosen = list[Reducers]()
    for index in range(plan.count):
        # nobody has more than `count` slots, and they lie side by side: the two are never one
        pair = slots[index], slots[index + plan.count]
        first, second = pair if index % 2 == 0 else pair[::-1]
        others = [node for node in order[index % len(order) :] + order if node not in pair]
        chosen.append(Reducers(first, second, others[0] if others else None))
    return chosen


def in_messages(slices: Mapping[int, Encoded]) -> Iterator[Mapping[int, Encoded]]:
    """The slices in order, as many at a time as a message carries: at least one, also when it is larger."""
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
    """Whole numbers that add up to `total`, in proportion to the uploads as far as MAX_SHARE and `most` allow."""
    mean = total / len(uploads)
    cap = min(most, max(-(-total // len(uploads)), int(MAX_SHARE * mean)))
    quotas = [0] * len(uploads)
    weights = [max(1, upload) for upload in uploads]
    for _ in range(total):  # each to the one who is furthest below its share
        open_places = [place for place in range(len(uploads)) if quotas[place] < cap]
        place = max(open_places, key=lambda place: (weights[place] / (quotas[place] + 1), -place))
        quotas[place] += 1
    return quotas
