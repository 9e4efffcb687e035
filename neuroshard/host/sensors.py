"""Sensors of this computer: battery, GPU, user input, full screen, connection and programs, on each system.

A value that cannot be read is `Unknown`, with the reason in words. A separate thread reads, because a display may never
answer."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import psutil

from neuroshard.host.macos_network import macos_is_metered
from neuroshard.host.nvidia import GpuSensor
from neuroshard.host.owner_policy import GpuReading, HostReadings, Rules, Unknown

POWER_SUPPLIES = Path("/sys/class/power_supply")


def runs_on_battery() -> bool | Unknown:
    """Return whether the computer runs on battery; a computer without a battery does not."""
    if sys.platform == "linux":
        return runs_on_battery_linux(POWER_SUPPLIES)
    if not hasattr(psutil, "sensors_battery"):
        return Unknown("this system does not report it")
    battery = psutil.sensors_battery()
    if battery is None:
        return False
    plugged: bool | None = battery.power_plugged
    return Unknown("the battery does not report its charge") if plugged is None else not plugged


def runs_on_battery_linux(supplies: Path) -> bool | Unknown:
    """Read the kernel's power supply files: psutil would take the battery of a mouse for the computer's."""
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
    """Content of a file; empty if the file is missing or its device was unplugged at this moment."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


ANSWER_SECONDS = 5.0
_HID_IDLE = re.compile(r'"HIDIdleTime" = (\d+)')
_PROPERTY = re.compile(r"^(\w+)=(.*)$", re.MULTILINE)
_UINT64 = re.compile(r"\(uint64 (\d+),\)")
_VARIANT = re.compile(r"\(<uint32 (\d)>,\)")


def macos_idle_seconds() -> float | Unknown:
    """Return the seconds since the last input on any device, read with `ioreg`."""
    text = _output(("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"))
    return text if isinstance(text, Unknown) else hid_idle_seconds(text)


def logind_idle_seconds() -> float | Unknown:
    """Return the seconds for which this user's sessions have been idle, read with `loginctl`.

    The desktop reports that a session is idle only after some minutes.
    """
    text = _output(("loginctl", "show-user", str(_user()), "--property=State,IdleHint,IdleSinceHint"))
    return text if isinstance(text, Unknown) else session_idle_seconds(text, time.time())


def gnome_idle_seconds() -> float | Unknown:
    """Return the seconds since the last input, from GNOME's idle monitor: the only source under Wayland."""
    text = _output(
        (
            *("gdbus", "call", "--session", "--dest", "org.gnome.Mutter.IdleMonitor"),
            *("--object-path", "/org/gnome/Mutter/IdleMonitor/Core"),
            *("--method", "org.gnome.Mutter.IdleMonitor.GetIdletime"),
        )
    )
    return text if isinstance(text, Unknown) else monitor_idle_seconds(text)


def networkmanager_is_metered() -> bool | Unknown:
    """Return whether NetworkManager calls the connection to the internet metered, or guesses it."""
    text = _output(
        (
            *("gdbus", "call", "--system", "--dest", "org.freedesktop.NetworkManager"),
            *("--object-path", "/org/freedesktop/NetworkManager", "--method"),
            *("org.freedesktop.DBus.Properties.Get", "org.freedesktop.NetworkManager", "Metered"),
        )
    )
    if isinstance(text, Unknown):
        return Unknown(f"NetworkManager does not answer ({text.why})")
    return metered_from_networkmanager(text)


def windows_is_metered() -> bool | Unknown:
    """Return whether Windows calls the connection to the internet metered."""
    kind = (
        "Windows.Networking.Connectivity.NetworkInformation,Windows.Networking.Connectivity,ContentType=WindowsRuntime"
    )
    cost = f"[{kind}]::GetInternetConnectionProfile().GetConnectionCost().NetworkCostType"
    text = _output(("powershell", "-NoProfile", "-NonInteractive", "-Command", cost))
    return text if isinstance(text, Unknown) else metered_from_windows(text)


def metered_from_networkmanager(gdbus: str) -> bool | Unknown:
    """Interpret "(<uint32 N>,)", an NMMetered: 1 yes, 2 no, 3 guessed yes, 4 guessed no, 0 unknown."""
    match = _VARIANT.search(gdbus)
    if match is None or match[1] not in "1234":
        return Unknown("NetworkManager does not report whether the connection is metered")
    return match[1] in "13"


def metered_from_windows(cost: str) -> bool | Unknown:
    """Interpret a NetworkCostType."""
    name = cost.strip()
    if name not in {"Unrestricted", "Fixed", "Variable"}:
        return Unknown("Windows does not report whether the connection is metered")
    return name != "Unrestricted"


def hid_idle_seconds(ioreg: str) -> float | Unknown:
    """Return the shortest idle time that ioreg prints, converted from nanoseconds to seconds."""
    times = [int(found) for found in _HID_IDLE.findall(ioreg)]
    return min(times) / 1e9 if times else Unknown("ioreg names no HIDIdleTime")


def session_idle_seconds(loginctl: str, now: float) -> float | Unknown:
    """Compute the idle seconds from `IdleHint` and `IdleSinceHint` (microseconds since the epoch)."""
    facts: dict[str, str] = dict(_PROPERTY.findall(loginctl))
    if facts.get("IdleHint") == "no":
        return 0.0
    since = facts.get("IdleSinceHint", "")
    if facts.get("IdleHint") != "yes" or not since.isdecimal():
        return Unknown("this session does not report whether it is idle")
    return max(0.0, now - int(since) / 1e6)


def monitor_idle_seconds(gdbus: str) -> float | Unknown:
    """Read "(uint64 milliseconds,)" and return seconds."""
    match = _UINT64.search(gdbus)
    return int(match[1]) / 1000 if match else Unknown("GNOME's idle monitor does not answer")


def _output(command: Sequence[str]) -> str | Unknown:
    """The output of a system program, or Unknown with the first line of its error output."""
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


def running_of(wanted: Iterable[str]) -> frozenset[str]:
    """Return those of the names under which a program runs now, by file name; case and .exe do not matter.

    This process itself does not count. A process that ends during the look, or may not be read, counts as not running.
    """
    names = {plain_name(name): name for name in wanted}
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            name = names.get(plain_name(process.name()))
        except psutil.Error:
            continue
        if name is not None and process.pid != os.getpid():
            found.add(name)
    return frozenset(found)


def plain_name(name: str) -> str:
    """Normalize a program's name for comparison: trimmed, lower case, without .exe."""
    return name.strip().lower().removesuffix(".exe")


TICKS = 2**32  # milliseconds after which Windows' counter restarts
BUSY, FULL_SCREEN_3D, PRESENTATION = 2, 3, 4  # of QUERY_USER_NOTIFICATION_STATE
_KNOWN_STATES = range(1, 8)


class LastInputInfo(ctypes.Structure):
    """The structure LASTINPUTINFO of the Windows API; dwTime is in milliseconds."""

    _fields_ = (("cbSize", ctypes.c_uint32), ("dwTime", ctypes.c_uint32))


def windows_idle_seconds() -> float | Unknown:
    """Return the seconds since the last input in this Windows session."""
    library: Any = ctypes
    info = LastInputInfo(ctypes.sizeof(LastInputInfo), 0)
    if not library.windll.user32.GetLastInputInfo(ctypes.byref(info)):
        return Unknown("Windows does not report the last input of this session")
    return idle_from_ticks(library.windll.kernel32.GetTickCount(), info.dwTime)


def idle_from_ticks(now: int, last_input: int) -> float:
    """Seconds between two counts of milliseconds, which restart after 49.7 days and may be negative in ctypes."""
    return (now - last_input) % TICKS / 1000


def windows_is_full_screen() -> bool | Unknown:
    """Return whether a program fills the screen, by the state in which Windows holds notifications back."""
    library: Any = ctypes
    state = ctypes.c_int(0)
    result: int = library.windll.shell32.SHQueryUserNotificationState(ctypes.byref(state))
    return full_screen_from_state(result, state.value)


def full_screen_from_state(result: int, state: int) -> bool | Unknown:
    """Interpret a QUERY_USER_NOTIFICATION_STATE; `result` is the HRESULT of the call."""
    if result != 0 or state not in _KNOWN_STATES:
        return Unknown("Windows does not report whether a program fills the screen")
    return state in (BUSY, FULL_SCREEN_3D, PRESENTATION)


RETRY_SECONDS = 10.0
T = TypeVar("T")


class X11Display:
    """A connection to an X display, opened at the first look and again after the display went away.

    Use it from one thread at a time. It needs python-xlib, because the C library ends the whole process when its
    display goes away.
    """

    def __init__(self, name: str) -> None:
        """`name` has the form of the variable DISPLAY."""
        self._name = name
        self._display: Any = None
        self._failed_at = -RETRY_SECONDS

    def idle_seconds(self) -> float | Unknown:
        """Return the seconds since the last input on this display."""
        return self._asked(_idle_seconds)

    def is_full_screen(self) -> bool | Unknown:
        """Return whether the active window declares that it fills the screen."""
        return self._asked(_is_full_screen)

    def close(self) -> None:
        """Close the connection; the next look opens another one."""
        display, self._display = self._display, None
        if display is not None:
            display.display.socket.close()  # display.close() would first write to a server that may be gone

    def _asked(self, question: Callable[[Any], T | Unknown]) -> T | Unknown:
        try:
            errors = import_module("Xlib.error")
        except ImportError:  # a bundle without python-xlib must not end the node
            return Unknown("python-xlib is not installed")
        failures = (errors.DisplayError, errors.ConnectionClosedError, errors.XauthError, OSError)
        try:
            if self._display is None and time.monotonic() - self._failed_at < RETRY_SECONDS:
                return Unknown(f"the display {self._name} does not answer")
            if self._display is None:
                self._display = import_module("Xlib.display").Display(self._name)
            return question(self._display)
        except errors.XError:  # the window was closed during the look
            return Unknown("the active window has just gone")
        except failures as error:
            self.close()
            self._failed_at = time.monotonic()
            return Unknown(f"the display {self._name} does not answer ({type(error).__name__})")


def _idle_seconds(display: Any) -> float | Unknown:
    if display.query_extension("MIT-SCREEN-SAVER") is None:
        return Unknown("the display has no MIT-SCREEN-SAVER extension")
    return display.screen().root.screensaver_query_info().idle / 1000.0


def _is_full_screen(display: Any) -> bool | Unknown:
    """Read the window state that window managers and programs share (Extended Window Manager Hints)."""
    root = display.screen().root
    if root.get_full_property(display.intern_atom("_NET_SUPPORTED"), 0) is None:
        return Unknown("no window manager reports which window is active")
    active = root.get_full_property(display.intern_atom("_NET_ACTIVE_WINDOW"), 0)
    if active is None or not active.value or not active.value[0]:
        return False
    window = display.create_resource_object("window", active.value[0])
    state = window.get_full_property(display.intern_atom("_NET_WM_STATE"), 0)
    return state is not None and display.intern_atom("_NET_WM_STATE_FULLSCREEN") in state.value


METERED_LOOK_SECONDS = 60.0  # between two questions about the connection: on Windows each starts PowerShell
SLOW_LOOK_SECONDS = 5.0  # between two looks that start a program or walk all processes


class Sensors:
    """Reads the sensors that the rules require, and no others. Use it from one thread at a time."""

    def __init__(
        self,
        system: str = sys.platform,
        environment: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment` is the process's own by default."""
        self._system = system
        self._environment = os.environ if environment is None else environment
        self._monotonic = monotonic
        display = self._environment.get("DISPLAY", "") if system == "linux" else ""
        self._x11 = X11Display(display) if display else None
        self._is_wayland = system == "linux" and bool(self._environment.get("WAYLAND_DISPLAY"))
        self._gpu: tuple[str, GpuSensor] | None = None
        self._kept: dict[object, tuple[float, Any]] = {}

    def look(self, rules: Rules, gpu_uuid: str | None) -> HostReadings:
        """Read the sensors now. `gpu_uuid` names the accelerator that trains, if it is an NVIDIA GPU."""
        programs = rules.programs
        return HostReadings(
            idle_seconds=self._idle() if rules.only_idle else None,
            on_battery=self._sometimes("battery", runs_on_battery) if rules.pause_on_battery else None,
            full_screen=self._full_screen() if rules.pause_on_full_screen else None,
            metered=self._sometimes("metered", self._is_metered, METERED_LOOK_SECONDS) if rules.spare_metered else None,
            programs=self._sometimes(programs, lambda: running_of(programs)) if programs else None,
            gpu=self._look_at_gpu(gpu_uuid, rules) if rules.limits_gpu or (gpu_uuid and rules.shares_gpu) else None,
        )

    def close(self) -> None:
        """Close the connection to the display; the next look opens it again."""
        if self._x11 is not None:
            self._x11.close()

    def _idle(self) -> float | Unknown:
        """Idle seconds from the first source that knows them."""
        if self._system == "win32":
            return windows_idle_seconds()
        if self._system == "darwin":
            return self._aged("idle", macos_idle_seconds)
        reading = Unknown("this system does not report it")
        if self._x11 is not None and not self._is_wayland:  # under Wayland it sees only the input of X11 programs
            reading = self._x11.idle_seconds()
        elif self._is_wayland:
            reading = self._aged("gnome", gnome_idle_seconds)
        if isinstance(reading, Unknown) and self._system == "linux":
            session = self._aged("logind", logind_idle_seconds)
            has_display = self._x11 is not None or self._is_wayland
            return Unknown(f"{reading.why}; {session.why}") if isinstance(session, Unknown) and has_display else session
        return reading

    def _is_metered(self) -> bool | Unknown:
        if self._system == "win32":
            return windows_is_metered()
        if self._system == "linux":
            return networkmanager_is_metered()
        if self._system == "darwin":
            return macos_is_metered()
        return Unknown("this system does not report it")

    def _full_screen(self) -> bool | Unknown:
        if self._system == "win32":
            return windows_is_full_screen()
        if self._x11 is None:
            return Unknown("there is no display" if self._system == "linux" else "this system does not report it")
        reading = self._x11.is_full_screen()
        return (
            reading
            if reading is True or not self._is_wayland
            else Unknown("Wayland shows older programs' windows only")
        )

    def _look_at_gpu(self, uuid: str | None, rules: Rules) -> GpuReading | Unknown:
        if uuid is None:
            return Unknown("no NVIDIA GPU is training here now")
        if self._gpu is None or self._gpu[0] != uuid:
            self._gpu = uuid, GpuSensor(uuid)
        return self._gpu[1].look(others=rules.shares_gpu)

    def _aged(self, key: str, look: Callable[[], float | Unknown]) -> float | Unknown:
        """The last reading plus its age: an idle user counts as idle until the next reading."""
        reading = self._sometimes(key, look)
        return reading if isinstance(reading, Unknown) else reading + self._monotonic() - self._kept[key][0]

    def _sometimes(self, key: object, look: Callable[[], Any], seconds: float = SLOW_LOOK_SECONDS) -> Any:
        now = self._monotonic()
        if key not in self._kept or now - self._kept[key][0] >= seconds:
            self._kept[key] = now, look()
        return self._kept[key][1]


MOST_LOOK_SECONDS = 10.0


class SensorThread:
    """Reads the sensors in a worker thread.

    While the display leaves a call unanswered, the sensors are read without it, so that every other rule still applies.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, most_seconds: float = MOST_LOOK_SECONDS) -> None:
        """`environment` is the process's own by default."""
        environment = os.environ if environment is None else environment
        self._sensors = Sensors(environment=environment)
        self._without_display = Sensors(environment={**environment, "DISPLAY": ""})
        self._most_seconds = most_seconds
        self._answered = Event()  # set when the last call of `_sensors` has returned
        self._answered.set()

    async def look(self, rules: Rules, gpu_uuid: str | None) -> HostReadings:
        """Read the sensors as `Sensors.look` does. Cancellation does not wait for a display that does not answer."""
        if self._answered.is_set():
            self._answered = Event()
            with anyio.move_on_after(self._most_seconds):
                return await anyio.to_thread.run_sync(
                    self._asked, self._answered, rules, gpu_uuid, abandon_on_cancel=True
                )
        return await anyio.to_thread.run_sync(self._without_display.look, rules, gpu_uuid)

    def close(self) -> None:
        """Close the connections. That also ends a call that is still unanswered."""
        self._sensors.close()
        self._without_display.close()

    def _asked(self, answered: Event, rules: Rules, gpu_uuid: str | None) -> HostReadings:
        try:
            return self._sensors.look(rules, gpu_uuid)
        finally:
            answered.set()
