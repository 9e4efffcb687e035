"""Asks the publisher whether there is a newer version; installs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from neuroshard.config.program import installation_root
from neuroshard.config.settings import Settings
from neuroshard.errors import UsageError
from neuroshard.update.errors import UpdateRefusedError
from neuroshard.update.fetching import fetch_manifest
from neuroshard.update.judgement import AvailableUpdate, judge, newest_seen
from neuroshard.update.manifest import read_manifest, safe_url, version_number
from neuroshard.update.memory import UpdateMemory, load_memory, save_memory
from neuroshard.update.release import RELEASE_KEY, RELEASE_URL, platform_name


@dataclass(frozen=True)
class Publisher:
    """Who tells of new versions."""

    url: str
    key: bytes


def publisher_of(settings: Settings) -> Publisher:
    """The publisher of this package, or the owner's choice. Raises UsageError."""
    url = settings.update_url or RELEASE_URL
    if not url:
        raise UsageError(
            "This build names nobody who publishes new versions.", "Set update_url and update_key if you know one."
        )
    if settings.update_url and not settings.update_key:
        raise UsageError("update_url is set, update_key is not.", "Set the publisher's public key, 64 hex digits.")
    try:
        return Publisher(safe_url(url), bytes.fromhex(settings.update_key or RELEASE_KEY))
    except ValueError as error:
        raise UsageError(f"update_url cannot be used: {error}.", "Use an https:// address.") from error


async def look_for_update(settings: Settings, current: str, now: float) -> AvailableUpdate | None:
    """Ask now, and remember in the data folder what was seen.

    Raises UsageError without a publisher, UpdateRefusedError for a manifest that cannot be believed, DataError when
    nobody answers, StorageError.
    """
    publisher = publisher_of(settings)
    memory = load_memory(settings.data_dir)
    _remember(settings.data_dir, replace(memory, asked_at=now))  # also when nobody answers: once a day is enough
    manifest = read_manifest(await fetch_manifest(publisher.url), publisher.key)
    update = judge(manifest, current=current, platform=platform_name(), seen=memory.seen, now=now)
    seen = newest_seen(manifest, memory.seen)
    _remember(settings.data_dir, UpdateMemory(now, seen, update.version if update else ""))
    return update


async def daily_notice(settings: Settings, current: str, now: float) -> str | None:
    """A sentence about a newer version, or about what was refused as one; asks at most once a day.

    Raises UsageError without a publisher, DataError when nobody answers, StorageError.
    """
    memory = load_memory(settings.data_dir)
    if not memory.is_due(now):
        is_newer = memory.available and version_number(memory.available) > version_number(current)
        return notice(memory.available) if is_newer else None
    try:
        update = await look_for_update(settings, current, now)
    except UpdateRefusedError as refused:
        return str(refused)
    return notice(update.version) if update else None


def notice(version: str) -> str:
    """What people are told: the command where it can work, else the way by which this one came."""
    how = "`neuroshard update apply` installs it." if installation_root() else "install it as you installed this one."
    return f"Version {version} is available: {how}"


def _remember(data_dir: Path, memory: UpdateMemory) -> None:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_memory(data_dir, memory)
