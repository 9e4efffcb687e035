"""Which program a text of `rendering` starts, or one that an owner wrote by hand for the same place. Pure."""

from __future__ import annotations

import plistlib
import re
from typing import cast
from xml.parsers.expat import ExpatError

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
