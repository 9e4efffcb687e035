"""Rules of the chain of certificates as pure functions: committees, quorums, entries, and the choice of a new view.

Both explorers read these rules. `Rules()` is the set that decision 29 proposes, and no violation is known. Each
switch drops one rule, or restores the wording that the decision replaces, so that the explorers can show why the rule
is needed.

Then the honest members of the chain, message by message: what is on the wire, what is on a disk, what a member signs.

The wire is a set of signed messages that only grows. A member acts on any part of it at any moment, so delays, losses,
repetitions and reordering need no code of their own. Nothing here reads a clock for a decision about a vote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

Wallet = int
Hash = int
LossRule = Literal["new key", "next certificate", "at once"]
LEAST_OF_STRANGERS = 4  # seats after an admission


class InvariantError(Exception):
    """An invariant is broken. The text names it and the place."""


@dataclass(frozen=True)
class Rules:
    """One switch per rule. The defaults are the rules as proposed."""

    lock_binds: bool = True  # a new view proposes the highest lock of a quorum's view-changes
    quorum_shortfall: int = 0  # votes by which a quorum is smaller than the rule requires
    half_needs_first: bool = True  # F = 0: half of the seats is a quorum only with the first seat
    only_seats_vote: bool = True
    faults_fall_with_seats: bool = False  # F is computed again from the seats that remain
    faults_fall_by_assent: bool = False  # replaced wording: q assents may lower F to half of the largest F
    strangers_start_with_four: bool = True  # an admission among strangers leads to four seats at least
    mistakes_bounded: bool = True  # assumption: the owner names at most one liar, or F if that is more
    one_view_per_certificate: bool = True  # the q commits of a certificate are of one view
    proposer_names_value: bool = True  # F = 0: a seat commits only to the value that the proposer committed to
    quorum_after_certifies: bool = False  # replaced wording: a leave also needs a quorum of the committee after it
    lock_needs_bytes: bool = True  # a seat locks a value only with its aggregate on the disk
    after_loss: LossRule = "new key"  # how a seat without its log votes again
    statement_names_epoch: bool = True  # an epoch is its statement's hash, not its number
    entries_name_parent: bool = True  # a signed leave is valid at one height only
    proof_needs_one_view: bool = True  # a double vote is two votes of one view and phase
    votes_are_logged: bool = True  # a vote is on the disk before it leaves


class Seat(NamedTuple):
    """A voting wallet with its present voting key."""

    wallet: Wallet
    key: int
    is_mistake: bool = False  # a liar that the owner has named


class Ledger(NamedTuple):
    """Committee and tolerance that follow from a value and all values before it."""

    seats: tuple[Seat, ...]  # in order of seating; the owner's seat, if there is one, is the first
    friends: bool
    faults: int  # F
    most_faults: int  # the largest F of this epoch


class Entry(NamedTuple):
    """A change of the ledger with its evidence. `parent` is the value that its signer named as the tip."""

    kind: Literal["admit", "leave", "remove", "expel", "key"]
    wallet: Wallet
    parent: Hash
    key: int = 0
    is_mistake: bool = False


class Lock(NamedTuple):
    """The value that a seat is bound to. F > 0: proven by q PREPAREs of `view`. F = 0: the seat's COMMIT of `view`."""

    view: int
    value: Hash


NO_LOCK = Lock(-1, -1)


def tolerated(friends: bool, seats: int) -> int:
    """F of a committee that is founded with this number of seats."""
    return 0 if friends else (seats - 1) // 3


def founded(seats: Iterable[Seat], friends: bool) -> Ledger:
    """Ledger of a foundation."""
    members = tuple(seats)
    faults = tolerated(friends, len(members))
    return Ledger(members, friends, faults, faults)


@cache
def quorum_size(seats: int, faults: int) -> int:
    """Votes that decide, out of all seats of the committee."""
    return (seats + faults) // 2 + 1


def is_quorum(rules: Rules, ledger: Ledger, wallets: Collection[Wallet]) -> bool:
    """Whether votes of these wallets decide. Wallets without a seat do not count."""
    seated = [seat.wallet for seat in ledger.seats]
    votes = len(set(wallets).intersection(seated)) if rules.only_seats_vote else len(set(wallets))
    if votes >= quorum_size(len(seated), ledger.faults) - rules.quorum_shortfall:
        return True
    is_half = ledger.faults == 0 and votes * 2 == len(seated)
    return is_half and (not rules.half_needs_first or seated[0] in wallets)


def completes(rules: Rules, before: Ledger, after: Ledger, wallets: Collection[Wallet]) -> bool:
    """Whether commits of these wallets make a certificate of a value that changes `before` to `after`."""
    if not is_quorum(rules, before, wallets):
        return False
    shrinks = len(after.seats) < len(before.seats)
    return not (rules.quorum_after_certifies and shrinks) or is_quorum(rules, after, wallets)


def changed(rules: Rules, ledger: Ledger, entries: Iterable[Entry], parent: Hash, owner: Wallet = 0) -> Ledger | None:
    """The ledger after the entries of a value on `parent`; None if an entry is invalid."""
    admits, lacking = 0, 0 if ledger.friends else LEAST_OF_STRANGERS - len(ledger.seats)
    most, before, replaced = max(1, len(ledger.seats) // 8, lacking), len(ledger.seats), False
    for entry in entries:
        if rules.entries_name_parent and entry.parent != parent:
            return None
        admits += entry.kind == "admit"
        replaced |= entry.kind in {"leave", "remove"}
        one_by_one = _changed_once(rules, ledger, entry, owner)
        if one_by_one is None or admits > most:
            return None
        ledger = one_by_one
    if replaced and len(ledger.seats) < min(before, 3 * ledger.faults + 1):
        return None
    is_small = not ledger.friends and admits > 0 and len(ledger.seats) < LEAST_OF_STRANGERS
    return None if is_small and rules.strangers_start_with_four else ledger


def _changed_once(rules: Rules, ledger: Ledger, entry: Entry, owner: Wallet) -> Ledger | None:
    wallets = [seat.wallet for seat in ledger.seats]
    if (entry.kind == "admit") == (entry.wallet in wallets):
        return None
    rest = tuple(seat for seat in ledger.seats if seat.wallet != entry.wallet)
    if entry.kind == "admit":
        return _admitted(rules, ledger, Seat(entry.wallet, entry.key, entry.is_mistake), owner)
    if entry.kind == "key":
        moved = tuple(seat._replace(key=entry.key) if seat.wallet == entry.wallet else seat for seat in ledger.seats)
        return ledger._replace(seats=moved)
    faults = _faults_after(rules, ledger, rest)
    if len(rest) < faults + 1:
        return None
    return ledger._replace(seats=rest, faults=faults)


def _admitted(rules: Rules, ledger: Ledger, seat: Seat, owner: Wallet) -> Ledger | None:
    seats = (seat, *ledger.seats) if seat.wallet == owner else (*ledger.seats, seat)
    faults = max(ledger.faults, tolerated(ledger.friends, len(seats)))
    if rules.mistakes_bounded and sum(each.is_mistake for each in seats) > max(1, faults):
        return None
    return ledger._replace(seats=seats, faults=faults, most_faults=max(faults, ledger.most_faults))


def _faults_after(rules: Rules, ledger: Ledger, rest: tuple[Seat, ...]) -> int:
    if ledger.friends:
        return 0
    if rules.faults_fall_with_seats:
        return tolerated(False, len(rest))
    if rules.faults_fall_by_assent and len(rest) < 3 * ledger.faults + 1:
        floor = max(sum(seat.is_mistake for seat in rest), ledger.most_faults // 2)
        return max(floor, tolerated(False, len(rest)))
    return ledger.faults


def may_propose(rules: Rules, locks: Iterable[Lock]) -> set[Hash] | None:
    """Values that a new view may propose after these view-changes of a quorum. None: any value.

    More than one value means that two locks of one view contradict each other, and the rules leave the choice open.
    """
    if not rules.lock_binds:
        return None
    known = [lock for lock in locks if lock != NO_LOCK]
    highest = max((lock.view for lock in known), default=-1)
    return {lock.value for lock in known if lock.view == highest} or None


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
