"""Rules of the chain of certificates as pure functions: committees, quorums, entries, and the choice of a new view.

Both explorers read these rules. `Rules()` is the set that decision 29 proposes, and no violation is known. Each
switch drops one rule, or restores the wording that the decision replaces, so that the explorers can show why the rule
is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

Wallet = int
Hash = int
LossRule = Literal["new key", "next certificate", "at once"]


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
    work_seats_bounded: bool = True  # seats won by work alone are never more than F
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
    by_work: bool = False


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
    by_work: bool = False


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
    admits = 0
    for entry in entries:
        if rules.entries_name_parent and entry.parent != parent:
            return None
        admits += entry.kind == "admit"
        one_by_one = _changed_once(rules, ledger, entry, owner)
        if one_by_one is None or admits > max(1, len(ledger.seats) // 8):
            return None
        ledger = one_by_one
    return ledger


def _changed_once(rules: Rules, ledger: Ledger, entry: Entry, owner: Wallet) -> Ledger | None:
    wallets = [seat.wallet for seat in ledger.seats]
    if (entry.kind == "admit") == (entry.wallet in wallets):
        return None
    rest = tuple(seat for seat in ledger.seats if seat.wallet != entry.wallet)
    if entry.kind == "admit":
        return _admitted(rules, ledger, Seat(entry.wallet, entry.key, entry.by_work), owner)
    if entry.kind == "key":
        moved = tuple(seat._replace(key=entry.key) if seat.wallet == entry.wallet else seat for seat in ledger.seats)
        return ledger._replace(seats=moved)
    faults = _faults_after(rules, ledger, rest)
    allowed = faults + 1 if entry.kind == "expel" else 3 * faults + 1
    if len(rest) < max(1, allowed):
        return None
    return ledger._replace(seats=rest, faults=faults)


def _admitted(rules: Rules, ledger: Ledger, seat: Seat, owner: Wallet) -> Ledger | None:
    seats = (seat, *ledger.seats) if seat.wallet == owner else (*ledger.seats, seat)
    faults = max(ledger.faults, tolerated(ledger.friends, len(seats)))
    if rules.work_seats_bounded and sum(each.by_work for each in seats) > faults:
        return None
    return ledger._replace(seats=seats, faults=faults, most_faults=max(faults, ledger.most_faults))


def _faults_after(rules: Rules, ledger: Ledger, rest: tuple[Seat, ...]) -> int:
    if ledger.friends:
        return 0
    if rules.faults_fall_with_seats:
        return tolerated(False, len(rest))
    if rules.faults_fall_by_assent and len(rest) < 3 * ledger.faults + 1:
        floor = max(sum(seat.by_work for seat in rest), ledger.most_faults // 2)
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
