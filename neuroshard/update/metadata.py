"""Verify the signed metadata of releases: root, timestamp, snapshot and targets of The Update Framework (TUF).

python-tuf verifies the whole chain (docs/decisions/0035). This file adds the downloads, the limits and a place for
its files, and puts refusals into words. The library works on files and a symbolic link in a temporary folder. Its files
are stored in the data folder as one value, so that a kill leaves all of the old or all of the new.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import NoReturn

import anyio.from_thread
import anyio.to_thread
from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, Root  # pyright: ignore[reportPrivateImportUsage] - its documented place
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from neuroshard.data.storage import storage_error
from neuroshard.data.transfer import FileMissingError
from neuroshard.errors import DataUnavailableError, NeuroShardError
from neuroshard.update.fetching import MAX_METADATA_BYTES, fetch_metadata
from neuroshard.update.release import SignedArchive, UpdateRefusedError, is_metadata_name

LOOK_SECONDS = 60.0  # for all files of one look
MAX_ROOTS = 32  # rotations in one look; a computer that missed more looks again
LIMITS = UpdaterConfig(
    max_root_rotations=MAX_ROOTS,
    max_delegations=0,  # all archives are in the top-level role
    root_max_length=32_768,
    timestamp_max_length=8_192,
    snapshot_max_length=8_192,
    targets_max_length=MAX_METADATA_BYTES,
)
MetadataFiles = Mapping[str, bytes]  # by their names in the library's folder


@dataclass(frozen=True)
class MetadataLook:
    """The result of one look: the metadata to remember, also after a refusal, and the archive or the refusal."""

    files: MetadataFiles
    archive: SignedArchive | None = None
    refusal: NeuroShardError | None = None


async def look_at_metadata(base: str, anchor: bytes, known: MetadataFiles, target: str) -> MetadataLook:
    """Fetch newer metadata from below `base`, verify them from the root `anchor` on, and find the archive `target`.

    `known` has the files of the look before: older ones than these are refused. The library compares expiry dates with
    this computer's clock.
    """
    return await anyio.to_thread.run_sync(_look, base, anchor, known, target, abandon_on_cancel=True)


class _Fetcher(FetcherInterface):
    """The library's downloads, bounded in bytes and time. Runs in a thread of the event loop."""

    def __init__(self) -> None:
        self._latest = time.monotonic() + LOOK_SECONDS

    def _fetch(self, url: str) -> Iterator[bytes]:
        try:
            yield anyio.from_thread.run(fetch_metadata, url, max(0.0, self._latest - time.monotonic()))
        except FileMissingError as error:
            raise DownloadHTTPError(str(error), 404) from error


def _look(base: str, anchor: bytes, known: MetadataFiles, target: str) -> MetadataLook:
    try:
        with TemporaryDirectory(prefix="neuroshard-update-") as name:
            folder = Path(name)
            _write_files(folder, known)
            try:
                archive = _find(folder, base, anchor, target)
            except NeuroShardError as refusal:
                return MetadataLook(_read_files(folder), refusal=refusal)
            return MetadataLook(_read_files(folder), archive)
    except OSError as error:
        raise storage_error(Path(gettempdir()), error) from error


def _find(folder: Path, base: str, anchor: bytes, target: str) -> SignedArchive | None:
    address = f"{base.rstrip('/')}/metadata/"
    try:
        updater = Updater(str(folder), address, fetcher=_Fetcher(), config=LIMITS, bootstrap=anchor)
        found = updater.get_targetinfo(target)
    except (RepositoryError, DownloadError) as error:
        _refuse(error, folder)
    if found is None:
        return None
    digest = found.hashes.get("sha256")
    if digest is None:
        raise UpdateRefusedError("The release has no SHA-256 digest.", "Report this to the publisher.")
    return SignedArchive(found.length, digest, found.custom)


def _refuse(error: RepositoryError | DownloadError, folder: Path) -> NoReturn:
    """Raise the error in words with what to do about it."""
    match error:
        case DownloadLengthMismatchError():
            raise UpdateRefusedError(f"The metadata of the releases are too long: {error}.", TRY_ELSEWHERE) from error
        case DownloadError():
            raise DataUnavailableError(f"The releases have no metadata: {error}.", TRY_ELSEWHERE) from error
        case ExpiredMetadataError():
            _refuse_expired(error, folder)
        case BadVersionNumberError():
            said = f"The metadata of the releases are older than those seen before ({error})."
            raise UpdateRefusedError(said, f"The server may be holding newer versions back. {TRY_ELSEWHERE}") from error
        case UnsignedMetadataError():
            said = f"The metadata of the releases are not signed by enough of the publisher's keys ({error})."
            raise UpdateRefusedError(said, f"Nothing was installed. {TRY_ELSEWHERE}") from error
        case LengthOrHashMismatchError():
            said = "The metadata of the releases do not belong together."
            raise UpdateRefusedError(said, f"A mirror may mix several releases. {TRY_ELSEWHERE}") from error
        case _:
            said = f"The metadata of the releases cannot be used: {error}."
            raise UpdateRefusedError(said, f"Nothing was installed. {TRY_ELSEWHERE}") from error


TRY_ELSEWHERE = "Try again later, or set another update_url."


def _refuse_expired(error: ExpiredMetadataError, folder: Path) -> NoReturn:
    """Raise the error for a root whose time is over, which only an installer replaces, or for other metadata."""
    roots = sorted((folder / "root_history").glob("*.root.json"), key=lambda path: int(path.name.split(".")[0]))
    root = Metadata[Root].from_bytes(roots[-1].read_bytes()).signed
    if root.is_expired():
        said = f"The publisher's root of trust expired on {root.expires:%Y-%m-%d}."
        action = "Check this computer's clock. If it is right, install the newest version by hand; your data stay."
        raise UpdateRefusedError(said, action) from error
    said = f"The metadata of the releases have expired (this computer's clock shows {datetime.now(UTC):%Y-%m-%d})."
    action = f"Check the clock. If it is right, the server may be holding newer versions back. {TRY_ELSEWHERE}"
    raise UpdateRefusedError(said, action) from error


def _write_files(folder: Path, files: MetadataFiles) -> None:
    (folder / "root_history").mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _read_files(folder: Path) -> dict[str, bytes]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
    return {name: (folder / name).read_bytes() for name in found if is_metadata_name(name)}
