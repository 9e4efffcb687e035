"""Fetches manifests and archives: capped before a byte comes, continued after a break or a kill, checked at the end."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import anyio.to_thread

from neuroshard.data.http_source import HttpSource
from neuroshard.data.opened_file import OpenedFile
from neuroshard.data.retry import DEFAULT_RETRY_POLICY, FileDamagedError, retry_delay
from neuroshard.data.storage import storage_error
from neuroshard.errors import DataError, DataUnavailableError, DiskFullError
from neuroshard.update.errors import UpdateRefusedError
from neuroshard.update.manifest import MAX_MANIFEST_BYTES, Artefact

ATTEMPTS = 5
MANIFEST_SECONDS = 60.0
_HASH_BYTES = 1 << 20

Progress = Callable[[int, int], None]  # bytes here, bytes in all


async def fetch_manifest(url: str) -> bytes:
    """The bytes at the URL, at most MAX_MANIFEST_BYTES. Raises UpdateRefusedError, DataUnavailableError, UsageError."""
    advice = "Set update_url to the address it redirects to, if you trust that one."
    data = bytearray()
    try:
        with anyio.fail_after(MANIFEST_SECONDS):
            async with _opened(url, advice) as file:
                _refuse_longer(file.total_bytes or 0, MAX_MANIFEST_BYTES, "manifest")
                async for chunk in file.chunks:
                    _refuse_longer(len(data) + len(chunk), MAX_MANIFEST_BYTES, "manifest")
                    data += chunk
    except TimeoutError:
        said = f"The update manifest did not come within {MANIFEST_SECONDS:.0f} s."
        raise DataUnavailableError(said, "Try again later.") from None
    return bytes(data)


async def fetch_artefact(artefact: Artefact, path: Path, progress: Progress | None = None) -> None:
    """The archive at `path`, whole and with its digest; what an earlier try left beside it is continued.

    Raises UpdateRefusedError when it is not what was signed, DataUnavailableError when it does not come,
    DiskFullError and StorageError.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        await _fetch_part(artefact, part, progress or (lambda _done, _all: None))
        if await anyio.to_thread.run_sync(_digest, part) != artefact.sha256:
            _forget(part)
            raise UpdateRefusedError("The archive of the update is not the one that was signed.", "Try again later.")
        part.replace(path)
        _validator_file(part).unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(part, error) from error


async def _fetch_part(artefact: Artefact, part: Path, progress: Progress) -> None:
    """Bring the file to its full size, with a new attempt after each break."""
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


async def _attempt(artefact: Artefact, part: Path, progress: Progress) -> None:
    validator_file = _validator_file(part)
    validator = validator_file.read_text(encoding="ascii", errors="ignore") if validator_file.exists() else None
    if validator is None or _size(part) > artefact.size:
        _forget(part)
    advice = "The publisher has to name the address where the archive lies itself."
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
        raise FileDamagedError("The archive is shorter than what was signed.")


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
        raise UpdateRefusedError(f"The {what} of the update is longer than the {most} bytes it may have.")


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
