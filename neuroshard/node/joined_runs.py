"""Runs this computer joined or made, kept in the data folder, so that a restart knows them before any peer answers."""

from __future__ import annotations

import logging
from pathlib import Path

from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.errors import DataError, StorageError
from neuroshard.runs.offer import (
    MAX_OFFER_BYTES,
    OfferChoice,
    RunOffer,
    RunOfferError,
    better_of,
    checked_offer,
    read_offer,
)
from neuroshard.types import RunId

log = logging.getLogger(__name__)

RUN_ID_DIGITS = 64


class JoinedRuns:
    """The offers in <data-dir>/runs/joined, one file a run. A file is verified whenever it is read."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "runs" / "joined"
        self._data_dir = data_dir

    def load(self, run_id: RunId) -> RunOffer | None:
        """The stored offer; None when there is none, or none that can be used: peers have it, too."""
        if not is_run_id(run_id):  # it comes from peers and becomes a file name
            return None
        file = self._file(run_id)
        try:
            data = _read(file)
            return None if data is None else checked_offer(run_id, data)
        except (OSError, DataError) as error:
            log.warning("The stored run %s cannot be used: %s", file, error)
            return None

    def keep(self, offer: RunOffer) -> OfferChoice:
        """Store a checked offer unless a better one is stored; which of them holds. Raises StorageError."""
        held = self.load(offer.run_id)
        choice = OfferChoice(offer, is_new=True) if held is None else better_of(held, offer)
        if choice.is_new:
            file = self._file(offer.run_id)
            try:
                make_folder(file.parent, self._data_dir)
                write_atomically(file, offer.to_json())
            except OSError as error:
                raise StorageError(f"Cannot write {file}: {error}.", "Make the data folder writable.") from error
        return choice

    def _file(self, run_id: RunId) -> Path:
        return self._folder / f"{run_id}.json"


def is_run_id(text: str) -> bool:
    """Whether a text has the form of a run id: 64 lower-case hex digits."""
    return len(text) == RUN_ID_DIGITS and not set(text) - set("0123456789abcdef")


def read_offer_file(file: Path) -> RunOffer:
    """The verified offer in a file. Raises StorageError when it cannot be read, DataError when it is not an offer."""
    try:
        data = _read(file)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}.", "Check the path.") from error
    if data is None:
        raise StorageError(f"{file} is not there.", "Check the path.")
    try:
        return read_offer(data)
    except DataError as error:
        raise RunOfferError(f"{file} is not a run as its owner signed it. {error.message}", error.action) from error


def _read(file: Path) -> bytes | None:
    """At most one byte more than an offer may have, so that the reader refuses it. Raises OSError."""
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_OFFER_BYTES + 1)
    except FileNotFoundError:
        return None
