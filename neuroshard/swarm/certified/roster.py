"""Who votes in a round, how many votes decide, and who proposes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from neuroshard.identity import canonical_json, hash_parts
from neuroshard.types import NodeId, RunId, WalletId


@dataclass(frozen=True, order=True)
class Member:
    """A node and the wallet that vouches for it."""

    node_id: NodeId
    wallet_id: WalletId


@dataclass(frozen=True)
class Roster:
    """The voters of one round.

    A founding roster is not that of a certificate: its members found a line of certificates by calling each other,
    and all of them have to agree.
    """

    members: tuple[Member, ...]
    is_founding: bool = False

    def __post_init__(self) -> None:
        if not self.members or len({member.node_id for member in self.members}) != len(self.members):
            raise ValueError("a roster has at least one member, and each once")
        object.__setattr__(self, "members", tuple(sorted(self.members)))

    @cached_property
    def nodes(self) -> frozenset[NodeId]:
        """The voters."""
        return frozenset(member.node_id for member in self.members)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of the roster."""
        names = [[member.node_id, member.wallet_id] for member in self.members]
        return hash_parts("neuroshard/roster", int(self.is_founding), canonical_json(names))

    def quorum(self, tolerated: int) -> int:
        """How many votes decide: any two quorums share a voter who is not among the `tolerated` liars (DESIGN 4.5)."""
        size = len(self.members)
        return size if self.is_founding else (size + tolerated) // 2 + 1


def has_one_node_a_wallet(members: Iterable[Member]) -> bool:
    """Wallets are free to make, but a swarm that lets strangers in may ask for them: each counts once."""
    wallets = [member.wallet_id for member in members]
    return len(set(wallets)) == len(wallets)


def tolerated_liars(size: int, *, is_open_to_strangers: bool) -> int:
    """F of DESIGN 4.5: none among friends, a quarter of the roster when strangers may join."""
    return size // 4 if is_open_to_strangers else 0


@dataclass(frozen=True)
class Step:
    """The outer step of one line of replicas that a round would complete."""

    run_id: RunId
    stage: int  # first layer
    number: int  # the outer step, counted from 0
    root: str  # hex root of the state that all start from
    terms: str  # codec, aggregator and tensor schema: members whose terms differ do not exchange anything
    roster: Roster
    is_open: bool = False  # to strangers: a quarter of the voters may lie, and a wallet has one node in a round

    @cached_property
    def id(self) -> str:
        """Hex hash: messages of another step, line, roster or other terms do not carry it."""
        parts = (self.run_id, self.stage, self.number, self.root, self.terms, int(self.is_open), self.roster.digest)
        return hash_parts("neuroshard/step", *parts).hex()

    @property
    def tolerated(self) -> int:
        """Liars among the voters."""
        return tolerated_liars(len(self.roster.members), is_open_to_strangers=self.is_open)

    @property
    def quorum(self) -> int:
        """How many votes decide."""
        return self.roster.quorum(self.tolerated)

    def may_meet(self, members: Collection[Member]) -> bool:
        """Whether these may be in one round, by their wallets: a voter's wallet has no other node there."""
        return not self.is_open or has_one_node_a_wallet({*members, *self.roster.members})

    def proposer(self, view: int) -> NodeId:
        """Who proposes in a view: the roster in an order that nobody can choose, since the root is everybody's."""
        return self._proposers[view % len(self._proposers)]

    @cached_property
    def _proposers(self) -> list[NodeId]:
        return sorted(self.roster.nodes, key=lambda node: hash_parts("neuroshard/proposer", self.root, node))
