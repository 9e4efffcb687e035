"""Start the node at login, if its owner switches that on. Removal leaves no trace, and no secret is written."""

from __future__ import annotations

import contextlib
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast
from xml.parsers.expat import ExpatError

from neuroshard.config.folders import installed_program
from neuroshard.config.loading import LoadedSettings
from neuroshard.config.state_file import write_atomically
from neuroshard.errors import StorageError, TokenError, UsageError

_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"')


def program_of_unit(text: str, home: str) -> str | None:
    """Return the program that a systemd unit starts, or None if it cannot be determined. `home` replaces %h."""
    line = _value(text, "ExecStart")
    word = None if line is None else _first_word(line.lstrip("-@:+!"))
    if word is None:
        return None
    specifiers = {"%": "%", "h": home}
    if any(found not in specifiers for found in re.findall(r"%(.?)", word)):
        return None
    return re.sub(r"%(.)", lambda found: specifiers[found[1]], word).replace("$$", "$")


def program_of_entry(text: str) -> str | None:
    """Return the program that a desktop autostart entry starts, or None if it cannot be determined."""
    line = _value(text, "Exec")
    word = None if line is None else _first_word(line.replace("\\\\", "\\"))  # the escapes of the file come first
    return None if word is None else word.replace("%%", "%")


def program_of_agent(text: str) -> str | None:
    """Return the program that a launchd agent starts, or None if it cannot be determined."""
    try:
        agent = plistlib.loads(text.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return None
    words = cast("dict[str, object]", agent).get("ProgramArguments") if isinstance(agent, dict) else None
    return str(cast("list[object]", words)[0]) if isinstance(words, list) and words else None


def program_of_run_key(line: str) -> str | None:
    """Return the program of a Windows command line, or None. A Windows path has no quotation mark in it."""
    found = re.match(r'"([^"]+)"|([^\s"]+)', line)
    return None if found is None else found[1] or found[2]


def _value(text: str, key: str) -> str | None:
    found = re.search(rf"^{key}=[ \t]*(\S.*)$", text, re.MULTILINE)
    return None if found is None else found[1]


def _first_word(line: str) -> str | None:
    """Return the first word of a command line; inside double quotes a backslash escapes the next character."""
    if not line.startswith('"'):
        return next(iter(line.split()), None)
    quoted = _QUOTED.match(line)
    return None if quoted is None else re.sub(r"\\(.)", r"\1", quoted[1]) or None


NAME = "neuroshard"
AGENT_LABEL = "ai.neuroshard.node"
DESCRIPTION = "NeuroShard: trains one language model together with other computers"
RETRY_SECONDS = 30
STOP_SECONDS = 120  # a final checkpoint on a slow disk


def systemd_unit(command: Sequence[str]) -> str:
    """Render the user unit that `autostart on` writes, the Debian package installs and docs/systemd shows."""
    return f"""[Unit]
Description={DESCRIPTION}

[Service]
ExecStart={" ".join(map(_systemd_word, command))}
# a signal asks for a final checkpoint
TimeoutStopSec={STOP_SECONDS}
Restart=on-failure
RestartSec={RETRY_SECONDS}
# 2 to 6: settings, the token, a port, a folder or the data: problems that only the owner can fix
RestartPreventExitStatus=2 3 4 5 6
# a program at the desktop has a weight of 100
CPUWeight=5
Nice=10

[Install]
WantedBy=default.target
"""


def desktop_entry(command: Sequence[str]) -> str:
    """Render an XDG autostart entry, for desktops without systemd."""
    return f"""[Desktop Entry]
Type=Application
Name=NeuroShard
Comment={DESCRIPTION}
Exec={" ".join(map(_desktop_word, command))}
Terminal=false
NoDisplay=true
X-GNOME-Autostart-enabled=true
"""


def launch_agent(command: Sequence[str]) -> bytes:
    """Render a launchd agent for macOS, which restarts the node only after a crash."""
    return plistlib.dumps(
        {
            "Label": AGENT_LABEL,
            "ProgramArguments": list(command),
            "RunAtLoad": True,
            "KeepAlive": {"Crashed": True},
            "ThrottleInterval": RETRY_SECONDS,
            "ProcessType": "Background",
        }
    )


def run_key_value(command: Sequence[str]) -> str:
    """Join the command line for the Run key of the Windows registry."""
    return subprocess.list2cmdline(command)


def _systemd_word(word: str) -> str:
    """Quote one argument of ExecStart= and escape specifiers and variables, as systemd.service(5) requires."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _desktop_word(word: str) -> str:
    """Quote one argument of Exec= for the command line, then escape it as a string (Desktop Entry Specification)."""
    quoted = "".join(f"\\{character}" if character in '"`$\\' else character for character in word)
    return '"' + quoted.replace("\\", "\\\\").replace("%", "%%") + '"'


RELOAD_SECONDS = 10.0
RUN_KEY = r"Software\Microsoft\Windows\CurrentVersion\Run"
RUN_VALUE = "NeuroShard"
LONGEST_RUN_VALUE = 260  # Windows silently ignores longer values


class Place(Protocol):
    """A place where the system looks for programs to start at login.

    Methods raise StorageError. `write` raises UsageError for a command that the place cannot hold.
    """

    @property
    def kind(self) -> str:
        """Name of the kind of place, shown to the owner."""
        ...

    @property
    def path(self) -> str:
        """Location of the place, shown to the owner."""
        ...

    def read(self) -> str | None:
        """Return the content of the place, or None if it is empty."""
        ...

    def program(self, content: str) -> str | None:
        """Return the program that this content starts, or None if it cannot be determined."""
        ...

    def write(self, command: Sequence[str]) -> None:
        """Start this command at the next login."""
        ...

    def remove(self) -> None:
        """Clear the place; an empty one stays as it is."""
        ...


@dataclass(frozen=True)
class FilePlace:
    """A file that starts the node, the links that enable it, and a command that makes the system read it again."""

    kind: str
    file: Path
    render: Callable[[Sequence[str]], bytes]
    program_of: Callable[[str], str | None]
    links: tuple[Path, ...] = ()
    reload: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The file, or the link to use if the file is missing: a link may enable the unit of a package."""
        return str(next((path for path in (self.file, *self.links) if path.exists()), self.file))

    def read(self) -> str | None:
        try:
            return Path(self.path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.path} cannot be read: {error}.", "Look at that file.") from error

    def program(self, content: str) -> str | None:
        return self.program_of(content)

    def write(self, command: Sequence[str]) -> None:
        """Write the file first, then the links to it."""
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
        """Remove the links first, then the file."""
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
        """Make the system read the change now. A failure is harmless, because the next login reads everything."""
        if self.reload:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self.reload, capture_output=True, timeout=RELOAD_SECONDS, check=False)  # noqa: S603


class Registry(Protocol):
    """The string values of one key of the owner's registry. Methods raise StorageError."""

    def get(self, name: str) -> str | None:
        """Return a value, or None if it does not exist."""
        ...

    def set(self, name: str, value: str) -> None:
        """Write a value; a missing key is created."""
        ...

    def delete(self, name: str) -> None:
        """Remove a value if it exists."""
        ...


@dataclass(frozen=True)
class RunKeyPlace:
    """The value of the owner's Run key that starts the node at login on Windows."""

    registry: Registry
    kind: str = "Run key"
    path: str = rf"HKEY_CURRENT_USER\{RUN_KEY}\{RUN_VALUE}"

    def read(self) -> str | None:
        return self.registry.get(RUN_VALUE)

    def program(self, content: str) -> str | None:
        return program_of_run_key(content)

    def write(self, command: Sequence[str]) -> None:
        """Write the command line. Raises UsageError if it is too long, because Windows would ignore it."""
        value = run_key_value(command)
        if len(value) > LONGEST_RUN_VALUE:
            raise UsageError(
                f"Windows starts only commands of at most {LONGEST_RUN_VALUE} characters; this one has {len(value)}.",
                "Use a data folder, or an installation, with a shorter path.",
            )
        self.registry.set(RUN_VALUE, value)

    def remove(self) -> None:
        self.registry.delete(RUN_VALUE)


def places_here(platform: str, home: Path, environment: Mapping[str, str]) -> tuple[Place, ...]:
    """Return the places of this system, the preferred one first. Raises UsageError for an unknown system."""
    if platform == "win32":
        from neuroshard.host.windows_registry import RunKey

        return (RunKeyPlace(RunKey(RUN_KEY)),)
    if platform == "darwin":
        file = home / "Library" / "LaunchAgents" / f"{AGENT_LABEL}.plist"
        return (FilePlace("launchd agent", file, launch_agent, program_of_agent),)
    if platform.startswith(("linux", "freebsd")):
        return linux_places(home, environment)
    raise UsageError(f"Autostart is not supported on {platform}.", "Set it up by hand.")


def _is_there(place: Path) -> bool:
    """Whether this user can see the path: after `su`, variables may still name another user's folders."""
    try:
        return place.exists()
    except OSError:
        return False


def linux_places(home: Path, environment: Mapping[str, str]) -> tuple[Place, ...]:
    """Return a systemd user unit and a desktop autostart entry; the unit is first if systemd serves the user."""
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
    """Return the places for the owner of this process. Raises UsageError for an unknown system."""
    return places_here(sys.platform, Path.home(), environment)


@dataclass(frozen=True)
class AutostartStatus:
    """Whether the node starts at login.

    `kind` and `path` describe the place that starts it, or the place that `on` would write. `missing` is the program
    that the place starts if that program no longer exists, because it was moved or removed.
    """

    is_on: bool
    kind: str
    path: str
    content: str | None
    missing: str | None = None

    def complaint(self) -> str:
        """Return a sentence about the missing program, or an empty string if nothing is wrong."""
        if self.missing is None:
            return ""
        return f"The {self.kind} {self.path} starts {self.missing}, which does not exist."


def read_autostart(places: Sequence[Place]) -> AutostartStatus:
    """Read the present state of the places. Raises StorageError."""
    found = ((place, content) for place in places if (content := place.read()) is not None)
    place, content = next(found, (places[0], None))
    program = None if content is None else place.program(content)
    missing = program if program is not None and shutil.which(program) is None else None
    return AutostartStatus(content is not None, place.kind, place.path, content, missing)


def turn_on(places: Sequence[Place], command: Sequence[str]) -> AutostartStatus:
    """Write the first place and clear the others, so that the node starts once. Raises StorageError, UsageError."""
    first, *others = places
    for place in others:
        if place.read() is not None:
            place.remove()
    first.write(command)
    return read_autostart(places)


def turn_off(places: Sequence[Place]) -> AutostartStatus:
    """Clear all places. Raises StorageError."""
    for place in places:
        place.remove()
    return read_autostart(places)


def start_command(loaded: LoadedSettings) -> tuple[str, ...]:
    """Return the command that starts this node without a prompt. Raises TokenError if no file has its token."""
    settings = loaded.settings
    if settings.token_file is None or loaded.sources["token"] != loaded.sources["token_file"]:
        raise TokenError(
            "Autostart needs the token in a file: others can read a command line, and a variable may not be there.",
            "Run `neuroshard` once at a desktop and finish the wizard, or name a file with --token-file FILE.",
        )
    is_stored = loaded.sources["token"] == "config.toml"  # noqa: S105 - the name of a source
    token = () if is_stored else ("--token-file", str(settings.token_file.absolute()))
    return (*_windowless(installed_program()), "--headless", "--data-dir", str(settings.data_dir), *token)


def _windowless(program: tuple[str, ...]) -> tuple[str, ...]:
    """On Windows, replace python.exe by pythonw.exe, which opens no console window, if it is in the same folder."""
    first, *rest = program
    without = Path(first).with_name("pythonw.exe")
    if sys.platform == "win32" and Path(first).name.lower() == "python.exe" and without.exists():
        return (str(without), *rest)
    return program


__all__ = [
    "AutostartStatus",
    "Place",
    "places_here",
    "places_of_this_computer",
    "read_autostart",
    "start_command",
    "turn_off",
    "turn_on",
]
