"""The foundations of a run on this computer: one file per run, next to the run's offer."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from string import hexdigits
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from neuroshard.config.state_file import alone_in, make_folder, read_bounded, write_atomically
from neuroshard.consensus.committee import MAX_TRUSTED
from neuroshard.consensus.foundation import (
    KEPT_HEIRS,
    MAX_DEPUTIES,
    MAX_STATEMENTS,
    Foundations,
    SignedFoundation,
    SignedSuccession,
)
from neuroshard.consensus.waypoints import KEPT_PER_STAGE, MAX_STAGES, SignedWaypoint
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import DataError, StorageError, UsageError
from neuroshard.identity import Wallet
from neuroshard.runs.offer import RunOffer
from neuroshard.types import WALLET_ID_DIGITS, WalletId

_LOG = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
LEAST_DIGITS = 8  # of a named wallet, to take its name back


class FoundationList(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All statements of a run, the owner's waypoints and the heirs', as nodes send and store them."""

    statements: Annotated[tuple[SignedFoundation, ...], Meta(max_length=MAX_STATEMENTS)] = ()
    waypoints: Annotated[tuple[SignedWaypoint, ...], Meta(max_length=MAX_STAGES * KEPT_PER_STAGE)] = ()
    successions: Annotated[tuple[SignedSuccession, ...], Meta(max_length=MAX_STAGES * KEPT_HEIRS)] = ()


def encode_foundations(foundations: Foundations) -> bytes:
    """The statements in the order of their epochs, the waypoints, and the successions."""
    statements = sorted(foundations.known.values(), key=lambda each: (each.foundation.epoch, each.id))
    waypoints = [each for stage in sorted(foundations.waypoints) for each in foundations.waypoints[stage]]
    heirs = [each for stage in sorted(foundations.successions) for each in foundations.successions[stage]]
    return msgspec.msgpack.encode(FoundationList(tuple(statements), tuple(waypoints), tuple(heirs)))


def read_foundations(known: Foundations, data: bytes) -> Foundations:
    """Add the statements in this encoding. Raises DataError for the first one that is not valid."""
    try:
        listed = msgpack_decoder(FoundationList).decode(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"Foundations of a run cannot be read: {str(error)[:200]}") from None
    return known.with_statements(listed.statements, listed.waypoints, listed.successions)


def merged(known: Foundations, others: Foundations) -> Foundations:
    """All statements, waypoints and successions of both."""
    waypoints = [each for stage in others.waypoints.values() for each in stage]
    heirs = [each for stage in others.successions.values() for each in stage]
    return known.with_statements(others.known.values(), waypoints, heirs)


def no_foundations(offer: RunOffer) -> Foundations:
    """The statements of a run of which none is known yet."""
    return Foundations(offer.run_id, offer.initial.owner_public_key)


class StoredFoundations:
    """The foundations in <data-dir>/runs/joined. Every read verifies the file."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "runs" / "joined"
        self._data_dir = data_dir

    def read(self, offer: RunOffer) -> Foundations:
        """The stored statements; none if the file is missing. A damaged one is set aside: peers can send them again."""
        empty, file = no_foundations(offer), self._file(offer)
        try:
            data = read_bounded(file, MAX_BYTES)
            return empty if data is None else read_foundations(empty, data)
        except DataError as error:
            _LOG.warning("The foundations in %s are damaged and were set aside: %s", file, error)
            with suppress(OSError):
                file.replace(file.with_name(f"{file.name}.damaged"))
        except (OSError, StorageError) as error:
            _LOG.warning("The foundations in %s cannot be read: %s", file, error)
        return empty

    def write(self, offer: RunOffer, foundations: Foundations) -> None:
        """Store all statements, next to those that a command has stored meanwhile. Raises StorageError."""
        with self._alone():
            self._write(offer, foundations)

    def _alone(self) -> AbstractContextManager[None]:
        return alone_in(self._folder, self._data_dir)

    def _write(self, offer: RunOffer, foundations: Foundations) -> None:
        file, both = self._file(offer), merged(self.read(offer), foundations)
        try:
            make_folder(file.parent, self._data_dir)
            write_atomically(file, encode_foundations(both))
        except OSError as error:
            raise StorageError(f"Cannot write {file}: {error}.", "Make the data folder writable.") from error

    def name_deputy(self, offer: RunOffer, owner: Wallet, deputy: bytes) -> None:
        """Sign and store a statement that names a wallet as deputy as well. Raises UsageError and StorageError.

        A running node reads the file regularly and passes the statement on.
        """
        with self._alone():
            known = self._changeable(offer, owner)
            if deputy in known.deputies:
                return
            if len(known.deputies) == MAX_DEPUTIES:
                raise UsageError(
                    f"A run has at most {MAX_DEPUTIES} deputies.", "Withdraw one: `neuroshard run trust --withdraw`."
                )
            self._write(offer, known.with_statements([known.next(owner, (), (*known.deputies, deputy))]))

    def withdraw_deputies(self, offer: RunOffer, owner: Wallet, withdrawn: Collection[bytes]) -> None:
        """Sign and store a statement without these deputies, if any of them is one. Raises UsageError, StorageError."""
        with self._alone():
            known = self._changeable(offer, owner)
            deputies = tuple(key for key in known.deputies if key not in withdrawn)
            if deputies != known.deputies:
                self._write(offer, known.with_statements([known.next(owner, (), deputies)]))

    def name_voter(self, offer: RunOffer, owner: Wallet, named: str) -> tuple[WalletId, ...]:
        """Name a wallet that may get seats in a run that is open to strangers. Returns all that are named.

        Raises UsageError and StorageError. The name must be complete: anyone can make a wallet with the same first
        digits.
        """
        wallet = WalletId(named.lower())
        if len(wallet) != WALLET_ID_DIGITS or not set(wallet) <= set(hexdigits):
            raise UsageError(
                f"{named!r} is not a wallet.",
                f"Give all {WALLET_ID_DIGITS} digits: on its computer, `neuroshard status` prints them.",
            )
        if wallet == offer.owner:
            raise UsageError("The owner's wallet may vote without being named.", "Name wallets of others.")
        with self._alone():
            known = self._changeable(offer, owner)
            return self._name_voters(offer, owner, known, tuple(dict.fromkeys((*known.trusted, wallet))))

    def withdraw_voter(self, offer: RunOffer, owner: Wallet, named: str) -> WalletId:
        """Take the name of a wallet back, which is given by its first digits. Raises UsageError and StorageError."""
        with self._alone():
            known = self._changeable(offer, owner)
            found = [wallet for wallet in known.trusted if wallet.startswith(named.lower())]
            if len(found) != 1 or len(named) < LEAST_DIGITS:
                problem = "Several named wallets begin" if len(found) > 1 else "No named wallet begins"
                raise UsageError(
                    f"{problem} with {named!r}.",
                    f"`neuroshard run members` lists them; give at least {LEAST_DIGITS} digits.",
                )
            self._name_voters(offer, owner, known, tuple(wallet for wallet in known.trusted if wallet not in found))
        return found[0]

    def _name_voters(
        self, offer: RunOffer, owner: Wallet, known: Foundations, wallets: tuple[WalletId, ...]
    ) -> tuple[WalletId, ...]:
        if len(wallets) > MAX_TRUSTED:
            raise UsageError(
                f"A run names at most {MAX_TRUSTED} wallets.", "Remove one: `neuroshard run remove WALLET`."
            )
        if wallets != known.trusted:
            self._write(offer, known.with_statements([known.next(owner, (), trusted=wallets)]))
        return wallets

    def _changeable(self, offer: RunOffer, owner: Wallet) -> Foundations:
        """The stored statements, if this wallet may add one. Raises UsageError."""
        known = self.read(offer)
        if owner.public_key != known.owner:
            raise UsageError("Only the run's owner can name its deputies and voters.", "Use the owner's token.")
        if known.is_contradictory:
            raise UsageError(
                "Two foundations of the run contradict each other.", "Decide first: `neuroshard run refound`."
            )
        return known

    def request_new(self, offer: RunOffer) -> None:
        """Ask the node of this data folder to found the run again, now or at its next start. Raises StorageError."""
        try:
            make_folder(self._folder, self._data_dir)
            write_atomically(self._request(offer), b"")
        except OSError as error:
            raise StorageError(
                f"Cannot write {self._request(offer)}: {error}.", "Make the data folder writable."
            ) from error

    def withdraw_request(self, offer: RunOffer) -> None:
        """Forget the request: the statement is signed. Raises StorageError."""
        try:
            self._request(offer).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"Cannot delete {self._request(offer)}: {error}.", "Delete it.") from error

    def is_new_requested(self, offer: RunOffer) -> bool:
        """Whether the owner has asked for a new foundation that is not signed yet."""
        return self._request(offer).exists()

    def _request(self, offer: RunOffer) -> Path:
        return self._folder / f"{offer.run_id}.refound"

    def _file(self, offer: RunOffer) -> Path:
        return self._folder / f"{offer.run_id}.foundations"
