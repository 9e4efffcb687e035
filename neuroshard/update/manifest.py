"""The signed update manifest: read strictly, verified before use, and judged for this computer.

AcceptanceCheck is a pure function of the manifest, the versions known here and the time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from neuroshard.errors import NeuroShardError
from neuroshard.identity.signing import SIGNATURE_BYTES, SignatureError, Signer, purpose_message, verify_signature
from neuroshard.identity.strict_json import (
    canonical_json,
    exact_object,
    hex_field,
    number_field,
    parse_json,
    text_field,
)
from neuroshard.types import JsonValue


class UpdateRefusedError(NeuroShardError):
    """The offer is not an update for this computer: unsigned, expired, older, damaged or too large."""


class UpdateFailedError(NeuroShardError):
    """A step of the update failed here; the version from before is in use."""


FORMAT = 1
MAX_MANIFEST_BYTES = 64 * 1024
MAX_ARTEFACT_BYTES = 6 * 10**9
MAX_UNPACKED_BYTES = 20 * 10**9
MAX_NOTES_CHARACTERS = 4000
MAX_PLATFORMS = 32
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")
_FIELDS = {"format", "version", "minimal_version", "issued_at", "expires_at", "notes", "artefacts"}

VersionNumber = tuple[int, int, int]


def version_number(text: str) -> VersionNumber:
    """`1.2.10` as comparable numbers. Raises ValueError for any other text."""
    if not _VERSION.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a version like 1.2.3")
    major, minor, patch = (int(part) for part in text.split("."))
    return major, minor, patch


@dataclass(frozen=True)
class Artefact:
    """The archive (.tar.gz) of a version for one platform."""

    url: str
    size: int  # of the archive, in bytes
    unpacked_size: int  # of all files in it, in bytes
    sha256: str  # hex


@dataclass(frozen=True)
class UpdateManifest:
    """The newest version by the publisher. Times are in seconds since the epoch."""

    version: str
    minimal_version: str  # older versions cannot update by themselves
    issued_at: float
    expires_at: float
    notes: str
    artefacts: Mapping[str, Artefact]  # by platform_name()

    def to_value(self) -> dict[str, JsonValue]:
        """The object that is signed."""
        return {
            "format": FORMAT,
            "version": self.version,
            "minimal_version": self.minimal_version,
            "issued_at": self.issued_at,
            "expires_at": self.expires_at,
            "notes": self.notes,
            "artefacts": {name: dict(asdict(artefact)) for name, artefact in self.artefacts.items()},
        }

    def signed(self, publisher: Signer) -> bytes:
        """The published file as canonical JSON. Raises ValueError if clients would refuse it."""
        value = self.to_value()
        _manifest_of(value)
        signature = publisher.sign(purpose_message("update-manifest", value)).hex()
        return canonical_json({"manifest": value, "signature": signature})


def read_update_manifest(data: bytes, key: bytes) -> UpdateManifest:
    """Verify and parse a published manifest. Raises UpdateRefusedError with the reason."""
    try:
        fields = exact_object(parse_json(data, MAX_MANIFEST_BYTES), {"manifest", "signature"}, "the update manifest")
        signature = hex_field(fields["signature"], SIGNATURE_BYTES, "signature")
        verify_signature(key, purpose_message("update-manifest", fields["manifest"]), signature)
        return _manifest_of(fields["manifest"])
    except SignatureError as error:
        raise UpdateRefusedError(
            "The update manifest is not signed by the publisher's key.", "Nothing was installed. Inform the publisher."
        ) from error
    except ValueError as error:
        raise UpdateRefusedError(f"The update manifest cannot be read: {error}.") from error


def _manifest_of(value: JsonValue) -> UpdateManifest:
    fields = exact_object(value, _FIELDS, "the manifest")
    if fields["format"] != FORMAT:
        raise ValueError(f"format {fields['format']!r} is not known to this version")
    versions = [text_field(fields[name], 14, name) for name in ("version", "minimal_version")]
    for version in versions:
        version_number(version)
    issued_at, expires_at = (number_field(fields[name], name) for name in ("issued_at", "expires_at"))
    if not 0 <= issued_at < expires_at:
        raise ValueError("it expires before it was issued")
    artefacts = fields["artefacts"]
    if not isinstance(artefacts, Mapping) or len(artefacts) > MAX_PLATFORMS:
        raise ValueError(f"artefacts must be an object with at most {MAX_PLATFORMS} platforms")
    return UpdateManifest(
        version=versions[0],
        minimal_version=versions[1],
        issued_at=issued_at,
        expires_at=expires_at,
        notes=text_field(fields["notes"], MAX_NOTES_CHARACTERS, "notes"),
        artefacts={name: _artefact(item, f"the artefact {name[:40]}") for name, item in artefacts.items()},
    )


def _artefact(value: JsonValue, where: str) -> Artefact:
    fields = exact_object(value, {"url", "size", "unpacked_size", "sha256"}, where)
    return Artefact(
        url=safe_url(text_field(fields["url"], 2000, f"url of {where}")),
        size=_bytes(fields["size"], MAX_ARTEFACT_BYTES, f"size of {where}"),
        unpacked_size=_bytes(fields["unpacked_size"], MAX_UNPACKED_BYTES, f"unpacked_size of {where}"),
        sha256=hex_field(fields["sha256"], 32, f"sha256 of {where}").hex(),
    )


def _bytes(value: JsonValue, most: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ValueError(f"{where} must be a whole number of bytes, at most {most}")
    return value


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


CLOCK_TOLERANCE_SECONDS = 86_400.0  # a manifest from tomorrow: the clocks of two computers


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
            f"Version {manifest.version} is available, but {current} is too old to become it by itself "
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
        raise UpdateRefusedError("The update manifest is from the future.", "Check this computer's clock.")
