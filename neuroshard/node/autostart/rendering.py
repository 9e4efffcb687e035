"""The texts that make each system start a program at login. Pure."""

from __future__ import annotations

import plistlib
import subprocess
from collections.abc import Sequence

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
