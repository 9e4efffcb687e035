"""Start with the computer: only the owner switches it on, and removal leaves no trace. No secret is written."""

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
    """The program of a systemd unit; None when that cannot be told. `home` stands for %h."""
    line = _value(text, "ExecStart")
    word = None if line is None else _first_word(line.lstrip("-@:+!"))
    if word is None:
        return None
    specifiers = {"%": "%", "h": home}
    if any(found not in specifiers for found in re.findall(r"%(.?)", word)):
        return None
    return re.sub(r"%(.)", lambda found: specifiers[found[1]], word).replace("$$", "$")


def program_of_entry(text: str) -> str | None:
    """The program of a desktop's autostart entry; None when that cannot be told."""
    line = _value(text, "Exec")
    word = None if line is None else _first_word(line.replace("\\\\", "\\"))  # the escapes of the file come first
    return None if word is None else word.replace("%%", "%")


def program_of_agent(text: str) -> str | None:
    """The program of a launchd agent; None when that cannot be told."""
    try:
        agent = plistlib.loads(text.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return None
    words = cast("dict[str, object]", agent).get("ProgramArguments") if isinstance(agent, dict) else None
    return str(cast("list[object]", words)[0]) if isinstance(words, list) and words else None


def program_of_run_key(line: str) -> str | None:
    """The program of a command line of Windows, where no name holds a quotation mark; None when there is none."""
    found = re.match(r'"([^"]+)"|([^\s"]+)', line)
    return None if found is None else found[1] or found[2]


def _value(text: str, key: str) -> str | None:
    found = re.search(rf"^{key}=[ \t]*(\S.*)$", text, re.MULTILINE)
    return None if found is None else found[1]


def _first_word(line: str) -> str | None:
    """The first word of a command line; in double quotes a backslash takes the next character as it is."""
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
    """A user unit: what `autostart on` writes, the Debian package brings, and docs/systemd shows."""
    return f"""[Unit]
Description={DESCRIPTION}

[Service]
ExecStart={" ".join(map(_systemd_word, command))}
# a signal asks for a final checkpoint
TimeoutStopSec={STOP_SECONDS}
Restart=on-failure
RestartSec={RETRY_SECONDS}
# 2 to 6: settings, the token, a port, a folder or the data: what only its owner can mend
RestartPreventExitStatus=2 3 4 5 6
Nice=10

[Install]
WantedBy=default.target
"""


def desktop_entry(command: Sequence[str]) -> str:
    """An XDG autostart entry, for desktops without systemd."""
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
    """A launchd agent of macOS."""
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
    """The command line for the Run key of Windows."""
    return subprocess.list2cmdline(command)


def _systemd_word(word: str) -> str:
    """One argument of ExecStart=, see systemd.service(5): quoted, without specifiers and variables."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _desktop_word(word: str) -> str:
    """One argument of Exec=: quoted for the command line, then escaped as a string, see the Desktop Entry rules."""
    quoted = "".join(f"\\{character}" if character in '"`$\\' else character for character in word)
    return '"' + quoted.replace("\\", "\\\\").replace("%", "%%") + '"'


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
        from neuroshard.host.windows_registry import RunKey

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


@dataclass(frozen=True)
class AutostartStatus:
    """Whether this program starts at login; `path` and `kind` of what does it, or of what `on` would write.

    `missing` is the program that should start and is not there: it was moved or removed since.
    """

    is_on: bool
    kind: str
    path: str
    content: str | None
    missing: str | None = None

    def complaint(self) -> str:
        """What is wrong with it; empty when nothing is."""
        if self.missing is None:
            return ""
        return f"The {self.kind} {self.path} starts {self.missing}, which is not there."


def status(places: Sequence[Place]) -> AutostartStatus:
    """What is there now. Raises StorageError."""
    found = ((place, content) for place in places if (content := place.read()) is not None)
    place, content = next(found, (places[0], None))
    program = None if content is None else place.program(content)
    missing = program if program is not None and shutil.which(program) is None else None
    return AutostartStatus(content is not None, place.kind, place.path, content, missing)


def turn_on(places: Sequence[Place], command: Sequence[str]) -> AutostartStatus:
    """Write the first place and clear the others: nothing starts twice. Raises StorageError, UsageError."""
    first, *others = places
    for place in others:
        if place.read() is not None:
            place.remove()
    first.write(command)
    return status(places)


def turn_off(places: Sequence[Place]) -> AutostartStatus:
    """Clear all places. Raises StorageError."""
    for place in places:
        place.remove()
    return status(places)


def start_command(loaded: LoadedSettings) -> tuple[str, ...]:
    """What starts this node without asking anybody. Raises TokenError when its token is in no file."""
    settings = loaded.settings
    if settings.token_file is None or loaded.sources["token"] != loaded.sources["token_file"]:
        raise TokenError(
            "Autostart needs the token in a file: others can read a command line, and a variable may not be there.",
            "Run `neuroshard` once at a desktop and finish the set-up, or name a file with --token-file FILE.",
        )
    is_stored = loaded.sources["token"] == "config.toml"  # noqa: S105 - the name of a source
    token = () if is_stored else ("--token-file", str(settings.token_file.absolute()))
    return (*_windowless(installed_program()), "--headless", "--data-dir", str(settings.data_dir), *token)


def _windowless(program: tuple[str, ...]) -> tuple[str, ...]:
    """On Windows the Python that opens no console window, where there is one beside the running one."""
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
    "start_command",
    "status",
    "turn_off",
    "turn_on",
]
