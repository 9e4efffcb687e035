"""Whether a manifest is an update for this computer: a pure function of what is known and the time."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.update.errors import UpdateRefusedError
from neuroshard.update.manifest import Artefact, UpdateManifest, version_number

CLOCK_TOLERANCE_SECONDS = 86_400.0  # a manifest from tomorrow: the clocks of two computers


@dataclass(frozen=True)
class Seen:
    """What this computer saw published so far: an older manifest is a replay."""

    version: str = "0.0.0"
    issued_at: float = 0.0


@dataclass(frozen=True)
class AvailableUpdate:
    """A newer version for this computer."""

    version: str
    notes: str
    artefact: Artefact


def judge(manifest: UpdateManifest, *, current: str, platform: str, seen: Seen, now: float) -> AvailableUpdate | None:
    """The update that a verified manifest offers to version `current`; None when that is the newest.

    Raises UpdateRefusedError when it expired, is a replay, or has nothing for this version or platform.
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


def newest_seen(manifest: UpdateManifest, seen: Seen) -> Seen:
    """What to remember after a manifest was judged."""
    version = max(manifest.version, seen.version, key=version_number)
    return Seen(version, max(manifest.issued_at, seen.issued_at))


def _refuse_wrong_time(manifest: UpdateManifest, now: float) -> None:
    if now > manifest.expires_at:
        raise UpdateRefusedError(
            "The update manifest has expired.", "Check this computer's clock; else wait for the publisher's next one."
        )
    if now < manifest.issued_at - CLOCK_TOLERANCE_SECONDS:
        raise UpdateRefusedError("The update manifest is from the future.", "Check this computer's clock.")
