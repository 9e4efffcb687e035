"""Where a system looks for what it starts at login: a file in the owner's home, or the Run key of Windows."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neuroshard.config.state_file import write_atomically
from neuroshard.errors import StorageError, UsageError
from neuroshard.node.autostart.reading import (
    program_of_agent,
    program_of_entry,
    program_of_run_key,
    program_of_unit,
)
from neuroshard.node.autostart.rendering import (
    AGENT_LABEL,
    NAME,
    desktop_entry,
    launch_agent,
    run_key_value,
    systemd_unit,
)

RELOAD_SECONDS = 10.0
RUN_KEY = r"Software\Microsoft\Windows\CurrentVersion\Run"
RUN_VALUE = "NeuroShard"
LONGEST_RUN_VALUE = 260  # Windows silently ignores longer ones


class Place(Protocol):
    """One place; methods raise StorageError, and UsageError for a command that it cannot hold."""

    @property
    def kind(self) -> str:
        """What it is, for people."""
        ...

    @property
    def path(self) -> str:
        """Where it is, for people."""
        ...

    def read(self) -> str | None:
        """What stands there; None when nothing does."""
        ...

    def program(self, content: str) -> str | None:
        """The program that such a content starts; None when that cannot be told."""
        ...

    def write(self, command: Sequence[str]) -> None:
        """Start this command at the next login."""
        ...

    def remove(self) -> None:
        """Leave nothing there."""
        ...


@dataclass(frozen=True)
class FilePlace:
    """A file, with links to it that switch it on, and a call that makes the system read it."""

    kind: str
    file: Path
    render: Callable[[Sequence[str]], bytes]
    program_of: Callable[[str], str | None]
    links: tuple[Path, ...] = ()
    reload: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The file, or a link that switches on another one, such as the unit of a package."""
        return str(next((path for path in (self.file, *self.links) if path.exists()), self.file))

    def read(self) -> str | None:
        """The text of what is switched on; None when nothing is."""
        try:
            return Path(self.path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.path} cannot be read: {error}.", "Look at that file.") from error

    def program(self, content: str) -> str | None:
        """The program that such a text starts; None when that cannot be told."""
        return self.program_of(content)

    def write(self, command: Sequence[str]) -> None:
        """Write the file, then the links to it."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, self.render(command), mode=0o644)
            for link in self.links:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(self.file)
        except OSError as error:
            raise StorageError(
                f"{self.file} cannot be written: {error.strerror}.", "Check the folder's rights."
            ) from error
        self._reload()

    def remove(self) -> None:
        """Remove the links, then the file."""
        try:
            for path in (*self.links, self.file):
                path.unlink(missing_ok=True)
            for link in self.links:
                with contextlib.suppress(OSError):  # other programs have links in that folder
                    link.parent.rmdir()
        except OSError as error:
            raise StorageError(f"{self.file} cannot be removed: {error.strerror}.", "Remove it by hand.") from error
        self._reload()

    def _reload(self) -> None:
        """What fails here is made up for at the next login, when everything is read."""
        if self.reload:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self.reload, capture_output=True, timeout=RELOAD_SECONDS, check=False)  # noqa: S603


class Registry(Protocol):
    """The values of one key of the owner's registry."""

    def get(self, name: str) -> str | None:
        """A value; None when it is not there."""
        ...

    def set(self, name: str, value: str) -> None:
        """Write a value."""
        ...

    def delete(self, name: str) -> None:
        """Remove a value, if it is there."""
        ...


@dataclass(frozen=True)
class RunKeyPlace:
    """The Run key of the owner's part of the registry."""

    registry: Registry
    kind: str = "Run key"
    path: str = rf"HKEY_CURRENT_USER\{RUN_KEY}\{RUN_VALUE}"

    def read(self) -> str | None:
        """The command line; None when there is none."""
        return self.registry.get(RUN_VALUE)

    def program(self, content: str) -> str | None:
        """The program of such a command line; None when there is none."""
        return program_of_run_key(content)

    def write(self, command: Sequence[str]) -> None:
        """Write the command line, whole or not at all."""
        value = run_key_value(command)
        if len(value) > LONGEST_RUN_VALUE:
            raise UsageError(
                f"Windows starts only commands of at most {LONGEST_RUN_VALUE} characters; this one has {len(value)}.",
                "Use a data folder, or an installation, with a shorter path.",
            )
        self.registry.set(RUN_VALUE, value)

    def remove(self) -> None:
        """Remove the command line."""
        self.registry.delete(RUN_VALUE)


def places_here(platform: str, home: Path, environment: Mapping[str, str]) -> tuple[Place, ...]:
    """The places of this system, the best one first. Raises UsageError where none is known."""
    if platform == "win32":
        from neuroshard.node.autostart.windows import RunKey

        return (RunKeyPlace(RunKey(RUN_KEY)),)
    if platform == "darwin":
        file = home / "Library" / "LaunchAgents" / f"{AGENT_LABEL}.plist"
        return (FilePlace("launchd agent", file, launch_agent, program_of_agent),)
    if platform.startswith(("linux", "freebsd")):
        return linux_places(home, environment)
    raise UsageError(f"How {platform} starts programs at login is not known here.", "Set it up by hand.")


def _is_there(place: Path) -> bool:
    """Whether this user can see it: after `su` the variables may name another one's folders."""
    try:
        return place.exists()
    except OSError:
        return False


def linux_places(home: Path, environment: Mapping[str, str]) -> tuple[Place, ...]:
    """A systemd user unit and a desktop's autostart entry; the unit first where systemd serves the user."""
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    units = config / "systemd" / "user"
    has_systemd = _is_there(Path(environment.get("XDG_RUNTIME_DIR") or "/nonexistent") / "systemd" / "private")
    unit = FilePlace(
        "systemd user unit",
        units / f"{NAME}.service",
        lambda command: systemd_unit(command).encode(),
        lambda text: program_of_unit(text, str(home)),
        links=(units / "default.target.wants" / f"{NAME}.service",),
        reload=("systemctl", "--user", "daemon-reload") if has_systemd else (),
    )
    entry = FilePlace(
        "desktop autostart entry",
        config / "autostart" / f"{NAME}.desktop",
        lambda command: desktop_entry(command).encode(),
        program_of_entry,
    )
    return (unit, entry) if has_systemd else (entry, unit)


def places_of_this_computer(environment: Mapping[str, str]) -> tuple[Place, ...]:
    """The places for the owner of this process. Raises UsageError where none is known."""
    return places_here(sys.platform, Path.home(), environment)
