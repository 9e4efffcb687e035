"""Whether this computer runs on its battery."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from neuroshard.node.kindness.policy import Unknown

POWER_SUPPLIES = Path("/sys/class/power_supply")


def runs_on_battery() -> bool | Unknown:
    """A computer without a battery does not."""
    if sys.platform == "linux":
        return runs_on_battery_linux(POWER_SUPPLIES)
    if not hasattr(psutil, "sensors_battery"):
        return Unknown("this system does not tell")
    battery = psutil.sensors_battery()
    if battery is None:
        return False
    plugged: bool | None = battery.power_plugged
    return Unknown("the battery does not say whether it is charged") if plugged is None else not plugged


def runs_on_battery_linux(supplies: Path) -> bool | Unknown:
    """As the kernel tells it in files: psutil would take the battery of a mouse for the computer's."""
    try:
        facts = [_facts(supply) for supply in sorted(supplies.iterdir())]
    except FileNotFoundError:
        return False  # a kernel without power supplies, as in a virtual machine
    except OSError as error:
        return Unknown(f"{supplies} cannot be read: {error.strerror}")
    if any(fact["type"] in {"Mains", "USB"} and fact["online"] == "1" for fact in facts):
        return False
    own = [fact for fact in facts if fact["type"] == "Battery" and fact["scope"] != "Device"]
    return any(fact["status"] == "Discharging" for fact in own)


def _facts(supply: Path) -> dict[str, str]:
    return {name: _text(supply / name) for name in ("type", "scope", "online", "status")}


def _text(file: Path) -> str:
    """What a file says; "" when it is not there, or its device was unplugged this moment."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
