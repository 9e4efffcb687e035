"""Fetch and unpack an update: size limits before the first byte, resumption after a break, the digest at the end.

An archive is unpacked only after its digest was checked, within limits and inside its own folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from random import Random

import anyio
import anyio.to_thread

from neuroshard.data.http_source import HttpSource
from neuroshard.data.storage import storage_error
from neuroshard.data.transfer import DEFAULT_RETRY_POLICY, FileDamagedError, OpenedFile, retry_delay
from neuroshard.errors import DataError, DataUnavailableError, DiskFullError
from neuroshard.update.release import Artefact, UpdateRefusedError

ATTEMPTS = 5
MAX_METADATA_BYTES = 262_144
_HASH_BYTES = 1 << 20

FetchProgress = Callable[[int, int], None]  # bytes here, bytes in all


async def fetch_metadata(url: str, seconds: float) -> bytes:
    """The bytes at the URL, at most MAX_METADATA_BYTES.

    Raises FileMissingError if there are none, UpdateRefusedError, DataUnavailableError, UsageError.
    """
    advice = "If you trust the address that it redirects to, set update_url to it."
    data = bytearray()
    try:
        with anyio.fail_after(seconds):
            async with _opened(url, advice) as file:
                _refuse_longer(file.total_bytes or 0, MAX_METADATA_BYTES, "metadata file")
                async for chunk in file.chunks:
                    _refuse_longer(len(data) + len(chunk), MAX_METADATA_BYTES, "metadata file")
                    data += chunk
    except TimeoutError:
        raise DataUnavailableError("The metadata of the releases did not arrive in time.", "Try again later.") from None
    return bytes(data)


async def fetch_artefact(artefact: Artefact, path: Path, progress: FetchProgress | None = None) -> None:
    """The archive at `path`, whole and with its digest; a partial file of an earlier attempt is continued.

    Raises UpdateRefusedError when it is not what was signed, DataUnavailableError when it does not come,
    DiskFullError and StorageError.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        await _fetch_part(artefact, part, progress or (lambda _done, _all: None))
        if await anyio.to_thread.run_sync(_digest, part) != artefact.sha256:
            _forget(part)
            raise UpdateRefusedError("The archive of the update does not match its signed digest.", "Try again later.")
        part.replace(path)
        _validator_file(part).unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(part, error) from error


async def _fetch_part(artefact: Artefact, part: Path, progress: FetchProgress) -> None:
    """Download the rest of the file, with a new attempt after each break."""
    rng = Random()  # noqa: S311 - jitter, not a secret
    _refuse_full_disk(artefact, part)
    failures = 0
    while _size(part) != artefact.size:
        before = _size(part)
        try:
            await _attempt(artefact, part, progress)
            failures = 0
        except FileDamagedError:
            _forget(part)
            failures += 1
            if failures >= ATTEMPTS:
                raise
        except DataError:
            failures = 1 if _size(part) > before else failures + 1
            if failures >= ATTEMPTS:
                raise
        if failures:
            await anyio.sleep(retry_delay(DEFAULT_RETRY_POLICY, failures, rng))


async def _attempt(artefact: Artefact, part: Path, progress: FetchProgress) -> None:
    validator_file = _validator_file(part)
    validator = validator_file.read_text(encoding="ascii", errors="ignore") if validator_file.exists() else None
    if validator is None or _size(part) > artefact.size:
        _forget(part)
    advice = "The publisher must name the final address of the archive."
    async with _opened(artefact.url, advice, _size(part), validator) as file:
        if file.total_bytes is not None and file.total_bytes != artefact.size:
            raise UpdateRefusedError(f"The archive has {file.total_bytes} bytes, {artefact.size} were signed.")
        if file.offset == 0:
            _forget(part)
        if file.validator is not None:
            validator_file.write_text(file.validator, encoding="ascii")
        done = file.offset
        with part.open("ab") as sink:
            async for chunk in file.chunks:
                done += len(chunk)
                _refuse_longer(done, artefact.size, "archive")
                sink.write(chunk)
                progress(done, artefact.size)
    if done < artefact.size:
        raise FileDamagedError("The archive is shorter than its signed size.")


@asynccontextmanager
async def _opened(url: str, advice: str, offset: int = 0, validator: str | None = None) -> AsyncGenerator[OpenedFile]:
    base, _, name = url.rpartition("/")
    source = HttpSource(base, redirect_advice=advice)
    try:
        async with source.open(name, offset, validator) as file:
            yield file
    finally:
        with anyio.CancelScope(shield=True):
            await source.aclose()


def _refuse_longer(size: int, most: int, what: str) -> None:
    if size > most:
        said = f"The {what} of the update is longer than the {most} bytes it may have."
        raise UpdateRefusedError(said, "Nothing was installed. Try again later, or set another update_url.")


def _refuse_full_disk(artefact: Artefact, part: Path) -> None:
    need = artefact.size - _size(part) + artefact.unpacked_size
    free = shutil.disk_usage(part.parent).free
    if free < need:
        raise DiskFullError(
            f"The update needs {need / 1e6:,.0f} MB on the disk of {part.parent}, {free / 1e6:,.0f} MB are free.",
            "Make room and try again; nothing was changed.",
        )


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _validator_file(part).unlink(missing_ok=True)


def _validator_file(part: Path) -> Path:
    return part.with_name(part.name + ".validator")


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


MAX_FILES = 100_000


def unpack_archive(archive: Path, folder: Path, most_bytes: int) -> None:
    """Unpack a .tar.gz into a new `folder`.

    Raises UpdateRefusedError if it is damaged, too large or leaves the folder.
    """
    folder.mkdir(parents=True)
    left, files = most_bytes, 0
    try:
        with tarfile.open(archive, "r:gz") as content:
            for member in content:
                files, left = files + 1, left - member.size
                if left < 0 or files > MAX_FILES:
                    raise UpdateRefusedError("The archive unpacks to more bytes than were signed.")
                _extract(content, member, folder)
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        raise UpdateRefusedError(f"The archive of the update cannot be unpacked: {error}.") from error


def flush_to_disk(folder: Path) -> None:
    """Wait until everything below the folder would survive a power cut. Raises OSError."""
    if hasattr(os, "sync"):
        os.sync()
        return
    for path in folder.rglob("*"):  # Windows: file by file, of those that may be written
        if path.is_file() and os.access(path, os.W_OK):
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def _extract(content: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Extract one member (a folder, a file or a link) within the folder. tarfile's own filter needs Python 3.11.4."""
    name, target = PurePosixPath(member.name), folder / member.name
    if name.is_absolute() or ".." in name.parts or not _is_inside(target.parent, folder):
        raise tarfile.TarError(f"{member.name!r} is outside of its folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    source = content.extractfile(member) if member.isreg() else None
    if member.isdir():
        target.mkdir(exist_ok=True)
    elif member.issym() and _is_inside(target.parent / member.linkname, folder):
        target.symlink_to(member.linkname)
    elif member.islnk() and _is_inside(folder / member.linkname, folder):
        os.link(folder / member.linkname, target)
    elif source is not None:
        with source, target.open("xb") as file:
            shutil.copyfileobj(source, file)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
    else:
        raise tarfile.TarError(f"{member.name!r} is neither a file, nor a folder, nor a link within it")


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
