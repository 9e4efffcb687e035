"""Ask the publisher for a newer version, and remember the newest manifest seen. Installs nothing.

docs/INSTALLING.md explains how another publisher replaces the address and the key."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from platform import machine

from neuroshard.config.folders import installation_root
from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import UsageError
from neuroshard.types import DAY_SECONDS
from neuroshard.update.fetching import fetch_manifest
from neuroshard.update.manifest import (
    AvailableUpdate,
    SeenManifest,
    UpdateRefusedError,
    judge,
    newest_seen,
    read_update_manifest,
    safe_url,
    version_number,
)

FILE_NAME = "update.json"


@dataclass(frozen=True)
class UpdateMemory:
    """The publisher's answers so far. Times are in seconds since the epoch."""

    asked_at: float
    seen: SeenManifest
    available: str  # the version last offered to this computer; "" for none

    def __post_init__(self) -> None:
        """Raise ValueError for text that is not a version."""
        for version in filter(None, (self.available, self.seen.version)):
            version_number(version)

    def is_due(self, now: float) -> bool:
        """Whether the publisher may be asked again: once a day; a clock that was ahead delays it by a day at most."""
        return not 0 <= now - self.asked_at < DAY_SECONDS


NEVER_ASKED = UpdateMemory(0.0, SeenManifest(), "")


def memory_file(data_dir: Path) -> StateFile[UpdateMemory]:
    """The memory file of a data folder. Damage stops updates: without the file, an older valid manifest could pass."""
    return StateFile(
        data_dir / FILE_NAME,
        UpdateMemory,
        on_damage="fail",
        if_damaged="Install the newest version by hand, then delete this file.",
        max_bytes=4096,
    )


RELEASE_URL = ""  # nowhere yet: until there is a publisher, `update_url` and `update_key` name one
RELEASE_KEY = "e5adb0a141a7c27f06923d248ca592e956bffa9ead6818fd38b8b5213219cc8c"

_PROCESSORS = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}


def platform_name(system: str = sys.platform, processor: str | None = None) -> str:
    """The name of this kind of computer in a manifest: `linux-x86_64`, `win32-x86_64`, `darwin-arm64`."""
    named = (processor or machine()).lower()
    return f"{system}-{_PROCESSORS.get(named, named)}"


@dataclass(frozen=True)
class ReleasePublisher:
    """The address and key of the publisher of new versions."""

    url: str
    key: bytes


def publisher_of(settings: Settings) -> ReleasePublisher:
    """The publisher of this package, or the owner's choice. Raises UsageError."""
    url = settings.update_url or RELEASE_URL
    if not url:
        raise UsageError(
            "This build has no publisher of new versions.", "If you know a publisher, set update_url and update_key."
        )
    if settings.update_url and not settings.update_key:
        raise UsageError("update_url is set, update_key is not.", "Set the publisher's public key, 64 hex digits.")
    try:
        return ReleasePublisher(safe_url(url), bytes.fromhex(settings.update_key or RELEASE_KEY))
    except ValueError as error:
        raise UsageError(f"update_url cannot be used: {error}.", "Use an https:// address.") from error


async def look_for_update(settings: Settings, current: str, now: float) -> AvailableUpdate | None:
    """Ask now, and remember in the data folder what was seen.

    Raises UsageError without a publisher, UpdateRefusedError for a manifest that cannot be believed, DataError when
    nobody answers, StorageError.
    """
    publisher = publisher_of(settings)
    file = memory_file(settings.data_dir)
    memory = file.read() or NEVER_ASKED
    file.write(replace(memory, asked_at=now))  # also when nobody answers: once a day is enough
    manifest = read_update_manifest(await fetch_manifest(publisher.url), publisher.key)
    update = judge(manifest, current=current, platform=platform_name(), seen=memory.seen, now=now)
    seen = newest_seen(manifest, memory.seen)
    file.write(UpdateMemory(now, seen, update.version if update else ""))
    return update


async def daily_notice(settings: Settings, current: str, now: float) -> str | None:
    """A sentence about a newer version, or about what was refused as one; asks at most once a day.

    Raises UsageError without a publisher, DataError when nobody answers, StorageError.
    """
    memory = memory_file(settings.data_dir).read() or NEVER_ASKED
    if not memory.is_due(now):
        is_newer = memory.available and version_number(memory.available) > version_number(current)
        return notice(memory.available) if is_newer else None
    try:
        update = await look_for_update(settings, current, now)
    except UpdateRefusedError as refused:
        return str(refused)
    return notice(update.version) if update else None


def notice(version: str) -> str:
    """The sentence for people: the command if it works here, otherwise the way in which this version was installed."""
    how = (
        "`neuroshard update apply` installs it."
        if installation_root()
        else "install it in the same way as this version."
    )
    return f"Version {version} is available: {how}"
