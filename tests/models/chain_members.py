"""Honest members of the chain, message by message: what is on the wire, what is on a disk, what a member signs.

The wire is a set of signed messages that only grows. A member acts on any part of it at any moment, so delays, losses,
repetitions and reordering need no code of their own. Nothing here reads a clock for a decision about a vote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.models.chain_rules import (
    NO_LOCK,
    Entry,
    Hash,
    InvariantError,
    Ledger,
    Lock,
    Rules,
    Wallet,
    changed,
    completes,
    is_quorum,
    may_propose,
)

NOBODY = -1
OWNER, DEPUTY = 0, 1


class Value(NamedTuple):
    """The content of a value. Its hash is its number in the archive."""

    statement: int
    height: int
    parent: Hash
    aggregate: int  # the agreed result of a list of contributions; NOBODY in an entries-only value
    entries: tuple[Entry, ...] = ()


class Statement(NamedTuple):
    """A foundation, signed by the owner or a deputy."""

    number: int  # epoch
    issuer: Wallet
    previous: int
    shown: Hash  # the standing from which the epoch continues
    ledger: Ledger
    names: tuple[int, ...] = ()  # statements of one epoch that contradict each other and that this one replaces


class Place(NamedTuple):
    """Where a vote belongs."""

    statement: int
    height: int


@dataclass
class Archive:
    """All values and statements, by hash. It stands for hashing and for the transfer of verified bytes."""

    rules: Rules
    values: list[Value] = field(default_factory=list[Value])
    ledgers: list[Ledger] = field(default_factory=list[Ledger])
    roots: list[int] = field(default_factory=list[int])
    statements: list[Statement] = field(default_factory=list[Statement])
    _hashes: dict[Value, Hash] = field(default_factory=dict[Value, Hash])

    def found(self, statement: Statement) -> int:
        self.statements.append(statement)
        number = len(self.statements) - 1
        height = self.values[statement.shown].height if statement.shown != NOBODY else 0
        root = self.roots[statement.shown] if statement.shown != NOBODY else 0
        self._keep(Value(number, height, statement.shown, NOBODY), statement.ledger, root)
        return number

    def origin(self, statement: int) -> Hash:
        """The value-like hash of a foundation: the first parent of its epoch."""
        shown = self.statements[statement].shown
        height = self.values[shown].height if shown != NOBODY else 0
        return self._hashes[Value(statement, height, shown, NOBODY)]

    def offer(self, value: Value) -> Hash | None:
        """Hash of a value; None if its entries are invalid."""
        if value in self._hashes:
            return self._hashes[value]
        ledger = changed(self.rules, self.ledgers[value.parent], value.entries, value.parent, OWNER)
        if ledger is None or (value.aggregate == NOBODY and not value.entries):
            return None
        root = self.roots[value.parent]
        return self._keep(value, ledger, root if value.aggregate == NOBODY else hash((root, value.aggregate)))

    def _keep(self, value: Value, ledger: Ledger, root: int) -> Hash:
        self._hashes[value] = len(self.values)
        self.values.append(value)
        self.ledgers.append(ledger)
        self.roots.append(root)
        return len(self.values) - 1


class Proposal(NamedTuple):
    """The value that a view votes on, with the view-changes that justify it."""

    value: Hash
    key: int
    shown: tuple[int, ...]  # keys of the view-changes


@dataclass
class Height:
    """Messages of one height of one epoch."""

    votes: dict[tuple[str, int, Hash], set[int]] = field(default_factory=lambda: defaultdict(set))
    first: dict[tuple[str, int, int], Hash] = field(default_factory=dict[tuple[str, int, int], Hash])
    changes: dict[int, dict[int, Lock]] = field(default_factory=lambda: defaultdict(dict))
    proposals: dict[int, list[Proposal]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Wire:
    """All signed messages, and the double votes that they prove."""

    rules: Rules
    archive: Archive
    heights: dict[Place, Height] = field(default_factory=lambda: defaultdict(Height))
    proven_double: set[int] = field(default_factory=set[int])  # keys

    def vote(self, place: Place, phase: str, view: int, value: Hash, key: int) -> None:
        height = self.heights[place]
        height.votes[phase, view, value].add(key)
        slot = (phase, view if self.rules.proof_needs_one_view else 0, key)
        if height.first.setdefault(slot, value) != value:
            self.proven_double.add(key)

    def voters(self, ledger: Ledger, keys: Iterable[int]) -> set[Wallet]:
        """Wallets whose votes count, out of those who signed."""
        signed = set(keys)
        seated = {seat.key: seat.wallet for seat in ledger.seats}
        counted = {seated[key] for key in signed if key in seated}
        return counted if self.rules.only_seats_vote else counted | {-2 - key for key in signed - set(seated)}

    def proven(self, place: Place, ledger: Ledger) -> list[Lock]:
        """Locks that anybody can prove: with the PREPAREs of a quorum."""
        votes = self.heights[place].votes.items()
        return [
            Lock(view, value)
            for (phase, view, value), keys in votes
            if phase == "prepare" and is_quorum(self.rules, ledger, self.voters(ledger, keys))
        ]

    def certified(self, place: Place, parent: Hash) -> set[Hash]:
        """Values on a parent that have a certificate."""
        before, found = self.archive.ledgers[parent], set[Hash]()
        for (phase, _, value), keys in self.heights[place].votes.items():
            if phase == "commit" and self.archive.values[value].parent == parent:
                after = self.archive.ledgers[value]
                if completes(self.rules, before, after, self.voters(before, keys)):
                    found.add(value)
        return found


@dataclass
class Member:
    """One honest node: its disk, and the decisions that need nothing but the wire and the disk."""

    wallet: Wallet
    key: int
    rules: Rules
    wire: Wire
    statement: int
    tip: Hash
    ghost: bool = False  # a second instance from a restored backup; its wallet counts as one of the F
    asleep: bool = False
    halted: bool = False  # it has seen two statements of one epoch
    may_vote_above: int = -1  # a lost log: no vote at this height or below
    view: int = 0
    log: dict[tuple[str, int], Hash] = field(default_factory=dict[tuple[str, int], Hash])
    lock: Lock = NO_LOCK
    clock: int = 0
    last_heard: dict[Wallet, tuple[int, int]] = field(default_factory=dict[Wallet, tuple[int, int]])

    @property
    def archive(self) -> Archive:
        return self.wire.archive

    @property
    def place(self) -> Place:
        """The height that this member works on."""
        return Place(self.statement, self.archive.values[self.tip].height + 1)

    @property
    def ledger(self) -> Ledger:
        return self.archive.ledgers[self.tip]

    def may_vote(self) -> bool:
        seated = any(seat.key == self.key and seat.wallet == self.wallet for seat in self.ledger.seats)
        return seated and not self.asleep and not self.halted and self.place.height > self.may_vote_above

    def proposer_key(self, view: int) -> int:
        return self.ledger.seats[view % len(self.ledger.seats)].key

    def begin(self, statement: int, tip: Hash) -> None:
        """Continue from another tip. The log of an older height is not needed any more."""
        self.statement, self.tip = statement, tip
        self.view, self.lock = 0, NO_LOCK
        self.log.clear()

    def change_view(self, view: int) -> None:
        if view <= self.view or not self.may_vote():
            return
        self.view = view
        self.wire.heights[self.place].changes[view][self.key] = self.lock

    def justified(self, proposal: Proposal, view: int) -> bool:
        """Whether a proposal is the view's proposer's, extends this member's tip, and respects the locks it shows."""
        value = self.archive.values[proposal.value]
        if value.parent != self.tip or value.statement != self.statement or proposal.key != self.proposer_key(view):
            return False
        if view == 0:
            return True
        changes = self.wire.heights[self.place].changes[view]
        shown = [changes[key] for key in proposal.shown if key in changes]
        if len(shown) != len(proposal.shown):
            return False
        if not is_quorum(self.rules, self.ledger, self.wire.voters(self.ledger, proposal.shown)):
            return False
        choice = may_propose(self.rules, shown)
        return choice is None or proposal.value in choice

    def propose(self, fresh: Hash, shown: tuple[int, ...]) -> Hash | None:
        """Propose in the present view: the value that the locks demand, or `fresh`. With F = 0 this is the COMMIT."""
        if not self.may_vote() or self.proposer_key(self.view) != self.key or ("propose", self.view) in self.log:
            return None
        height = self.wire.heights[self.place]
        locks = [height.changes[self.view][key] for key in shown]
        choice = may_propose(self.rules, locks) if self.view else None
        proposal = Proposal(fresh if choice is None else max(choice), self.key, shown)
        if not self.justified(proposal, self.view):
            return None
        self.log["propose", self.view] = proposal.value
        height.proposals[self.view].append(proposal)
        return proposal.value

    def accept(self, proposal: Proposal, computed: Hash) -> None:
        """The first vote of the present view. `computed` is this member's own result of the reduction."""
        phase = "commit" if self.ledger.faults == 0 else "prepare"
        if not self.may_vote() or (phase, self.view) in self.log or not self.justified(proposal, self.view):
            return
        value = proposal.value if self.rules.proposer_names_value or self.ledger.faults else computed
        self.log[phase, self.view] = value
        if phase == "commit":
            self.lock = Lock(self.view, value)
        self.wire.vote(self.place, phase, self.view, value, self.key)

    def count(self) -> None:
        """With the PREPAREs of a quorum in the present view: lock, then COMMIT."""
        if not self.may_vote() or self.ledger.faults == 0 or ("commit", self.view) in self.log:
            return
        for lock in self.wire.proven(self.place, self.ledger):
            if lock.view == self.view and self.archive.values[lock.value].parent == self.tip:
                self.log["commit", self.view], self.lock = lock.value, lock
                self.wire.vote(self.place, "commit", self.view, lock.value, self.key)
                return

    def catch_up(self) -> Hash | None:
        """Adopt the next value that has a certificate. Returns it. Raises InvariantError if there are two."""
        certified = self.wire.certified(self.place, self.tip)
        if not certified or self.asleep or self.halted:
            return None
        if len(certified) > 1:
            raise InvariantError(f"{len(certified)} values have certificates at {self.place}")
        (value,) = certified
        self.begin(self.statement, value)
        return value

    def hear(self, number: int) -> None:
        """A statement arrives. A higher epoch replaces the standing; a second one of this epoch stops the node."""
        heard, mine = self.archive.statements[number], self.archive.statements[self.statement]
        if heard.issuer not in {OWNER, DEPUTY} or self.asleep or number == self.statement:
            return
        if heard.number > mine.number:
            self.halted, self.may_vote_above = False, -1
            self.begin(number, self.archive.origin(number))
        elif heard.number == mine.number and number not in mine.names:
            self.halted = True

    def restart(self) -> None:
        """A restart keeps the disk only."""
        if not self.rules.votes_are_logged:
            self.view, self.lock = 0, NO_LOCK
            self.log.clear()
