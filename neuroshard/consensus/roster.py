"""Voters, quorum and proposer of a round, and the assignment of slices to reducers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from neuroshard.identity import hash_parts
from neuroshard.types import MAX_NODE_ID_CHARACTERS, PRINTABLE, NamedWallet, NodeId, RunId

NamedNode = Annotated[NodeId, Meta(max_length=MAX_NODE_ID_CHARACTERS, pattern=PRINTABLE)]  # the node id in a message


class GroupMember(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A node and the wallet that vouches for it."""

    node_id: NamedNode
    wallet_id: NamedWallet


@dataclass(frozen=True)
class Roster:
    """The voters of one round.

    A founding roster does not come from a certificate: its members found a line of certificates by calling each
    other, and all of them must agree.
    """

    members: tuple[GroupMember, ...]
    is_founding: bool = False

    def __post_init__(self) -> None:
        if not self.members or len({member.node_id for member in self.members}) != len(self.members):
            raise ValueError("a roster has at least one member, and each once")
        object.__setattr__(self, "members", tuple(sorted(self.members)))

    @cached_property
    def nodes(self) -> frozenset[NodeId]:
        """Node ids of the voters."""
        return frozenset(member.node_id for member in self.members)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of the roster."""
        return hash_parts("neuroshard/roster", int(self.is_founding), msgspec.msgpack.encode(self.members))

    def quorum(self, tolerated: int) -> int:
        """Number of votes that decide: any two quorums share a voter that is not among the `tolerated` liars."""
        size = len(self.members)
        return size if self.is_founding else (size + tolerated) // 2 + 1


def has_one_node_per_wallet(members: Iterable[GroupMember]) -> bool:
    """Whether every wallet has one node here. An open swarm requires it, although wallets are free to create."""
    wallets = [member.wallet_id for member in members]
    return len(set(wallets)) == len(wallets)


def tolerated_liars(size: int, *, is_open_to_strangers: bool) -> int:
    """Number F of liars that a round tolerates: 0 among friends, a quarter of the roster if strangers may join."""
    return size // 4 if is_open_to_strangers else 0


@dataclass(frozen=True)
class Step:
    """The outer step that a round would complete on one line of replicas."""

    run_id: RunId
    stage: int  # first layer
    number: int  # number of the outer step, from 0
    root: str  # hex root of the state from which all members start
    terms: str  # codec, aggregator and tensor schema: members with different terms exchange nothing
    roster: Roster
    # whether strangers may join: then a quarter of the voters may lie, and a wallet has one node per round
    is_open: bool = False

    @cached_property
    def id(self) -> str:
        """Hex hash of the step. Messages of another step, line, roster or other terms have another id."""
        parts = (self.run_id, self.stage, self.number, self.root, self.terms, int(self.is_open), self.roster.digest)
        return hash_parts("neuroshard/step", *parts).hex()

    @property
    def tolerated(self) -> int:
        """Number of tolerated liars among the voters."""
        return tolerated_liars(len(self.roster.members), is_open_to_strangers=self.is_open)

    @property
    def quorum(self) -> int:
        """Number of votes that decide."""
        return self.roster.quorum(self.tolerated)

    def may_meet(self, members: Collection[GroupMember]) -> bool:
        """Whether these members may be in one round, by their wallets: a voter's wallet has no other node there."""
        return not self.is_open or has_one_node_per_wallet({*members, *self.roster.members})

    def may_join(self, newcomers: int, voters: int) -> bool:
        """Whether this many members that are not on the roster may be in a round with this many voters.

        Wallets are free to create, so strangers become voters slowly: one, or a quarter of the voters, per step.
        """
        return not self.is_open or newcomers <= max(1, voters // 4)

    def proposer(self, view: int) -> NodeId:
        """The proposer of a view. The order of the roster depends on the root, so that no member can choose it."""
        return self._proposers[view % len(self._proposers)]

    @cached_property
    def _proposers(self) -> list[NodeId]:
        return sorted(self.roster.nodes, key=lambda node: hash_parts("neuroshard/proposer", self.root, node))


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
    """The reducers of one slice: `first` sends the result to all members, `second` its hash.

    `third` repeats the work if the two differ or one does not answer; None if there are only two members.
    """

    first: NodeId
    second: NodeId
    third: NodeId | None

    def __contains__(self, node: object) -> bool:
        return node in (self.first, self.second)


def assign(plan: SlicePlan, upload: Mapping[NodeId, int], seed: str) -> Sequence[Reducers]:
    """Reducers of every slice, in proportion to the members' upload rates (bytes per second), in an order from the
    seed.

    Raises ValueError for fewer than two members.
    """
    if len(upload) < 2:
        raise ValueError("a slice has two reducers")
    order = sorted(upload, key=lambda node: hash_parts("neuroshard/reducer", seed, node))
    quotas = _quotas([upload[node] for node in order], 2 * plan.count, most=plan.count)
    slots = [node for node, quota in zip(order, quotas, strict=True) for _ in range(quota)]
    chosen = list[Reducers]()
    for index in range(plan.count):
        # no member has more than `count` slots, and they are consecutive: the two are never the same
        pair = slots[index], slots[index + plan.count]
        first, second = pair if index % 2 == 0 else pair[::-1]
        others = [node for node in order[index % len(order) :] + order if node not in pair]
        chosen.append(Reducers(first, second, others[0] if others else None))
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
