"""The step that a round completes: its place in the chain, its committee, and who may contribute and reduce. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from msgspec import structs

from neuroshard.consensus.chain import Ledger, Standing
from neuroshard.consensus.committee import Committee, EntryRules, GroupMember
from neuroshard.consensus.round_messages import Value
from neuroshard.identity import hash_parts
from neuroshard.types import NodeId, RunId, WalletId


@dataclass(frozen=True)
class Step:
    """One height of a stage's chain: the outer step that it would complete, and the committee that votes on it."""

    run_id: RunId
    stage: int
    number: int  # number of the outer step, from 0
    root: str  # hex root of the state from which all members start
    terms: str  # codec, aggregator and tensor schema: members with different terms exchange nothing
    standing: Standing  # the newest certified state, on which the value builds
    ledger: Ledger
    owner: WalletId

    @cached_property
    def id(self) -> str:
        """Hex hash of the step. Messages of another height, line or committee, or of other terms, have another id."""
        place = self.standing
        parts = (
            self.run_id,
            self.stage,
            place.statement,
            place.height,
            place.value,
            self.number,
            self.root,
            self.terms,
        )
        return hash_parts("neuroshard/step", *parts).hex()

    @property
    def height(self) -> int:
        """The height that the step decides."""
        return self.standing.height + 1

    @property
    def committee(self) -> Committee:
        """The seats that vote."""
        return self.ledger.committee

    @cached_property
    def seats(self) -> frozenset[NodeId]:
        """Nodes of the seats."""
        return frozenset(seat.node_id for seat in self.committee.seats)

    @property
    def tolerated(self) -> int:
        """Number of tolerated liars among the seats."""
        return self.committee.faults

    @property
    def is_open(self) -> bool:
        """Whether strangers may contribute. Then a wallet has one node per step."""
        return self.committee.is_open

    def is_quorum(self, nodes: Collection[NodeId]) -> bool:
        """Whether the seats of these nodes decide."""
        return self.committee.is_quorum([seat.member for seat in self.committee.seats if seat.node_id in nodes])

    def may_meet(self, members: Collection[GroupMember]) -> bool:
        """Whether these members may be in one step, by their wallets: a seat's wallet has no other node there."""
        return not self.is_open or has_one_node_per_wallet({*members, *self.committee.members})

    def proposer(self, view: int) -> NodeId:
        """The proposer of a view."""
        return self.committee.proposer(view)

    def may_reduce(self, node: NodeId) -> bool:
        """Whether a member may reduce: its work is in the last aggregate, or it has a seat.

        So nobody who joins a step can choose a key that makes it the reducer of a slice: the draw uses a seed that is
        older than the right to reduce.
        """
        return node in self.seats or any(node == share.node_id for share in self.ledger.reducers)

    def completed(self, value: Value) -> Value:
        """The value with the digest of the ledger that follows from it. Raises InvalidEntryError."""
        rules = EntryRules(self.height, self.owner)
        return structs.replace(value, ledger=self.ledger.after(value, rules).digest)

    def first_value(self) -> Value:
        """A value of this step without content: the state stays as it is."""
        place = self.standing
        return Value(
            step_id=self.id,
            statement=place.statement,
            height=self.height,
            parent=place.value,
            committee=self.committee.digest,
            outer_step=self.number,
            root=self.root,
            next_root=self.root,
        )


def has_one_node_per_wallet(members: Iterable[GroupMember]) -> bool:
    """Whether every wallet has one node here."""
    wallets = [member.wallet_id for member in members]
    return len(set(wallets)) == len(wallets)
