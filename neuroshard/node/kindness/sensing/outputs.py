"""Questions to programs that come with a system, and what their answers mean. The readers are pure."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence

from neuroshard.node.kindness.policy import Unknown

ANSWER_SECONDS = 5.0
_HID_IDLE = re.compile(r'"HIDIdleTime" = (\d+)')
_PROPERTY = re.compile(r"^(\w+)=(.*)$", re.MULTILINE)
_UINT64 = re.compile(r"\(uint64 (\d+),\)")


def macos_idle_seconds() -> float | Unknown:
    """Since the last touch of any input device, by `ioreg`."""
    text = _output(("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"))
    return text if isinstance(text, Unknown) else hid_idle_seconds(text)


def logind_idle_seconds() -> float | Unknown:
    """Since this user's sessions are idle, by `loginctl`: the desktop tells it after some minutes, not earlier."""
    text = _output(("loginctl", "show-user", str(_user()), "--property=State,IdleHint,IdleSinceHint"))
    return text if isinstance(text, Unknown) else session_idle_seconds(text, time.time())


def gnome_idle_seconds() -> float | Unknown:
    """Since the last input in a GNOME session, by its own idle monitor: the only one that knows under Wayland."""
    text = _output(
        (
            *("gdbus", "call", "--session", "--dest", "org.gnome.Mutter.IdleMonitor"),
            *("--object-path", "/org/gnome/Mutter/IdleMonitor/Core"),
            *("--method", "org.gnome.Mutter.IdleMonitor.GetIdletime"),
        )
    )
    return text if isinstance(text, Unknown) else monitor_idle_seconds(text)


def hid_idle_seconds(ioreg: str) -> float | Unknown:
    """The shortest of the idle times (nanoseconds) that ioreg prints."""
    times = [int(found) for found in _HID_IDLE.findall(ioreg)]
    return min(times) / 1e9 if times else Unknown("ioreg names no HIDIdleTime")


def session_idle_seconds(loginctl: str, now: float) -> float | Unknown:
    """From `IdleHint` and `IdleSinceHint` (microseconds since the epoch)."""
    facts: dict[str, str] = dict(_PROPERTY.findall(loginctl))
    if facts.get("IdleHint") == "no":
        return 0.0
    since = facts.get("IdleSinceHint", "")
    if facts.get("IdleHint") != "yes" or not since.isdecimal():
        return Unknown("this session does not tell whether it is idle")
    return max(0.0, now - int(since) / 1e6)


def monitor_idle_seconds(gdbus: str) -> float | Unknown:
    """From "(uint64 milliseconds,)"."""
    match = _UINT64.search(gdbus)
    return int(match[1]) / 1000 if match else Unknown("GNOME's idle monitor does not answer")


def _output(command: Sequence[str]) -> str | Unknown:
    """What a program of the system prints; of a failure its first line."""
    try:
        ran = subprocess.run(  # noqa: S603 - names and arguments are ours
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, check=False
        )
    except FileNotFoundError:
        return Unknown(f"there is no {command[0].rpartition('/')[2]} here")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unknown(f"{command[0]} does not answer ({type(error).__name__})")
    if ran.returncode != 0:
        return Unknown((ran.stderr.strip().splitlines() or [f"{command[0]} fails"])[0][:200])
    return ran.stdout


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
