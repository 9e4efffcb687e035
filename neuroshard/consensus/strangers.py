"""Seats among strangers: the wallets that may get them, and the seats that may be taken away. Pure.

Wallets cost nothing, so no amount of work leads to a seat. The owner names the wallets in a signed statement, and an
entry takes the list into the chain. From then on the chain alone decides who may get a seat and who may lose it.

    a wallet                                       its seat
    named, 30 certified minutes of accepted work   may be added: four seats at first in one value, then one by one
    named no more                                  may be removed
    in fewer than 4 of the last 32 aggregates      may be removed; it returns like that of a friend
    has voted twice in one view and phase          is lost for the epoch
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from neuroshard.consensus.committee import MAX_SEATS, MAX_TRUSTED, Committee, Height, InvalidEntryError, Trust
from neuroshard.consensus.foundation import Founding
from neuroshard.consensus.round_messages import Value
from neuroshard.types import NamedWallet, WalletId

SEAT_SPAN, LEAST_ACCEPTED = 32, 4  # aggregates; a seat with less accepted work in them may be removed
MAX_EXPELLED = 64
_FULL_SPAN = (1 << SEAT_SPAN) - 1


class StrangersLedger(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of the ledger that only a run open to strangers has."""

    # wallets that may get seats: those that the owner has named, the owner's, and those with seats by the foundation
    trusted: Annotated[tuple[NamedWallet, ...], Meta(max_length=MAX_TRUSTED + MAX_SEATS + 1)]
    number: Height  # epoch of the owner's statement that names them
    # of each seat, whether it is in the last SEAT_SPAN aggregates, one bit each; those before it was seated count
    attendance: Annotated[tuple[Annotated[int, Meta(ge=0, le=_FULL_SPAN)], ...], Meta(max_length=MAX_SEATS)]
    expelled: Annotated[tuple[NamedWallet, ...], Meta(max_length=MAX_EXPELLED)] = ()

    @classmethod
    def founded(cls, by: Founding) -> StrangersLedger:
        """The state at the beginning of an epoch."""
        seats = by.start.committee.seats
        wallets = {*by.trusted, by.owner, *(seat.wallet_id for seat in seats)}
        return cls(tuple(sorted(wallets)), by.epoch, (_FULL_SPAN,) * len(seats))

    def trusts(self, wallet: WalletId | None) -> bool:
        """Whether a wallet may get a seat when it has worked for long enough."""
        return wallet in self.trusted and wallet not in self.expelled

    def unfit(self, committee: Committee) -> tuple[WalletId, ...]:
        """Wallets whose seats may be removed."""
        seats = zip(committee.seats, self.attendance, strict=False)
        return tuple(
            seat.wallet_id
            for seat, history in seats
            if not self.trusts(seat.wallet_id) or history.bit_count() < LEAST_ACCEPTED
        )

    def trusting(self, entry: Trust, owner: WalletId) -> StrangersLedger:
        """The state with a newer list of the owner. Raises InvalidEntryError."""
        if entry.number <= self.number:
            raise InvalidEntryError(f"list {entry.number} of named wallets is not newer than list {self.number}")
        return replace(self, trusted=tuple(sorted({*entry.wallets, owner})), number=entry.number)

    def expelling(self, wallets: tuple[WalletId, ...]) -> StrangersLedger:
        """The state in which these wallets get no seat again."""
        return replace(self, expelled=(*self.expelled, *wallets)[-MAX_EXPELLED:])

    def after(self, value: Value, before: Committee, committee: Committee) -> StrangersLedger:
        """The state after a value that turned the committee `before` into another. A new seat begins as if in all
        aggregates.
        """
        known = dict(zip((seat.wallet_id for seat in before.seats), self.attendance, strict=False))
        accepted = {member.wallet_id for member in value.members if member.node_id in value.accepted}
        attendance = list[int]()
        for seat in committee.seats:
            history = known.get(seat.wallet_id, _FULL_SPAN)
            if value.round_id is not None and seat.wallet_id in known:
                history = (history << 1 | (seat.wallet_id in accepted)) & _FULL_SPAN
            attendance.append(history)
        return replace(self, attendance=tuple(attendance))
