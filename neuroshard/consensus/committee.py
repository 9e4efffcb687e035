"""The committee of a stage: its seats, its quorum, the liars it tolerates, and the entries that change it. Pure.

A seat votes; every other member only contributes. The committee of a height is fixed before the height begins, so
absence never makes a quorum smaller. `docs/decisions/0029` gives the reasons for the rules; `tests/models` explores
them.

    admission    F                              quorum of the committee C            what lowers F
    friends      0                              |C| // 2 + 1, or half with the        -
                                                first seat
    otherwise    (|C| - 1) // 3 when seated     (|C| + F) // 2 + 1                    a foundation only

Where participants may be strangers, one value leads from fewer than four seats to four. With two or three seats F would
be 0, and one liar among them could certify two values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Annotated, TypeAlias, assert_never

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from neuroshard.errors import DataError
from neuroshard.identity import SignedRunParameters, hash_parts
from neuroshard.types import MAX_NODE_ID_CHARACTERS, PRINTABLE, NamedWallet, NodeId, WalletId

NamedNode = Annotated[NodeId, Meta(max_length=MAX_NODE_ID_CHARACTERS, pattern=PRINTABLE)]  # the node id in a message
MAX_SEATS = 16  # F = 5, quorum 11
LEAST_OPEN_SEATS = 4  # after an admission among strangers: the fewest that tolerate a liar
MAX_ENTRIES = 2 * MAX_SEATS  # per value
MAX_TRUSTED = 32  # wallets of strangers that may get seats
SILENT_STEPS = 16  # outer steps in which a reducer without results reduces nothing
WRONG_STEPS = 100  # and one with false results
MAX_NAMING_BYTES = 1024
MAX_VERSION_BYTES = 8 * 1024  # of the signed parameters of a run
KEPT_VERSIONS = 16  # in the ledger, the newest: earlier outer steps are nobody's any more
VERSION_STEPS = 2  # outer steps after the value with a version, before it applies
ADMISSION_SECONDS = 1800  # of accepted work, as the seats certify it, before a wallet gets a seat
SPAN = 16  # aggregates; who is in half of them is established
LARGEST = 10**15  # of a number that counts work
LARGEST_HEIGHT = 1 << 48
Height = Annotated[int, Meta(ge=0, le=LARGEST_HEIGHT)]
_Count = Annotated[int, Meta(ge=0, le=MAX_SEATS)]


class InvalidEntryError(ValueError):
    """An entry that the committee does not allow. A value with such an entry is its proposer's fault."""


class GroupMember(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A node and the wallet that vouches for it."""

    node_id: NamedNode
    wallet_id: NamedWallet


def has_one_node_per_wallet(members: Iterable[GroupMember]) -> bool:
    """Whether every wallet has one node here."""
    wallets = [member.wallet_id for member in members]
    return len(set(wallets)) == len(wallets)


class Seat(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right of a wallet to vote on one stage, with one node whose key signs its votes."""

    wallet_id: NamedWallet
    node_id: NamedNode
    seated_at: Height  # with this node: its votes count above this height only

    @property
    def member(self) -> GroupMember:
        """The node that votes for the seat."""
        return GroupMember(self.node_id, self.wallet_id)


class Committee(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The seats of one stage, in order of seating; the owner's seat, if there is one, is the first."""

    seats: Annotated[tuple[Seat, ...], Meta(min_length=1, max_length=MAX_SEATS)]
    is_open: bool  # whether participants may be strangers
    faults: _Count = 0  # F: seats that may lie
    most_faults: _Count = 0  # largest F since the foundation

    def __post_init__(self) -> None:
        if len(self.wallets) != len(self.seats) or len({seat.node_id for seat in self.seats}) != len(self.seats):
            raise ValueError("a committee has each wallet and each node once")
        if self.faults > self.most_faults or len(self.seats) < self.faults + 1:
            raise ValueError("a committee cannot tolerate this number of liars")

    @classmethod
    def founded(cls, seats: Iterable[Seat], *, is_open: bool) -> Committee:
        """Return the committee of a foundation."""
        members = tuple(seats)
        faults = tolerated_faults(len(members), is_open=is_open)
        return cls(members, is_open, faults, faults)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the committee; every value names the committee that votes on it."""
        return hash_parts("neuroshard/committee", msgspec.msgpack.encode(self)).hex()

    @cached_property
    def wallets(self) -> frozenset[WalletId]:
        """Wallets with a seat."""
        return frozenset(map(attrgetter("wallet_id"), self.seats))

    @cached_property
    def members(self) -> frozenset[GroupMember]:
        """The nodes that vote."""
        return frozenset(map(attrgetter("member"), self.seats))

    def seat_of(self, wallet: WalletId) -> Seat | None:
        """The seat of a wallet, if it has one."""
        return next((seat for seat in self.seats if seat.wallet_id == wallet), None)

    def is_quorum(self, voters: Collection[GroupMember]) -> bool:
        """Whether these voters decide. Voters without a seat do not count.

        Two quorums share F + 1 seats, of which one is honest. With F = 0 and an even number of seats, half of them
        decide if the first seat is among them: two halves with the first seat share it.
        """
        votes = len(self.members.intersection(voters))
        if votes >= self.quorum:
            return True
        return self.faults == 0 and 2 * votes == len(self.seats) and self.seats[0].member in voters

    @property
    def quorum(self) -> int:
        """Number of votes that always decide."""
        return (len(self.seats) + self.faults) // 2 + 1


class Candidate(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A wallet without a seat, and the certified time in which its work was accepted."""

    wallet_id: NamedWallet
    node_id: NamedNode
    seconds: Annotated[int, Meta(ge=0, le=LARGEST)]
    accepted: Annotated[int, Meta(ge=0, lt=1 << SPAN)] = 0  # in the last SPAN aggregates, one bit each

    @property
    def is_due(self) -> bool:
        """Whether a wallet may get a seat: it has worked for long enough, and is in the newest aggregate."""
        return self.seconds >= ADMISSION_SECONDS and self.accepted & 1 == 1

    @property
    def is_established(self) -> bool:
        """Whether enough of the last aggregates contain its work: then the others are compared with it."""
        return self.accepted.bit_count() >= SPAN // 2


def tolerated_faults(seats: int, *, is_open: bool) -> int:
    """F of a committee with this number of seats when it is founded: 0 among friends, below a third elsewhere."""
    return (seats - 1) // 3 if is_open else 0


# Entries


class Admit(Struct, frozen=True, tag="admit", forbid_unknown_fields=True):
    """A wallet gets a seat."""

    wallet_id: NamedWallet
    node_id: NamedNode


class Leave(Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """A seat gives up its right to vote, at one height only: its claim names the parent of the value."""

    wallet_id: NamedWallet


class Remove(Struct, frozen=True, tag="remove", forbid_unknown_fields=True):
    """The seats remove one that has been silent. The claims of a quorum name the parent of the value."""

    wallet_id: NamedWallet


class Expel(Struct, frozen=True, tag="expel", forbid_unknown_fields=True):
    """A seat loses its right to vote because two of its votes contradict each other."""

    wallet_id: NamedWallet


class MoveKey(Struct, frozen=True, tag="key", forbid_unknown_fields=True):
    """A seat votes with another node, or with the same node and a new vote log, from the next height on."""

    wallet_id: NamedWallet
    node_id: NamedNode


class Trust(Struct, frozen=True, tag="trust", forbid_unknown_fields=True):
    """Among strangers only these wallets get seats. It replaces the list of every statement with a lower number."""

    number: Height  # epoch of the owner's statement
    wallets: Annotated[tuple[NamedWallet, ...], Meta(max_length=MAX_TRUSTED)]


class Bar(Struct, frozen=True, tag="bar", forbid_unknown_fields=True):
    """A node reduces nothing for some outer steps. It changes no committee: see `ChainLedger.barred`."""

    node_id: NamedNode
    is_wrong: bool = False  # its results were false; otherwise they did not come


class Barred(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node that reduces nothing before this outer step, because a quorum of the seats got no results of it, or false
    ones.
    """

    node_id: NamedNode
    until: Height


class NameHeir(Struct, frozen=True, tag="heir", forbid_unknown_fields=True):
    """The only seat names the wallet with the stage's copy, which may found the stage again when the seat is gone."""

    wallet_id: NamedWallet
    naming: Annotated[bytes, Meta(max_length=MAX_NAMING_BYTES)]  # a HeirNaming that the seat has signed


class ChangeParameters(Struct, frozen=True, tag="parameters", forbid_unknown_fields=True):
    """A later version of the run's parameters, as the owner has signed it. It changes no committee."""

    number: Annotated[int, Meta(ge=2, le=LARGEST)]
    holds_from: Height  # the outer step that the owner has named; it applies there or later
    signed: Annotated[bytes, Meta(max_length=MAX_VERSION_BYTES)]  # SignedRunParameters as canonical JSON


class AppliedVersion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A certified version of the run's parameters, and the first outer step at which it applies."""

    number: Annotated[int, Meta(ge=2, le=LARGEST)]
    start: Height
    signed: Annotated[bytes, Meta(max_length=MAX_VERSION_BYTES)]


SeatEntry: TypeAlias = Admit | Leave | Remove | Expel | MoveKey | NameHeir
Entry: TypeAlias = SeatEntry | Trust | Bar | ChangeParameters


@dataclass(frozen=True)
class EntryRules:
    """The changes that the entries of one value may make."""

    height: int  # of the value
    owner: WalletId  # whose seat is the first one
    outer_step: int = 0  # completed outer steps after the value

    def applied(self, committee: Committee, entries: Sequence[Entry]) -> Committee:
        """Return the committee after the entries, in their order. Raises InvalidEntryError that names the entry.

        The evidence of an entry (signatures, accepted work) is checked elsewhere, before a seat votes. The reader of a
        certificate relies on the quorum that has checked it.
        """
        changes = [entry for entry in entries if not isinstance(entry, Trust | Bar | ChangeParameters)]
        admitted, seated = sum(isinstance(entry, Admit) for entry in changes), len(committee.seats)
        if admitted > most_admitted(committee):
            raise InvalidEntryError("a value admits at most an eighth of the committee")
        for entry in changes:
            committee = self._after(committee, entry)
        if committee.is_open:
            self._check_open(committee, changes, seated)
        return committee

    def _after(self, committee: Committee, entry: SeatEntry) -> Committee:
        is_seated = entry.wallet_id in committee.wallets
        if isinstance(entry, Admit | NameHeir) == is_seated:
            raise InvalidEntryError(f"wallet {entry.wallet_id} {'has' if is_seated else 'has no'} seat")
        match entry:
            case Admit():
                return self._admitted(committee, entry)
            case MoveKey(wallet_id, node_id):
                return _changed(
                    committee,
                    tuple(
                        replace(seat, node_id=node_id, seated_at=self.height) if seat.wallet_id == wallet_id else seat
                        for seat in committee.seats
                    ),
                )
            case Leave() | Remove() | Expel():
                rest = tuple(seat for seat in committee.seats if seat.wallet_id != entry.wallet_id)
                if not rest:
                    raise InvalidEntryError("the last seat of a stage stays")
                if len(rest) < committee.faults + 1:
                    raise InvalidEntryError("the seats that remain would not be a quorum")
                return _changed(committee, rest)
            case NameHeir():
                if committee.is_open or len(committee.seats) > 1:
                    raise InvalidEntryError("only a seat that is alone among friends names an heir")
                return committee
            case _:
                assert_never(entry)

    def _admitted(self, committee: Committee, entry: Admit) -> Committee:
        if len(committee.seats) == MAX_SEATS:
            raise InvalidEntryError(f"a stage has at most {MAX_SEATS} seats")
        seat = Seat(entry.wallet_id, entry.node_id, self.height)
        is_owner = entry.wallet_id == self.owner
        seats = (seat, *committee.seats) if is_owner else (*committee.seats, seat)
        faults = max(committee.faults, tolerated_faults(len(seats), is_open=committee.is_open))
        return _changed(committee, seats, faults=faults)

    def _check_open(self, committee: Committee, entries: Sequence[SeatEntry], seated: int) -> None:
        """An admission leads to four seats at least, so that F is at least 1.

        An expulsion may leave fewer than 3 F + 1 seats; a leave or a removal must be replaced in the same value.
        """
        count = len(committee.seats)
        if count < LEAST_OPEN_SEATS and any(isinstance(entry, Admit) for entry in entries):
            raise InvalidEntryError(f"strangers get seats only if there are {LEAST_OPEN_SEATS} seats then")
        is_short = count < min(seated, 3 * committee.faults + 1)
        if is_short and any(isinstance(entry, Leave | Remove) for entry in entries):
            raise InvalidEntryError(
                f"{len(committee.seats)} seats would remain, fewer than the {3 * committee.faults + 1} that tolerate "
                f"{committee.faults} liars"
            )


def _changed(committee: Committee, seats: tuple[Seat, ...], faults: int | None = None) -> Committee:
    present = committee.faults if faults is None else faults
    try:
        return Committee(seats, committee.is_open, present, max(present, committee.most_faults))
    except ValueError as error:
        raise InvalidEntryError(str(error)) from None


def most_admitted(committee: Committee) -> int:
    """The number of seats that the next value may add: an eighth, or what completes the first four of an open one."""
    seated = len(committee.seats)
    return max(1, seated // 8, LEAST_OPEN_SEATS - seated if committee.is_open else 0)


def barred_after(barred: Iterable[Barred], bars: Iterable[Bar], outer_step: int, most: int) -> tuple[Barred, ...]:
    """The nodes that reduce nothing in an outer step, at most `most`. Raises InvalidEntryError."""
    until = {one.node_id: one.until for one in barred if one.until > outer_step}
    for bar in bars:
        if bar.node_id not in until and len(until) >= most:
            raise InvalidEntryError(f"at most {most} nodes can be kept from reducing at the same time")
        end = outer_step + (WRONG_STEPS if bar.is_wrong else SILENT_STEPS)
        until[bar.node_id] = max(end, until.get(bar.node_id, 0))
    return tuple(Barred(node, end) for node, end in sorted(until.items()))


def versions_after(
    versions: tuple[AppliedVersion, ...], entries: Iterable[Entry], outer_step: int
) -> tuple[AppliedVersion, ...]:
    """The certified versions after a value that leads to this outer step. Raises InvalidEntryError.

    A version applies VERSION_STEPS outer steps later at the earliest. A node at that step has adopted the value before
    it, and so it has the version, too. A version that would apply only from the same step on, or later, never applies.
    """
    for entry in entries:
        if isinstance(entry, ChangeParameters):
            if versions and entry.number <= versions[-1].number:
                raise InvalidEntryError(f"version {entry.number} is not newer than version {versions[-1].number}")
            start = max(entry.holds_from, outer_step + VERSION_STEPS)
            earlier = tuple(each for each in versions if each.start < start)
            versions = (*earlier, AppliedVersion(entry.number, start, entry.signed))[-KEPT_VERSIONS:]
    return versions


def versions_from(versions: tuple[AppliedVersion, ...], outer_step: int) -> tuple[AppliedVersion, ...]:
    """The versions that apply at an outer step or later."""
    past = [each for each in versions if each.start <= outer_step]
    return (*past[-1:], *versions[len(past) :])


def change_of(signed: SignedRunParameters) -> ChangeParameters:
    """The entry for a version. Raises DataError if it does not fit into an entry."""
    data, parameters = signed.to_json(), signed.parameters
    if len(data) > MAX_VERSION_BYTES:
        raise DataError(
            f"Version {parameters.version} of the run has {len(data):,} bytes, more than {MAX_VERSION_BYTES:,}.",
            "Name fewer seeds.",
        )
    return ChangeParameters(parameters.version, parameters.holds_from_outer_step, data)


@lru_cache(maxsize=64)
def read_change(signed: bytes) -> tuple[ChangeParameters, WalletId]:
    """The entry for a signed version and the wallet that signed it. Raises ValueError."""
    try:
        read = SignedRunParameters.from_json(signed)
    except DataError as error:
        raise ValueError(f"A version of the run cannot be read: {error} - in `version`") from None
    if read.to_json() != signed or read.parameters.version == 1:
        raise ValueError("A version of the run is not written as this program does, or it is the first - in `version`")
    return change_of(read), read.owner_wallet_id
