"""Slices of a vector: their bounds, their digests, the reducers of each, and its state in a round. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from blake3 import blake3

from neuroshard.compression import EXCERPT
from neuroshard.identity import hash_parts
from neuroshard.types import NodeId

BLOCK = 4096  # slices are whole blocks of the codecs, so that each can be encoded alone
MAX_SLICES = 64
MESSAGE_BYTES = (4 << 20) - (64 << 10)  # of slices per message: with its header it fits into one part
DIGEST_BYTES = 32
AUDITED_BLOCKS = 256  # excerpts: one seat finds an error in 1 % of the blocks with a probability of 92 %
AMONG_STRANGERS = 2  # reducers of a slice that must return the same bytes; among friends there is one
MAX_SHARE = 1.25  # of the mean number of slices: limits the share of a fast member

Encoded: TypeAlias = bytes | memoryview
"""An encoded slice, where it lies: what has come is not copied."""


def digest_of(content: Encoded) -> bytes:
    """BLAKE3 of an encoded slice, or of statistics: four times faster than SHA-256, and every byte is hashed often."""
    return blake3(content).digest()


Block: TypeAlias = tuple[int, int]
"""A slice, and an excerpt of EXCERPT numbers in it."""


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

    def size(self, index: int) -> int:
        """Numbers in this slice."""
        return min(self.width, self.length - index * self.width)

    def blocks(self, index: int) -> int:
        """Number of blocks of EXCERPT numbers in this slice. The last numbers of a vector may be in none."""
        return self.size(index) // EXCERPT if index < self.count else 0


def reducers_of(
    plan: SlicePlan, upload: Mapping[NodeId, int], barred: Collection[NodeId], seed: str, *, is_open: bool
) -> Sequence[tuple[NodeId, ...]]:
    """The reducers of every slice among these members. Barred ones reduce only if the others are too few.

    Raises ValueError without a member.
    """
    needed = AMONG_STRANGERS if is_open else 1
    free = {node: upload[node] for node in upload if node not in barred}
    chosen = free if len(free) >= needed else upload
    return draw(plan, chosen, seed, needed) if is_open else assign(plan, chosen, seed)


def assign(plan: SlicePlan, upload: Mapping[NodeId, int], seed: str) -> Sequence[tuple[NodeId, ...]]:
    """One reducer of every slice, in proportion to the members' upload rates (bytes per second), in an order from the
    seed.

    Raises ValueError without a member.
    """
    if not upload:
        raise ValueError("a slice has a reducer")
    order = sorted(upload, key=partial(hash_parts, "neuroshard/reducer", seed))
    cap = max(-(-plan.count // len(order)), int(MAX_SHARE * plan.count / len(order)))
    quotas = dict.fromkeys(order, 0)
    for _ in range(plan.count):  # each to the member furthest below its share, the first one of several
        quotas[max(order, key=lambda node: (quotas[node] < cap, max(1, upload[node]) / (quotas[node] + 1)))] += 1
    return [(node,) for node in order for _ in range(quotas[node])]


def draw(plan: SlicePlan, nodes: Collection[NodeId], seed: str, needed: int) -> Sequence[tuple[NodeId, ...]]:
    """The reducers of every slice where members may lie: each slice has a draw of its own. All must return the same
    bytes: the first one the result, the others its hash.

    So what a member declares changes nothing, and a member that stays away changes little more than the slices that
    it would reduce: it cannot choose those of another one. No member gets more than MAX_SHARE while others have less.
    Raises ValueError without a member; a lone member is enough for itself.
    """
    if not nodes:
        raise ValueError("a slice has a reducer")
    needed = min(needed, len(nodes))
    cap, load = int(MAX_SHARE * needed * plan.count / len(nodes)), Counter[NodeId]()
    chosen = list[tuple[NodeId, ...]]()
    for index in range(plan.count):
        order = sorted(nodes, key=partial(hash_parts, "neuroshard/reducer", seed, index))
        order.sort(key=lambda node: load[node] >= cap)
        load.update(order[:needed])
        chosen.append(tuple(order[:needed]))
    return chosen


def draw_blocks(plan: SlicePlan, slices: Sequence[int], secret: bytes) -> tuple[Block, ...]:
    """Blocks of EXCERPT numbers of these slices for an audit, all with the same probability."""
    width = plan.width // EXCERPT  # the last slice may have fewer
    drawn = set[Block]()
    for word in memoryview(blake3(secret).digest(8 * AUDITED_BLOCKS)).cast("Q"):
        index, number = slices[word // width % len(slices)], word % width
        if number < plan.blocks(index):
            drawn.add((index, number))
    return tuple(sorted(drawn))


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


def by_themselves(wanted: Mapping[int, Encoded], sent: Mapping[int, Encoded]) -> Mapping[int, Encoded]:
    """Copies of the slices, which do not keep the rest of their message in memory."""
    return wanted if len(wanted) == len(sent) else {index: bytes(part) for index, part in wanted.items()}


@dataclass
class SliceState:
    """One slice in a round, as one member sees it."""

    reducers: tuple[NodeId, ...]  # all must return the same bytes: the first one the result, others its hash
    self_id: NodeId
    parts: dict[NodeId, Encoded] = field(default_factory=dict[NodeId, Encoded])  # encoded parts by member
    statements: dict[NodeId, str] = field(default_factory=dict[NodeId, str])  # digests by reducer
    results: dict[NodeId, str] = field(default_factory=dict[NodeId, str])
    content: dict[str, Encoded] = field(default_factory=dict[str, Encoded])  # statistics and encoded results by digest
    is_stated: bool = False  # whether this node has made its statistics or started to
    is_checked: bool = False  # whether this node computes the slice although it is not a reducer of it
    is_overdue: bool = False  # whether parts have not come in time

    @property
    def is_computed(self) -> bool:
        """Whether this node computes the slice."""
        return self.is_checked or self.self_id in self.reducers

    def rows(self, order: Sequence[NodeId]) -> tuple[Encoded, ...]:
        """The parts of these members, all of which have come."""
        return tuple(map(self.parts.__getitem__, order))

    def agreed(self, said: Mapping[NodeId, str]) -> str:
        """The digest that counts at this node: its own of a slice that it computes, or that of all reducers; or ""."""
        if self.is_computed:
            return said.get(self.self_id, "")
        first = said.get(self.reducers[0], "")
        return first if list(map(said.get, self.reducers)).count(first) == len(self.reducers) else ""
