"""A release as its signed metadata describe it: read strictly, and judged for this computer.

The judgement is a pure function of the description and of the version and platform here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from neuroshard.decoders import analysed, fault_of
from neuroshard.errors import NeuroShardError
from neuroshard.types import HexDigest, is_loopback


class UpdateRefusedError(NeuroShardError):
    """The offer is not an update for this computer: unsigned, expired, older, damaged or too large."""


class UpdateFailedError(NeuroShardError):
    """A step of the update failed here; the version from before is in use."""


MAX_ARTEFACT_BYTES = 6 * 10**9
MAX_UNPACKED_BYTES = 20 * 10**9
MAX_NOTES_CHARACTERS = 4000
_VERSION = r"\A[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}\Z"

VersionNumber = tuple[int, int, int]


def version_number(text: str) -> VersionNumber:
    """`1.2.10` as comparable numbers. Raises ValueError for any other text."""
    if not re.search(_VERSION, text):
        raise ValueError(f"{text[:40]!r} is not a version like 1.2.3")
    major, minor, patch = (int(part) for part in text.split("."))
    return major, minor, patch


class Release(Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version for one platform, in the signed `custom` field of its archive."""

    version: Annotated[str, Meta(pattern=_VERSION)]
    minimal_version: Annotated[str, Meta(pattern=_VERSION)]  # older versions cannot update by themselves
    unpacked_size: Annotated[int, Meta(ge=1, le=MAX_UNPACKED_BYTES)]  # of all files in the archive, in bytes
    notes: Annotated[str, Meta(max_length=MAX_NOTES_CHARACTERS)]


class Artefact(Struct, frozen=True, forbid_unknown_fields=True):
    """The archive (.tar.gz) of a version for one platform."""

    url: Annotated[str, Meta(max_length=2000)]
    size: Annotated[int, Meta(ge=1, le=MAX_ARTEFACT_BYTES)]  # of the archive, in bytes
    unpacked_size: Annotated[int, Meta(ge=1, le=MAX_UNPACKED_BYTES)]
    sha256: HexDigest


@dataclass(frozen=True)
class SignedArchive:
    """The archive for this platform as verified metadata name it. `description` has any content that a release key
    signed: `read_release` checks it."""

    size: int
    sha256: str
    description: object


_METADATA = re.compile(r"root_history/[1-9][0-9]{0,5}\.root\.json|timestamp\.json|snapshot\.json|targets\.json")


def is_metadata_name(name: str) -> bool:
    """Whether python-tuf keeps a file of this name that must be remembered."""
    return _METADATA.fullmatch(name) is not None


def target_name(platform: str) -> str:
    """The name of a platform's newest archive in the metadata. It is the same in all releases."""
    return f"neuroshard-{platform}.update.tar.gz"


def archive_url(base: str, platform: str, sha256: str) -> str:
    """The address of an archive: its digest is in its name, so that a new release replaces no file under download."""
    return f"{base.rstrip('/')}/targets/{sha256}.{target_name(platform)}"


def read_release(description: object) -> Release:
    """Check a signed description. Raises UpdateRefusedError with the field."""
    try:
        return msgspec.convert(description, analysed(Release))
    except ValueError as error:
        raise UpdateRefusedError(f"The release cannot be read: {fault_of(error, Release)}.") from error


def safe_url(url: str) -> str:
    """Return the URL if it is https, or http to this computer (tests). Raises ValueError otherwise."""
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return url
    if parts.scheme == "http" and parts.hostname and is_loopback(parts.hostname):
        return url
    raise ValueError(f"{url[:80]!r} is not an https:// address")


@dataclass(frozen=True)
class AvailableUpdate:
    """A newer version for this computer."""

    version: str
    notes: str
    artefact: Artefact


def judge(archive: SignedArchive | None, base: str, *, current: str, platform: str) -> AvailableUpdate | None:
    """The update that verified metadata offer to version `current`; None if that is the newest.

    Raises UpdateRefusedError if they have nothing for this version or platform.
    """
    if archive is None:
        raise UpdateRefusedError(f"The publisher has no version for {platform}.")
    release = read_release(archive.description)
    if version_number(release.version) <= version_number(current):
        return None
    if version_number(current) < version_number(release.minimal_version):
        raise UpdateRefusedError(
            f"Version {release.version} is available, but version {current} is too old to update itself "
            f"(at least {release.minimal_version}).",
            "Run the new version's installer; your data stay.",
        )
    fields = {
        "url": archive_url(base, platform, archive.sha256),
        "size": archive.size,
        "unpacked_size": release.unpacked_size,
        "sha256": archive.sha256,
    }
    try:
        artefact = msgspec.convert(fields, analysed(Artefact))
    except ValueError as error:
        raise UpdateRefusedError(f"The release cannot be read: {fault_of(error, Artefact)}.") from error
    return AvailableUpdate(release.version, release.notes, artefact)
