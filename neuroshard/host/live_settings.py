"""Settings of the running node: their values for the API, and changes, which are stored and applied where possible."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from neuroshard.config.loading import LoadedSettings, Source, shown_value, source_name
from neuroshard.config.saving import SavedSettings, save_settings
from neuroshard.config.settings import IN_FILE, Applies, Settings, note_of
from neuroshard.errors import UsageError
from neuroshard.model.memory_limit import Bounds
from neuroshard.status.board import CommandResult
from neuroshard.types import JsonValue


class Configuration:
    """The current settings. The task thread changes them; the API thread reads them."""

    def __init__(self, loaded: LoadedSettings) -> None:
        self._lock = Lock()
        self._loaded = loaded
        self._later: dict[str, JsonValue] = {}  # stored by `change`; takes effect after a restart

    @property
    def settings(self) -> Settings:
        """The settings that are in effect."""
        with self._lock:
            return self._loaded.settings

    def source_of(self, key: str) -> Source:
        """Return the source of the present value: a file, a variable, an option or the default."""
        with self._lock:
            return self._loaded.sources[key]

    def view(self) -> JsonValue:
        """Return every setting with its value, source, allowed values and the time a change takes effect; no secrets.

        `after_restart` is present if the stored value differs from the value in effect.
        """
        with self._lock:
            described, later = self._loaded.describe(), dict(self._later)
        return {
            key: {**setting, "after_restart": later[key]} if key in later and isinstance(setting, Mapping) else setting
            for key, setting in described.items()
        }

    def change(self, changes: Mapping[str, JsonValue], state: str) -> CommandResult:
        """Store changes in config.toml and apply those that can take effect at once.

        Raises UsageError, also for a setting that only the owner changes, or StorageError; then nothing has changed.
        """
        with self._lock:
            loaded = self._loaded
        _refuse_owner_settings(changes, loaded)
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
        """Stored values that differ from those in effect, from all changes since the start."""
        later = dict(self._later)
        for key in saved.after_restart:
            later.pop(key, None)
            stored = shown_value(key, getattr(saved.checked, key))
            if key not in saved.overridden and stored != shown_value(key, getattr(loaded.settings, key)):
                later[key] = stored
        return later


def _refuse_owner_settings(changes: Mapping[str, JsonValue], loaded: LoadedSettings) -> None:
    """Raise UsageError for a setting that only the owner changes: a program with a session must not redirect it."""
    for key in changes:
        if key in Settings.model_fields and (way := note_of(key).owner):
            line = f" or a line in {loaded.config_file}" if note_of(key).applies is not Applies.NOT_STORED else ""
            ways = f"a line in {loaded.config_file}" if way == IN_FILE else f"{way}{line}"
            raise UsageError(
                f"{key} cannot be changed through the dashboard or the API.",
                f"Change it with {ways}, and restart the node.",
            )


def limit_source(by: Bounds, source: Source) -> str:
    """Return a phrase for the origin of the memory limit; `source` is that of the setting `memory`."""
    match by:
        case Bounds.COMPUTER:
            return "this computer's memory, less a reserve"
        case Bounds.CGROUP:
            return "the limit of this process's control group (container or service)"
        case Bounds.OWNER:
            return source_name(source, "memory")


def _sentence(at_once: tuple[str, ...], after_restart: tuple[str, ...], overridden: Mapping[str, str]) -> str:
    """The result of a change in sentences for the owner."""
    parts: list[str] = []
    if holds := [key for key in at_once if key not in overridden]:
        parts.append(f"{', '.join(holds)}: in effect now.")
    if later := [key for key in after_restart if key not in overridden]:
        parts.append(f"{', '.join(later)}: takes effect after a restart.")
    parts += [f"{key}: stored, but the {source} takes precedence." for key, source in overridden.items()]
    return " ".join(parts)
