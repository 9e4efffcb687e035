"""The signed update manifest: read strictly, verified before use, and judged for this computer.

The judgement is a pure function of the manifest, the versions known here and the time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from neuroshard.decoders import read_json
from neuroshard.errors import NeuroShardError
from neuroshard.identity.signing import SignatureError, Signer, verify_signature
from neuroshard.types import DAY_SECONDS, HexDigest, HexSignature, UnixSeconds


class UpdateRefusedError(NeuroShardError):
    """The offer is not an update for this computer: unsigned, expired, older, damaged or too large."""


class UpdateFailedError(NeuroShardError):
    """A step of the update failed here; the version from before is in use."""


MAX_MANIFEST_BYTES = 64 * 1024
MAX_ARTEFACT_BYTES = 6 * 10**9
MAX_UNPACKED_BYTES = 20 * 10**9
MAX_NOTES_CHARACTERS = 4000
MAX_PLATFORMS = 32
_VERSION = r"\A[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}\Z"

VersionNumber = tuple[int, int, int]


def version_number(text: str) -> VersionNumber:
    """`1.2.10` as comparable numbers. Raises ValueError for any other text."""
    if not re.search(_VERSION, text):
        raise ValueError(f"{text[:40]!r} is not a version like 1.2.3")
    major, minor, patch = (int(part) for part in text.split("."))
    return major, minor, patch


class Artefact(Struct, frozen=True, forbid_unknown_fields=True):
    """The archive (.tar.gz) of a version for one platform."""

    url: Annotated[str, Meta(max_length=2000)]
    size: Annotated[int, Meta(ge=1, le=MAX_ARTEFACT_BYTES)]  # of the archive, in bytes
    unpacked_size: Annotated[int, Meta(ge=1, le=MAX_UNPACKED_BYTES)]  # of all files in it, in bytes
    sha256: HexDigest

    def __post_init__(self) -> None:
        """Raise ValueError for an address that may not be fetched."""
        safe_url(self.url)


class UpdateManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version by the publisher. Times are in seconds since the epoch."""

    version: Annotated[str, Meta(pattern=_VERSION)]
    minimal_version: Annotated[str, Meta(pattern=_VERSION)]  # older versions cannot update by themselves
    issued_at: UnixSeconds
    expires_at: UnixSeconds
    notes: Annotated[str, Meta(max_length=MAX_NOTES_CHARACTERS)]
    artefacts: Annotated[dict[str, Artefact], Meta(max_length=MAX_PLATFORMS)]  # by platform_name()
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raise ValueError if no moment is both after the issue and before the expiry."""
        if self.issued_at >= self.expires_at:
            raise ValueError("it expires before it was issued")

    def signed(self, publisher: Signer) -> bytes:
        """The published file. Raises ValueError if clients would refuse it."""
        body = msgspec.json.encode(self, order="sorted")  # the order that versions up to 0.1 verify
        read_json(body, UpdateManifest, MAX_MANIFEST_BYTES)
        return msgspec.json.encode(SignedManifest(msgspec.Raw(body), publisher.sign(_DOMAIN + body).hex()))


class SignedManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The published file. The signature covers the bytes of `manifest` as they are in the file."""

    manifest: msgspec.Raw
    signature: HexSignature


_DOMAIN = b"neuroshard/update-manifest/1\0"


def read_update_manifest(data: bytes, key: bytes) -> UpdateManifest:
    """Verify and parse a published manifest. Raises UpdateRefusedError with the reason."""
    try:
        published = read_json(data, SignedManifest, MAX_MANIFEST_BYTES)
        body = bytes(published.manifest)
        verify_signature(key, _DOMAIN + body, bytes.fromhex(published.signature))
        return read_json(body, UpdateManifest, MAX_MANIFEST_BYTES)
    except SignatureError as error:
        raise UpdateRefusedError(
            "The update manifest is not signed by the publisher's key.",
            "Nothing was installed. Report this to the publisher.",
        ) from error
    except ValueError as error:
        raise UpdateRefusedError(f"The update manifest cannot be read: {error}.") from error


def safe_url(url: str) -> str:
    """Return the URL if it is https, or http to this computer (tests). Raises ValueError otherwise."""
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return url
    if parts.scheme == "http" and parts.hostname and _is_loopback(parts.hostname):
        return url
    raise ValueError(f"{url[:80]!r} is not an https:// address")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


CLOCK_TOLERANCE_SECONDS = DAY_SECONDS  # a manifest from tomorrow: the clocks of two computers


@dataclass(frozen=True)
class SeenManifest:
    """The newest manifest that this computer has seen: an older one is a replay."""

    version: str = "0.0.0"
    issued_at: float = 0.0


@dataclass(frozen=True)
class AvailableUpdate:
    """A newer version for this computer."""

    version: str
    notes: str
    artefact: Artefact


def judge(
    manifest: UpdateManifest, *, current: str, platform: str, seen: SeenManifest, now: float
) -> AvailableUpdate | None:
    """The update that a verified manifest offers to version `current`; None if that is the newest.

    Raises UpdateRefusedError if it expired, is a replay, or has nothing for this version or platform.
    """
    _refuse_wrong_time(manifest, now)
    if manifest.issued_at < seen.issued_at or version_number(manifest.version) < version_number(seen.version):
        raise UpdateRefusedError(
            f"The manifest of version {manifest.version} is older than the one of {seen.version} seen before.",
            "Somebody may be holding newer versions back: try another network.",
        )
    if version_number(manifest.version) <= version_number(current):
        return None
    if version_number(current) < version_number(manifest.minimal_version):
        raise UpdateRefusedError(
            f"Version {manifest.version} is available, but version {current} is too old to update itself "
            f"(at least {manifest.minimal_version}).",
            "Run the new version's installer; your data stay.",
        )
    artefact = manifest.artefacts.get(platform)
    if artefact is None:
        raise UpdateRefusedError(f"Version {manifest.version} is available, but not for {platform}.")
    return AvailableUpdate(manifest.version, manifest.notes, artefact)


def newest_seen(manifest: UpdateManifest, seen: SeenManifest) -> SeenManifest:
    """The record to store after a manifest was judged."""
    version = max(manifest.version, seen.version, key=version_number)
    return SeenManifest(version, max(manifest.issued_at, seen.issued_at))


def _refuse_wrong_time(manifest: UpdateManifest, now: float) -> None:
    if now > manifest.expires_at:
        raise UpdateRefusedError(
            "The update manifest has expired.", "Check this computer's clock. If it is right, wait for the next one."
        )
    if now < manifest.issued_at - CLOCK_TOLERANCE_SECONDS:
        raise UpdateRefusedError("The update manifest is dated in the future.", "Check this computer's clock.")
