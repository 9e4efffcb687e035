"""Settings of the running node: their values for the API, and changes, which are stored and applied if possible."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from neuroshard.config.loading import LoadedSettings, Source, shown_value, source_name
from neuroshard.config.saving import SavedSettings, save_settings
from neuroshard.config.settings import Settings
from neuroshard.model.memory_limit import Bounds
from neuroshard.status.board import CommandResult
from neuroshard.types import JsonValue


class Configuration:
    """Current settings; written by the task thread, read by the API thread."""

    def __init__(self, loaded: LoadedSettings) -> None:
        self._lock = Lock()
        self._loaded = loaded
        self._later: dict[str, JsonValue] = {}  # stored by a change of ours, and in force after a restart

    @property
    def settings(self) -> Settings:
        """The settings that hold now."""
        with self._lock:
            return self._loaded.settings

    def source_of(self, key: str) -> Source:
        """Where the value of a setting comes from."""
        with self._lock:
            return self._loaded.sources[key]

    def view(self) -> JsonValue:
        """Every setting with value, source, what is allowed and when a change holds; no secrets.

        `after_restart` stands where another value is stored than the one that holds.
        """
        with self._lock:
            described, later = self._loaded.describe(), dict(self._later)
        return {
            key: {**told, "after_restart": later[key]} if key in later and isinstance(told, Mapping) else told
            for key, told in described.items()
        }

    def change(self, changes: Mapping[str, JsonValue], state: str) -> CommandResult:
        """Store changes in config.toml and let hold at once what can. On UsageError or StorageError nothing changed."""
        with self._lock:
            loaded = self._loaded
        saved = save_settings(loaded.settings.data_dir, changes, loaded.sources)
        live = {key: getattr(saved.checked, key) for key in saved.at_once if key not in saved.overridden}
        sources: dict[str, Source] = {key: "default" if saved.values[key] is None else "config.toml" for key in live}
        later = self._stored_for_later(saved, loaded)
        with self._lock:
            self._later = later
            self._loaded = LoadedSettings(loaded.settings.model_copy(update=live), {**loaded.sources, **sources})
        return CommandResult(
            state,
            _sentence(saved.at_once, saved.after_restart, saved.overridden),
            {
                "stored": dict(saved.values),
                "at_once": list(live),
                "after_restart": list(saved.after_restart),
                "overridden": dict(saved.overridden),
            },
        )

    def _stored_for_later(self, saved: SavedSettings, loaded: LoadedSettings) -> dict[str, JsonValue]:
        """What holds after a restart and does not hold now: of all changes since the start."""
        later = dict(self._later)
        for key in saved.after_restart:
            later.pop(key, None)
            stored = shown_value(key, getattr(saved.checked, key))
            if key not in saved.overridden and stored != shown_value(key, getattr(loaded.settings, key)):
                later[key] = stored
        return later


def limit_source(by: Bounds, source: Source) -> str:
    """What set the memory limit, for people; `source` is that of the setting `memory`."""
    match by:
        case Bounds.COMPUTER:
            return "this computer's memory, less a reserve"
        case Bounds.CGROUP:
            return "the limit of this process's control group (container or service)"
        case Bounds.OWNER:
            return source_name(source, "memory")


def _sentence(at_once: tuple[str, ...], after_restart: tuple[str, ...], overridden: Mapping[str, str]) -> str:
    """What a change led to, for people."""
    parts: list[str] = []
    if holds := [key for key in at_once if key not in overridden]:
        parts.append(f"{', '.join(holds)}: holds now.")
    if later := [key for key in after_restart if key not in overridden]:
        parts.append(f"{', '.join(later)}: holds after a restart.")
    parts += [f"{key}: stored, but the {source} wins." for key, source in overridden.items()]
    return " ".join(parts)
