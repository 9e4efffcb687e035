"""Ask for a newer version, and remember the newest metadata seen. Installs nothing.

The root of trust is a file of this package, not a setting (docs/decisions/0035). docs/RELEASING.md explains how
publishers make it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import machine

from neuroshard.config.folders import installation_root
from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import DataUnavailableError, UsageError
from neuroshard.types import DAY_SECONDS
from neuroshard.update.release import (
    AvailableUpdate,
    UpdateRefusedError,
    is_metadata_name,
    judge,
    safe_url,
    target_name,
    version_number,
)

FILE_NAME = "update.json"
MAX_MEMORY_BYTES = 4_000_000  # about 100 roots of the largest size that is accepted
SILENT_SECONDS = 30 * DAY_SECONDS  # without a verified answer: longer than a timestamp is valid
CLOCK_TOLERANCE_SECONDS = DAY_SECONDS  # a corrected clock or time zone


@dataclass(frozen=True)
class UpdateMemory:
    """The publisher's answers so far. Times are in seconds since the epoch, by this computer's clock."""

    asked_at: float
    verified_at: float = 0.0  # the last time at which all metadata were verified; 0 for never
    available: str = ""  # the version last offered to this computer; "" for none
    metadata: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # the newest ones seen, by file name

    def __post_init__(self) -> None:
        """Raise ValueError for text that is not a version or not the name of a file."""
        if self.available:
            version_number(self.available)
        for name in self.metadata:
            if not is_metadata_name(name):
                raise ValueError(f"{name[:40]!r} is not a file of metadata")

    def is_due(self, now: float) -> bool:
        """Whether the publisher may be asked again: once a day; a clock that was ahead delays it by a day at most."""
        return not 0 <= now - self.asked_at < DAY_SECONDS

    def refuse_earlier_clock(self, now: float) -> None:
        """Raise UpdateRefusedError if the clock was set back: expired metadata would then count as current.

        A clock that was ahead at the last look cannot have been ahead for longer than the metadata were valid, because
        they were not expired by it. So this refusal ends by itself, after the validity of a timestamp at most.
        """
        if now < self.verified_at - CLOCK_TOLERANCE_SECONDS:
            raise UpdateRefusedError(
                f"This computer's clock shows {_date(now)}, but showed {_date(self.verified_at)} at an earlier look.",
                "Set the clock. If it is right now, updates work again after the later date.",
            )


NEVER_ASKED = UpdateMemory(0.0)


def memory_file(data_dir: Path) -> StateFile[UpdateMemory]:
    """The memory file of a data folder. Damage stops updates: without it, older metadata that are valid could pass."""
    return StateFile(
        data_dir / FILE_NAME,
        UpdateMemory,
        on_damage="fail",
        if_damaged="Install the newest version by hand, then delete this file.",
        max_bytes=MAX_MEMORY_BYTES,
    )


_PROCESSORS = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}


def platform_name(system: str = sys.platform, processor: str | None = None) -> str:
    """The name of this kind of computer in metadata: `linux-x86_64`, `win32-x86_64`, `darwin-arm64`."""
    named = (processor or machine()).lower()
    return f"{system}-{_PROCESSORS.get(named, named)}"


RELEASE_URL = ""  # nowhere yet: until releases have an address, `update_url` names one
ROOT_NAME = "root.json"


@dataclass(frozen=True)
class ReleaseSource:
    """Where releases are, and the root metadata that they are verified from."""

    url: str
    root: bytes


def release_root() -> bytes | None:
    """The root of trust in this package, or None while there is none."""
    try:
        return Path(__file__).with_name(ROOT_NAME).read_bytes()
    except FileNotFoundError:
        return None


def release_source(settings: Settings) -> ReleaseSource:
    """The source of new versions. Raises UsageError without a root of trust or an address."""
    root = release_root()
    if root is None:
        raise UsageError(
            "This version has no root of trust for updates: no publisher has created one yet.",
            "Install newer versions by hand, in the same way as this version.",
        )
    url = settings.update_url or RELEASE_URL
    if not url:
        raise UsageError("This version knows no address of releases.", "Set update_url in config.toml.")
    try:
        return ReleaseSource(safe_url(url), root)
    except ValueError as error:
        raise UsageError(f"update_url cannot be used: {error}.", "Use an https:// address.") from error


async def look_for_update(settings: Settings, current: str, now: float) -> AvailableUpdate | None:
    """Ask now, and remember in the data folder what was seen.

    Raises UsageError without a source, UpdateRefusedError for metadata that cannot be believed, DataError when nobody
    answers, StorageError.
    """
    from neuroshard.update.metadata import (
        look_at_metadata,
    )  # loads python-tuf, which a node without updates never needs

    source, platform = release_source(settings), platform_name()
    file = memory_file(settings.data_dir)
    memory = replace(file.read() or NEVER_ASKED, asked_at=now)
    file.write(memory)  # also when nobody answers: once a day is enough
    memory.refuse_earlier_clock(now)
    look = await look_at_metadata(source.url, source.root, memory.metadata, target_name(platform))
    memory = replace(memory, metadata=look.files, verified_at=memory.verified_at if look.refusal else now)
    file.write(memory)
    if look.refusal:
        raise look.refusal
    update = judge(look.archive, source.url, current=current, platform=platform)
    file.write(replace(memory, available=update.version if update else ""))
    return update


async def daily_notice(settings: Settings, current: str, now: float) -> str | None:
    """A sentence about a newer version, a refusal, or a long silence; asks at most once a day.

    Raises UsageError without a source, DataError when nobody answers, StorageError.
    """
    memory = memory_file(settings.data_dir).read() or NEVER_ASKED
    if not memory.is_due(now):
        is_newer = memory.available and version_number(memory.available) > version_number(current)
        return notice(memory.available) if is_newer else None
    try:
        update = await look_for_update(settings, current, now)
    except UpdateRefusedError as refused:
        return str(refused)
    except DataUnavailableError as error:  # a mirror that answers nothing would hold versions back without an end
        if not memory.verified_at or now - memory.verified_at < SILENT_SECONDS:
            raise
        return f"No release could be verified since {_date(memory.verified_at)}: {error}"
    return notice(update.version) if update else None


def notice(version: str) -> str:
    """The sentence for people: the command if it works here, otherwise the way in which this version was installed."""
    how = (
        "`neuroshard update apply` installs it."
        if installation_root()
        else "install it in the same way as this version."
    )
    return f"Version {version} is available: {how}"


def _date(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d}"
